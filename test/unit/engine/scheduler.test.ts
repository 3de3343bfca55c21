import { describe, expect, test } from "bun:test";
import { maxBatchTokens } from "../../../src/engine/step-budget.ts";
import { expectedTokens } from "../../support/fake-backend.ts";
import { chunks, firstToken, generated, runAll, scheduler, sequence, step, steps, VOCAB } from "./factories.ts";

const shared = (length: number): number[] => Array.from({ length }, (_, index) => (index * 3) % VOCAB);

describe("chunks and budget", () => {
  test("a long prompt is split by the budget and samples on the step that completes it", () => {
    const b = scheduler({ chunkedPrefillSize: 64 });
    const a = sequence({ prompt: 150 });
    b.scheduler.add(a);
    const traces = steps(b, 3);
    expect(chunks(traces, a)).toEqual([64, 64, 22]);
    expect(firstToken(traces, a)).toBe(2);
  });

  test("decodes come first and prefills get what is left of the budget", () => {
    const b = scheduler({ chunkedPrefillSize: 32 });
    const decoding = sequence({ prompt: 8, maxTokens: 50 });
    b.scheduler.add(decoding);
    step(b);
    const long = sequence({ prompt: 100 });
    b.scheduler.add(long);
    const traces = steps(b, 4);
    expect(chunks(traces, decoding)).toEqual([1, 1, 1, 1]);
    expect(chunks(traces, long)).toEqual([31, 31, 31, 7]);
  });

  test("more decodes than the budget all run, and a prefill still gets a page of tokens", () => {
    const b = scheduler({ chunkedPrefillSize: 16, maxNumSeqs: 24 });
    const decoding = Array.from({ length: 23 }, () => sequence({ prompt: 1, maxTokens: 60 }));
    decoding.forEach((s) => b.scheduler.add(s));
    steps(b, 3);
    const late = sequence({ prompt: 40 });
    b.scheduler.add(late);
    const traces = steps(b, 3);
    expect(traces.map(({ rows }) => rows.length)).toEqual([24, 24, 24]);
    expect(chunks(traces, late)).toEqual([16, 16, 8]);
    expect(maxBatchTokens({ chunkedPrefillSize: 16, maxNumSeqs: 24 })).toBe(39);
  });

  test.each([15, 16, 17, 31, 32, 33, 47, 48, 49])("chunk 16, prompt %d: no empty chunk, one sample", (prompt) => {
    const b = scheduler({ chunkedPrefillSize: 16 });
    const a = sequence({ prompt, maxTokens: 1 });
    b.scheduler.add(a);
    const traces = runAll(b);
    expect(chunks(traces, a).reduce((sum, n) => sum + n)).toBe(prompt);
    expect(traces.length).toBe(Math.ceil(prompt / 16));
  });

  test("no more than maxNumSeqs run", () => {
    const b = scheduler({ maxNumSeqs: 2 });
    for (let i = 0; i < 5; i++) b.scheduler.add(sequence());
    step(b);
    expect([b.scheduler.running.length, b.scheduler.waiting.length]).toEqual([2, 3]);
    runAll(b);
  });
});

describe("sharing between prefills", () => {
  test("a short newcomer gets its first token before a long prompt that came first", () => {
    const b = scheduler({ chunkedPrefillSize: 512, pages: 2000 });
    const decoding = sequence({ prompt: 10, maxTokens: 200 });
    b.scheduler.add(decoding);
    step(b);
    const long = sequence({ prompt: 8000 });
    b.scheduler.add(long);
    steps(b, 3);
    const short = sequence({ prompt: 20 });
    b.scheduler.add(short);
    const traces = steps(b, 20);
    expect(firstToken(traces, short)).toBe(0);
    expect(firstToken(traces, long)).toBeGreaterThan(5);
    expect(chunks(traces, decoding)).not.toContain(0);
  });

  test("also behind two long prompts", () => {
    const b = scheduler({ chunkedPrefillSize: 64, pages: 2000 });
    for (const prompt of [3000, 2000]) b.scheduler.add(sequence({ prompt }));
    steps(b, 2);
    const short = sequence({ prompt: 20 });
    b.scheduler.add(short);
    expect(firstToken(steps(b, 1), short)).toBe(0);
  });

  test("the oldest prefill keeps half of the budget however many short prompts arrive", () => {
    const b = scheduler({ chunkedPrefillSize: 64, pages: 2000, maxNumSeqs: 8 });
    const long = sequence({ prompt: 640 });
    b.scheduler.add(long);
    let took = 0;
    while (long.numGenerated === 0) {
      while (b.scheduler.waiting.length < 8) b.scheduler.add(sequence({ prompt: 30, maxTokens: 1 }));
      step(b);
      if (++took > 20) throw new Error("starved: 640 tokens at half of 64 take 20 steps");
    }
  });

  test("equal prompts run one after the other, not slower together", () => {
    const b = scheduler({ chunkedPrefillSize: 64 });
    const [first, second] = [sequence({ prompt: 256 }), sequence({ prompt: 256 })];
    b.scheduler.add(first);
    b.scheduler.add(second);
    const traces = steps(b, 9);
    expect([firstToken(traces, first), firstToken(traces, second)]).toEqual([3, 8]);
  });

  test("higher priority is admitted and computed first", () => {
    const b = scheduler({ chunkedPrefillSize: 64, maxNumSeqs: 2 });
    const low = sequence({ prompt: 60 });
    const high = sequence({ prompt: 200, priority: 5 });
    b.scheduler.add(low);
    b.scheduler.add(high);
    const traces = steps(b, 5);
    expect(firstToken(traces, high)).toBeLessThan(firstToken(traces, low));
  });
});

describe("endings", () => {
  const next = (tokens: readonly number[]): number => (tokens.length === 23 ? 7 : 1);
  test.each([
    ["eos", { eos: [7] }, "stop", 4],
    ["eos ignored", { eos: [7], ignoreEos: true, maxTokens: 9 }, "length", 9],
    ["stop id", { stops: [7], ignoreEos: true }, "stop", 4],
    ["max tokens", { maxTokens: 2 }, "length", 2],
    ["eos on the last allowed token", { eos: [7], maxTokens: 4 }, "stop", 4],
  ] as const)("%s", (_, sketch, reason, count) => {
    const b = scheduler({ next });
    const a = sequence({ prompt: 20, maxTokens: null, ...sketch, eos: [...("eos" in sketch ? sketch.eos : [])], stops: [...("stops" in sketch ? sketch.stops : [])] });
    b.scheduler.add(a);
    runAll(b);
    expect([a.finishReason, a.numGenerated]).toEqual([reason, count]);
  });

  test.each([[98, 2], [99, 1]])("context 100, prompt %d: %d tokens, then length", (prompt, count) => {
    const b = scheduler({ contextLength: 100 });
    const a = sequence({ prompt, maxTokens: null });
    b.scheduler.add(a);
    runAll(b);
    expect([a.finishReason, a.numGenerated]).toEqual(["length", count]);
  });

  test("a sequence that cannot fit is refused at once", () => {
    expect(() => scheduler({ pages: 16 }).scheduler.add(sequence({ prompt: 300 }))).toThrow("300 tokens");
    expect(() => scheduler({ contextLength: 100 }).scheduler.add(sequence({ prompt: 100 }))).toThrow("context of 100");
  });

  test("abort frees a waiting and a running sequence, once", () => {
    const b = scheduler({ maxNumSeqs: 1 });
    const [running, waiting] = [sequence({ prompt: 40 }), sequence()];
    b.scheduler.add(running);
    b.scheduler.add(waiting);
    step(b);
    expect(b.scheduler.abort(waiting, "cancelled")?.finishReason).toBe("cancelled");
    expect(b.scheduler.abort(running, "cancelled")?.finishReason).toBe("cancelled");
    expect(b.scheduler.abort(running, "cancelled")).toBeNull();
    expect(b.backend.poolStats()).toMatchObject({ held: 0, openSeqs: 0, cached: 2 });
    expect(b.scheduler.hasWork).toBe(false);
  });
});

describe("prefix cache", () => {
  test.each([15, 16, 17, 31, 32, 33, 48])("the same prompt of %d tokens again: all full pages but the last token's", (length) => {
    const b = scheduler();
    const [cold, warm] = [sequence({ prompt: shared(length) }), sequence({ prompt: shared(length) })];
    b.scheduler.add(cold);
    runAll(b);
    b.scheduler.add(warm);
    runAll(b);
    expect(warm.numCached).toBe(16 * Math.floor((length - 1) / 16));
    expect(generated(warm)).toEqual(generated(cold));
  });

  test.each([100, 112, 113])("chunks of 48 after a cached prefix of 64, prompt %d", (length) => {
    const b = scheduler({ chunkedPrefillSize: 48 });
    b.scheduler.add(sequence({ prompt: shared(65), maxTokens: 1 }));
    runAll(b);
    const a = sequence({ prompt: shared(length), maxTokens: 1 });
    b.scheduler.add(a);
    const traces = runAll(b);
    expect(a.numCached).toBe(64);
    expect(chunks(traces, a)).toEqual(length - 64 <= 48 ? [length - 64] : [48, length - 112]);
    expect(generated(a)).toEqual(expectedTokens(shared(length), 0n, 1, VOCAB));
  });

  test("domains share nothing", () => {
    const b = scheduler();
    for (const domain of [0n, 1n, 0xffffffffffffffffn]) {
      const a = sequence({ prompt: shared(40), domain });
      b.scheduler.add(a);
      runAll(b);
      expect(a.numCached).toBe(0);
    }
    const again = sequence({ prompt: shared(40), domain: 0xffffffffffffffffn });
    b.scheduler.add(again);
    runAll(b);
    expect(again.numCached).toBe(32);
  });

  test("internal requests leave no page behind, and those they used stay cached", () => {
    const b = scheduler();
    b.scheduler.add(sequence({ prompt: shared(40), internal: true }));
    runAll(b);
    expect(b.backend.poolStats().cached).toBe(0);
    b.scheduler.add(sequence({ prompt: shared(33), maxTokens: 1 }));
    runAll(b);
    b.scheduler.add(sequence({ prompt: shared(60), internal: true }));
    runAll(b);
    expect(b.backend.poolStats()).toMatchObject({ cached: 2, held: 0 });
  });

  test("without the prefix cache nothing is kept", () => {
    const b = scheduler({ prefixCache: false });
    for (let i = 0; i < 2; i++) {
      const a = sequence({ prompt: shared(40) });
      b.scheduler.add(a);
      runAll(b);
      expect(a.numCached).toBe(0);
    }
    expect(b.backend.poolStats()).toMatchObject({ cached: 0, free: 100 });
  });
});

describe("preemption", () => {
  test.each([4, 8])("a pool of 16 pages and %d sequences of 60 + 128 tokens: all finish with the tokens of a solo run", (count) => {
    const b = scheduler({ pages: 16, maxNumSeqs: 8 });
    const all = Array.from({ length: count }, () => sequence({ prompt: 60, maxTokens: 128 }));
    all.forEach((s) => b.scheduler.add(s));
    runAll(b);
    for (const s of all) expect(generated(s)).toEqual(expectedTokens([...s.tokens.subarray(0, 60)], 0n, 128, VOCAB));
    expect(b.scheduler.preemptions).toBeGreaterThan(0);
    expect(b.backend.poolStats().held).toBe(0);
  });

  test("the latest of the lowest priority goes, its full pages enter the cache, and nobody is admitted in that step", () => {
    const b = scheduler({ pages: 6, maxNumSeqs: 2 });
    const first = sequence({ prompt: 31, maxTokens: 40, priority: 1 });
    const second = sequence({ prompt: 31, maxTokens: 40 });
    b.scheduler.add(first);
    b.scheduler.add(second);
    step(b);
    // Waits for a slot only: it would fit as soon as one is free.
    const urgent = sequence({ prompt: 1, priority: 2 });
    b.scheduler.add(urgent);
    while (second.preemptions === 0) step(b);
    expect(second.status).toBe("waiting");
    expect(b.scheduler.running).toEqual([first]);
    expect(b.scheduler.waiting).toEqual([urgent, second]);
    expect(b.backend.poolStats().cached).toBeGreaterThan(0);
    step(b);
    expect(b.scheduler.running).toEqual([urgent, first]);
    const outputs = runAll(b).flatMap((trace) => trace.outputs).filter((output) => output.sequence === second && output.finishReason !== null);
    expect(outputs.length).toBe(1);
    expect(generated(second)).toEqual(expectedTokens([...second.tokens.subarray(0, 31)], 0n, 40, VOCAB));
  });

  test("cached tokens in the usage are those of the first admission", () => {
    const b = scheduler({ pages: 6, maxNumSeqs: 2 });
    const [first, second] = [sequence({ prompt: 31, maxTokens: 40 }), sequence({ prompt: 31, maxTokens: 40 })];
    b.scheduler.add(first);
    b.scheduler.add(second);
    let attachedAgain = 0;
    while (b.scheduler.hasWork) {
      step(b);
      if (second.preemptions > 0) attachedAgain = Math.max(attachedAgain, second.numAttached);
    }
    expect([second.preemptions > 0, attachedAgain > 0, second.numCached]).toEqual([true, true, 0]);
  });

  test("a large request that waits for pages is not overtaken for ever", () => {
    const b = scheduler({ pages: 20, maxNumSeqs: 8 });
    for (let i = 0; i < 4; i++) b.scheduler.add(sequence({ prompt: 30, maxTokens: 10 }));
    step(b);
    const large = sequence({ prompt: 280, maxTokens: 1 });
    b.scheduler.add(large);
    let took = 0;
    while (large.finishReason === null) {
      if (b.scheduler.waiting.length < 4) b.scheduler.add(sequence({ prompt: 30, maxTokens: 10 }));
      step(b);
      if (++took > 100) throw new Error("starved");
    }
    runAll(b);
  });

  test("prefills that hold each other's pages do not deadlock", () => {
    const b = scheduler({ pages: 8, maxNumSeqs: 4, chunkedPrefillSize: 32 });
    const decoding = sequence({ prompt: 14, maxTokens: 60 });
    b.scheduler.add(decoding);
    step(b);
    for (let i = 0; i < 3; i++) b.scheduler.add(sequence({ prompt: 60, maxTokens: 3 }));
    runAll(b);
    expect(generated(decoding).length).toBe(60);
  });
});
