/** A device that queues steps has the next one before the result of the one before is taken in. */
import { describe, expect, test } from "bun:test";
import { LS_PLAN_HEADER_WORDS, LS_PLAN_ROW_WORDS, ls_status } from "../../../src/engine/native/abi.gen.ts";
import { NativeError } from "../../../src/engine/native/backend.ts";
import { StepPipeline } from "../../../src/engine/step-pipeline.ts";
import { expectedTokens } from "../../support/fake-backend.ts";
import { advance, complete, generated, scheduler, sequence, submit, VOCAB, type Bench } from "./factories.ts";

/** Runs everything with two steps submitted; the plans' lengths in rows. */
function run(bench: Bench): number[] {
  const rows: number[] = [];
  while (bench.scheduler.hasWork || bench.submitted.length > 0) {
    const trace = advance(bench, 2);
    if (trace.rows.length > 0) rows.push(trace.rows.length);
    if (rows.length > 1000) throw new Error("no end in sight");
  }
  return rows;
}

/** The first token of each row of the plan that was packed last. */
function firstTokens({ plan }: Bench): number[] {
  const rows = plan.words[0]!;
  let at = LS_PLAN_HEADER_WORDS + rows * LS_PLAN_ROW_WORDS;
  return Array.from({ length: rows }, (_, row) => {
    const token = plan.words[at]!;
    at += plan.words[LS_PLAN_HEADER_WORDS + row * LS_PLAN_ROW_WORDS + 2]!;
    return token;
  });
}

describe("planning ahead", () => {
  test("a token that is not known yet is left to the device", () => {
    const bench = scheduler();
    const one = sequence({ prompt: 20, maxTokens: 5 });
    bench.scheduler.add(one);
    submit(bench);
    expect(submit(bench).map(({ start, length, sample }) => ({ start, length, sample }))).toEqual([{ start: 20, length: 1, sample: true }]);
    expect(firstTokens(bench)).toEqual([-1]);
    expect(one.unresolved).toBe(2);
    complete(bench);
    expect(one.unresolved).toBe(1);
    run(bench);
    expect(generated(one)).toEqual(expectedTokens(Array.from(one.tokens.subarray(0, 20)), 0n, 5, VOCAB));
  });

  test("chunks of a long prompt follow each other, and decodes go with them", () => {
    const bench = scheduler({ chunkedPrefillSize: 32 });
    const long = sequence({ prompt: 100, maxTokens: 2 });
    const short = sequence({ prompt: 5, maxTokens: 8 });
    bench.scheduler.add(short);
    bench.scheduler.add(long);
    run(bench);
    for (const s of [long, short]) expect(generated(s)).toEqual(expectedTokens(Array.from(s.tokens.subarray(0, s.promptLength)), 0n, s.numGenerated, VOCAB));
    expect(bench.dead).toBe(0);
  });

  test.each([["max_tokens", { maxTokens: 3 }, 200], ["the context", { maxTokens: null }, 23], ["a copy for another engine", { maxTokens: 8, stage: true }, 200]] as const)("an end known by its place has no row after it: %s", (_, sketch, contextLength) => {
    const bench = scheduler({ contextLength });
    const one = sequence({ prompt: 20, ...sketch });
    bench.scheduler.add(one);
    const steps = run(bench);
    expect(steps.length).toBe("stage" in sketch ? 1 : 3);
    expect(bench.dead).toBe(0);
    expect(one.finishReason).toBe("length");
  });

  test("an end that the token tells: what was computed behind it is nobody's", () => {
    const bench = scheduler({ next: (tokens) => (tokens.length === 22 ? 9 : 7) });
    const one = sequence({ prompt: 20, maxTokens: 50, eos: [9] });
    const other = sequence({ prompt: 30, maxTokens: 6 });
    bench.scheduler.add(one);
    bench.scheduler.add(other);
    run(bench);
    expect(generated(one)).toEqual([7, 7, 9]);
    expect(one).toMatchObject({ finishReason: "stop", numGenerated: 3, unresolved: 0 });
    expect(other.numGenerated).toBe(6);
    expect(bench.dead).toBe(1);
    expect(bench.backend.poolStats()).toMatchObject({ held: 0, openSeqs: 0 });
  });

  test("the slot of a sequence that ended may be another's when the rest of its results comes", () => {
    const bench = scheduler({ maxNumSeqs: 1, next: (tokens) => (tokens.length === 21 ? 9 : 7) });
    const first = sequence({ prompt: 20, maxTokens: 50, eos: [9] });
    const second = sequence({ prompt: 40, maxTokens: 3 });
    bench.scheduler.add(first);
    bench.scheduler.add(second);
    submit(bench);
    submit(bench);
    complete(bench);
    submit(bench);
    expect(complete(bench).map((output) => output.finishReason)).toEqual(["stop"]);
    expect(submit(bench).map((row) => row.sequence)).toEqual([second]);
    expect(complete(bench)).toEqual([]);
    run(bench);
    expect(generated(first)).toEqual([7, 9]);
    expect(generated(second)).toEqual([7, 7, 7]);
  });

  test("a cancel while results are outstanding frees at once", () => {
    const bench = scheduler({ pages: 4 });
    const one = sequence({ prompt: 20, maxTokens: 30 });
    bench.scheduler.add(one);
    submit(bench);
    submit(bench);
    expect(bench.scheduler.abort(one, "cancelled")).toMatchObject({ token: null, finishReason: "cancelled" });
    expect(one).toMatchObject({ numGenerated: 0, unresolved: 0 });
    expect(bench.backend.poolStats()).toMatchObject({ held: 0, openSeqs: 0 });
    expect(complete(bench)).toEqual([]);
    expect(complete(bench)).toEqual([]);
  });

  test("who has to give way does so once its tokens are known", () => {
    // Two sequences that grow into each other's pages.
    const bench = scheduler({ pages: 6, prefixCache: false });
    const one = sequence({ prompt: 30, maxTokens: 40 });
    const two = sequence({ prompt: 30, maxTokens: 40 });
    bench.scheduler.add(one);
    bench.scheduler.add(two);
    let held = 0;
    while (bench.scheduler.preemptions === 0) {
      const before = bench.submitted.length;
      const { rows } = advance(bench, 2);
      if (rows.length === 0 && before > 0) held++;
    }
    expect(held).toBeGreaterThan(0);
    run(bench);
    for (const s of [one, two]) expect(generated(s)).toEqual(expectedTokens(Array.from(s.tokens.subarray(0, 30)), 0n, 40, VOCAB));
  });
});

describe("StepPipeline", () => {
  /** Calls of the device as they come: s = submit, w = wait. */
  function pipeline(bench: Bench, depth: number) {
    const calls: string[] = [];
    const device = {
      submit: (words: Int32Array, length: number) => {
        bench.backend.submit(words, length);
        calls.push(`s${words[2]}`);
      },
      wait: (result: Int32Array) => {
        const words = bench.backend.wait(result);
        calls.push(`w${result[1]}`);
        return words;
      },
    };
    return { calls, device, steps: new StepPipeline(device, bench.plan, bench.scheduler, { depth, strict: false }, () => 0) };
  }

  function drive(bench: Bench, steps: StepPipeline): void {
    for (;;) {
      const rows = bench.scheduler.schedule();
      const submitted = rows.length > 0 && steps.submit(rows);
      if (submitted ? steps.full : steps.busy) steps.complete();
      else if (rows.length === 0) return;
    }
  }

  test.each([[1, "s1 w1 s2 w2 s3 w3"], [2, "s1 s2 w1 s3 w2 w3"]])("with %d to submit: %s", (depth, expected) => {
    const bench = scheduler();
    const { calls, steps } = pipeline(bench, depth);
    bench.scheduler.add(sequence({ prompt: 20, maxTokens: 3 }));
    drive(bench, steps);
    expect(calls.join(" ")).toBe(expected);
    expect(steps.steps).toBe(3);
  });

  test.each([0, 3])("%d steps to submit are refused", (depth) => {
    expect(() => pipeline(scheduler(), depth)).toThrow(`${depth} steps to submit, expected 1 to 2`);
  });

  test("a plan that the pool has no pages for: results first, then the last one gives way", () => {
    const bench = scheduler();
    const { calls, device, steps } = pipeline(bench, 2);
    const { submit: accept } = device;
    let refused = 0;
    device.submit = (words, length) => {
      if (words[2] === 3 && refused < 2) {
        calls.push(`r${++refused}`);
        throw new NativeError(ls_status.LS_NO_PAGES, "ls_step_submit", "no pages");
      }
      accept(words, length);
    };
    const both = [sequence({ prompt: 20, maxTokens: 5 }), sequence({ prompt: 20, maxTokens: 5 })];
    for (const s of both) bench.scheduler.add(s);
    drive(bench, steps);
    expect(calls.join(" ")).toStartWith("s1 s2 w1 r1 w2 r2 s3");
    expect(bench.scheduler.preemptions).toBe(1);
    for (const s of both) expect(generated(s)).toEqual(expectedTokens(Array.from(s.tokens.subarray(0, 20)), 0n, 5, VOCAB));
  });

  test("a wait without a step", () => {
    expect(() => pipeline(scheduler(), 2).steps.complete()).toThrow("no step is submitted");
  });
});
