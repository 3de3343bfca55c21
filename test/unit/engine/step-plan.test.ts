import { describe, expect, test } from "bun:test";
import { LS_PLAN_HEADER_WORDS, LS_PLAN_ROW_WORDS } from "../../../src/engine/native/abi.gen.ts";
import { Sequence } from "../../../src/engine/sequence.ts";
import { StepPlan } from "../../../src/engine/step-plan.ts";
import { floatToWord, joinU64, splitU64, wordToFloat } from "../../../src/util/words.ts";
import { sequence } from "./factories.ts";

function sampled(slot: number, prompt: number[], seed: bigint, logprobs: number | null): Sequence {
  const s = new Sequence({
    key: 1, prompt, sampling: { temperature: 0.8, topP: 0.95, seed, maxTokens: 4, ignoreEos: false, logprobs },
    eosTokenIds: [], stopTokenIds: [], priority: 0, cacheDomain: 0n, internal: false, submittedAt: 0,
  });
  s.slot = slot;
  return s;
}

describe("pack", () => {
  test("header, rows, then the tokens of all rows", () => {
    const plan = new StepPlan(4, 64);
    const a = sampled(2, [10, 11, 12, 13], 0x1234_5678_9abc_def0n, 20);
    const b = sampled(0, [20, 21, 22], -1n, null);
    plan.pack([{ sequence: a, start: 1, length: 3, sample: true }, { sequence: b, start: 0, length: 2, sample: false }], 7);
    const words = [...plan.words.subarray(0, plan.length)];
    expect(words.slice(0, LS_PLAN_HEADER_WORDS)).toEqual([2, 5, 7, 0, 0, 0, 0, 0]);
    expect(words.slice(8, 16)).toEqual([2, 1, 3, 1 | (20 << 8), floatToWord(0.8), floatToWord(0.95), 0x9abcdef0 | 0, 0x12345678]);
    expect(words.slice(16, 24)).toEqual([0, 0, 2, 0, floatToWord(0.8), floatToWord(0.95), -1, -1]);
    expect(words.slice(24)).toEqual([11, 12, 13, 20, 21]);
  });

  test("a top_p below the smallest f32 stays above zero", () => {
    const plan = new StepPlan(1, 4);
    const a = sampled(0, [1, 2], 1n, null);
    a.sampling.topP = 1e-46;
    plan.pack([{ sequence: a, start: 0, length: 2, sample: true }], 1);
    expect(wordToFloat(plan.words[LS_PLAN_HEADER_WORDS + 5]!)).toBeGreaterThan(0);
  });

  test("a step that does not fit the buffer is an error, not a cut", () => {
    const plan = new StepPlan(1, 4);
    const a = sequence({ prompt: 30 });
    a.slot = 0;
    expect(() => plan.pack([{ sequence: a, start: 0, length: 29, sample: false }], 1)).toThrow("plan buffer");
    expect(plan.words.length).toBe(LS_PLAN_HEADER_WORDS + LS_PLAN_ROW_WORDS + 4);
  });

  test("tokens appended past the first buffer are packed too", () => {
    const plan = new StepPlan(1, 4);
    const a = sequence({ prompt: 3 });
    for (let token = 0; token < 500; token++) a.append(token);
    a.slot = 0;
    plan.pack([{ sequence: a, start: 501, length: 2, sample: true }], 1);
    expect([...plan.words.subarray(16, plan.length)]).toEqual([498, 499]);
  });
});

describe("unpack", () => {
  const result = (...words: number[]): [StepPlan, number] => {
    const plan = new StepPlan(4, 8);
    plan.result.set(words);
    return [plan, words.length];
  };

  test("counts, sampled and unsampled rows, alternatives", () => {
    const [plan, length] = result(2, 9, 5, 3, 2, 10, 1234, 0, 1, 42, floatToWord(-0.25), 2, 42, floatToWord(-0.25), 7, floatToWord(-3), 3, -1, 0, 0);
    expect(plan.unpack(length)).toEqual({
      step: 9, free: 5, cached: 3, held: 2, total: 10, micros: 1234,
      rows: [{ slot: 1, token: 42, logprob: -0.25, top: [[42, -0.25], [7, -3]] }, { slot: 3, token: null, logprob: 0, top: [] }],
    });
  });

  test("logprobs are finite whatever native reports", () => {
    const [plan, length] = result(1, 1, 0, 0, 1, 1, 0, 0, 0, 5, floatToWord(-Infinity), 2, 5, floatToWord(NaN), 6, floatToWord(-1e30));
    expect(plan.unpack(length).rows[0]).toEqual({ slot: 0, token: 5, logprob: -9999, top: [[5, -9999], [6, -9999]] });
  });

  test.each([
    ["cut inside a row", [1, 1, 0, 0, 1, 1, 0, 0, 0, 5], "inside a record"],
    ["cut inside the alternatives", [1, 1, 0, 0, 1, 1, 0, 0, 0, 5, 0, 2, 5, 0], "inside a record"],
    ["too many alternatives", [1, 1, 0, 0, 1, 1, 0, 0, 0, 5, 0, 21], "21 alternatives"],
    ["words left over", [1, 1, 0, 0, 1, 1, 0, 0, 0, 5, 0, 0, 9], "13 words"],
  ])("%s is an error", (_, words, message) => {
    const [plan, length] = result(...(words as number[]));
    expect(() => plan.unpack(length)).toThrow(message as string);
  });
});

test.each([0n, 1n, -1n, 2n ** 53n + 1n, 2n ** 63n, 2n ** 64n - 1n, -(2n ** 63n), 9632640820254868150n])("64-bit id %d survives two words", (id) => {
  expect(joinU64(...splitU64(id))).toBe(BigInt.asUintN(64, id));
});

test("floats survive a word", () => {
  for (const value of [0, 1, -0.5, 9.999999717180685e-10, 1e30]) expect(wordToFloat(floatToWord(value))).toBe(Math.fround(value));
});
