import { describe, expect, test } from "bun:test";
import { Engine } from "../../../src/engine/engine.ts";
import { EngineError } from "../../../src/engine/errors.ts";
import type { FinishedRequest, KvEvent, StepOutput } from "../../../src/engine/types.ts";
import { expectedTokens } from "../../support/fake-backend.ts";
import { collect, fakeEngine, fakeOptions, request, WORKER_ENTRY } from "../../support/fake-engine.ts";

/** Waits for a condition, at most 20 s. */
async function until(condition: () => boolean, what: string): Promise<void> {
  for (const deadline = Date.now() + 20_000; !condition(); await Bun.sleep(1)) if (Date.now() > deadline) throw new Error(`never happened: ${what}`);
}

async function failure(promise: Promise<unknown>): Promise<EngineError> {
  const error = await promise.then(() => null, (reason: unknown) => reason);
  if (!(error instanceof EngineError)) throw new Error(`expected an EngineError, got ${error}`);
  return error;
}

const prompt = (length: number, seed = 1): number[] => Array.from({ length }, (_, index) => (index * seed + seed) % 1000);

describe("generate", () => {
  test("the tokens of the model, in order, one ending, usage", async () => {
    await using engine = await fakeEngine();
    const { tokens, last, outputs } = await collect(engine.generate(request({ prompt: prompt(40), sampling: { maxTokens: 20 } })));
    expect(tokens).toEqual(expectedTokens(prompt(40), 1n, 20, 1000));
    expect(outputs.filter((output) => output.finishReason !== null).length).toBe(1);
    expect(last).toMatchObject({ finishReason: "length", usage: { promptTokens: 40, completionTokens: 20, cachedTokens: 0 }, error: null, stopTokenId: null });
  });

  test("32 at once, more than there are slots and pages: each as if alone", async () => {
    await using engine = await fakeEngine({ maxTotalTokens: 512 });
    const all = Array.from({ length: 32 }, (_, index) => request({ prompt: prompt(10 + index, index + 1), sampling: { maxTokens: 40, seed: BigInt(index) } }));
    const results = await Promise.all(all.map((r) => collect(engine.generate(r))));
    results.forEach(({ tokens }, index) => expect(tokens).toEqual(expectedTokens(prompt(10 + index, index + 1), BigInt(index), 40, 1000)));
    expect(engine.stats()).toMatchObject({ running: 0, waiting: 0, pagesHeld: 0 });
  });

  test("a warm prefix is reported and changes nothing", async () => {
    await using engine = await fakeEngine();
    const cold = await collect(engine.generate(request({ prompt: prompt(50) })));
    const warm = await collect(engine.generate(request({ prompt: prompt(50) })));
    expect(warm.last.usage.cachedTokens).toBe(48);
    expect(warm.tokens).toEqual(cold.tokens);
    await engine.clearCache();
    expect((await collect(engine.generate(request({ prompt: prompt(50) })))).last.usage.cachedTokens).toBe(0);
  });

  test("eos and stop ids end with the token that ended it", async () => {
    await using engine = await fakeEngine();
    const third = expectedTokens(prompt(20), 1n, 3, 1000)[2]!;
    const stopped = await collect(engine.generate(request({ prompt: prompt(20), eosTokenIds: [third] })));
    expect(stopped.last).toMatchObject({ finishReason: "stop", stopTokenId: third });
    expect(stopped.tokens.length).toBe(3);
    const ignored = await collect(engine.generate(request({ prompt: prompt(20), eosTokenIds: [third], sampling: { ignoreEos: true } })));
    expect(ignored.last).toMatchObject({ finishReason: "length", stopTokenId: null });
  });

  test.each([[null, null], [0, 0], [20, 20]] as const)("logprobs %p: one entry per token", async (logprobs, alternatives) => {
    await using engine = await fakeEngine();
    const { outputs, tokens } = await collect(engine.generate(request({ sampling: { logprobs } })));
    if (alternatives === null) return expect(outputs.every((output) => output.logprobs === null)).toBe(true);
    const entries = outputs.flatMap((output) => output.logprobs!);
    expect(entries.map((entry) => entry.tokenId)).toEqual(tokens);
    for (const entry of entries) {
      expect(entry.top.length).toBe(alternatives);
      for (const { logprob } of [entry, ...entry.top]) expect(Number.isFinite(logprob)).toBe(true);
    }
  });

  test("no maxTokens: until the context is full; a prompt one below the context gives one token", async () => {
    await using engine = await fakeEngine({ contextLength: 100 });
    for (const [length, count] of [[98, 2], [99, 1]] as const) {
      const { tokens, last } = await collect(engine.generate(request({ prompt: length, sampling: { maxTokens: null } })));
      expect([tokens.length, last.finishReason]).toEqual([count, "length"]);
    }
  });

  test("a null seed is drawn anew for each request", async () => {
    await using engine = await fakeEngine();
    const [a, b] = await Promise.all([1, 2].map(() => collect(engine.generate(request({ sampling: { seed: null } })))));
    expect(a!.tokens).not.toEqual(b!.tokens);
  });

  test("a thread that was busy gets the steps of that time as one output", async () => {
    await using engine = await fakeEngine({ libraryPath: "fake?ms=2" });
    const stream = engine.generate(request({ prompt: prompt(20), sampling: { maxTokens: 40 } }));
    const first = (await stream.next()).value as StepOutput;
    const next = stream.next();
    // Nothing of this thread runs meanwhile, the consumer included.
    Bun.sleepSync(60);
    const merged = (await next).value as StepOutput;
    expect(merged.tokenIds.length).toBeGreaterThan(1);
    const rest = await collect(stream);
    expect([...first.tokenIds, ...merged.tokenIds, ...rest.tokens]).toEqual(expectedTokens(prompt(20), 1n, 40, 1000));
    expect(merged.usage.completionTokens).toBe(first.tokenIds.length + merged.tokenIds.length);
  });

  test("a consumer that stops reading gets everything later, merged", async () => {
    await using engine = await fakeEngine();
    const stream = engine.generate(request({ prompt: prompt(20), sampling: { maxTokens: 30, logprobs: 1 } }));
    const first = (await stream.next()).value as StepOutput;
    await until(() => engine.stats().running === 0 && engine.stats().waiting === 0, "the request ends");
    const rest = (await stream.next()).value as StepOutput;
    expect([...first.tokenIds, ...rest.tokenIds]).toEqual(expectedTokens(prompt(20), 1n, 30, 1000));
    expect(rest.logprobs!.length).toBe(rest.tokenIds.length);
    expect(rest.finishReason).toBe("length");
    expect((await stream.next()).done).toBe(true);
  });
});

describe("refusals", () => {
  test.each([
    ["empty prompt", { prompt: [] }, "prompt", "empty_prompt", "empty"],
    ["prompt at the context", { prompt: 512 }, "prompt", "context_length_exceeded", /512 tokens.*512 tokens/],
    ["prompt over the context", { prompt: 600 }, "prompt", "context_length_exceeded", /600 tokens.*512 tokens/],
    ["id at the vocabulary", { prompt: [1, 1000] }, "prompt", "vocabulary", /1000 at position 1.*999/],
    ["negative id", { prompt: [-1] }, "prompt", "vocabulary", "-1"],
    ["fraction", { prompt: [1.5] }, "prompt", "vocabulary", "1.5"],
    ["temperature", { sampling: { temperature: -0.1 } }, "temperature", null, "-0.1"],
    ["temperature beyond f32", { sampling: { temperature: 1e39 } }, "temperature", null, "1e+39"],
    ["NaN temperature", { sampling: { temperature: NaN } }, "temperature", null, "NaN"],
    ["top_p 0", { sampling: { topP: 0 } }, "top_p", null, "got 0"],
    ["top_p above 1", { sampling: { topP: 1.1 } }, "top_p", null, "1.1"],
    ["max_tokens 0", { sampling: { maxTokens: 0 } }, "max_tokens", null, "got 0"],
    ["logprobs 21", { sampling: { logprobs: 21 } }, "logprobs", null, "21"],
    ["seed beyond 64 bits", { sampling: { seed: 2n ** 64n } }, "seed", null, "18446744073709551616"],
  ] as const)("%s", async (_, overrides, param, code, message) => {
    await using engine = await fakeEngine();
    const error = await failure(engine.generate(request(overrides as Parameters<typeof request>[0])).next());
    expect([error.kind, error.param, error.code]).toEqual(["invalid", param, code]);
    expect(error.message).toMatch(message);
    expect((await collect(engine.generate(request()))).last.finishReason).toBe("length");
  });

  test("a prompt larger than the pool is refused with both numbers, a smaller one is served", async () => {
    await using engine = await fakeEngine({ maxTotalTokens: 256, contextLength: 2048 });
    expect(engine.info.contextLength).toBe(256);
    const error = await failure(engine.generate(request({ prompt: 300 })).next());
    expect([error.kind, error.code]).toEqual(["invalid", "pool"]);
    expect(error.message).toMatch(/300 tokens.*256 tokens/);
    expect((await collect(engine.generate(request({ prompt: 10 })))).tokens.length).toBe(8);
    expect((await collect(engine.generate(request({ prompt: 250, sampling: { maxTokens: null } })))).last).toMatchObject({ finishReason: "length", usage: { completionTokens: 6 } });
  });
});

describe("cancel", () => {
  test("an abort ends the stream with cancelled and frees the pages", async () => {
    await using engine = await fakeEngine({ libraryPath: "fake?ms=2" });
    const abort = new AbortController();
    const finished: FinishedRequest[] = [];
    engine.onFinish((r) => finished.push(r));
    const outputs: StepOutput[] = [];
    for await (const output of engine.generate(request({ sampling: { maxTokens: 400 } }), abort.signal)) {
      outputs.push(output);
      if (outputs.length === 3) abort.abort();
    }
    expect(outputs.at(-1)?.finishReason).toBe("cancelled");
    expect(finished).toMatchObject([{ id: "test", finishReason: "cancelled", internal: false }]);
    expect(engine.stats()).toMatchObject({ running: 0, pagesHeld: 0 });
  });

  test("already aborted: cancelled, nothing generated", async () => {
    await using engine = await fakeEngine();
    const { tokens, last } = await collect(engine.generate(request(), AbortSignal.abort()));
    expect([tokens, last.finishReason]).toEqual([[], "cancelled"]);
  });

  test("leaving the loop cancels", async () => {
    await using engine = await fakeEngine({ libraryPath: "fake?ms=2" });
    const finished: FinishedRequest[] = [];
    engine.onFinish((r) => finished.push(r));
    for await (const _ of engine.generate(request({ sampling: { maxTokens: 400 } }))) break;
    await until(() => finished.length > 0, "the request ends");
    expect(finished[0]?.finishReason).toBe("cancelled");
    expect(engine.stats().pagesHeld).toBe(0);
  });

  test("return() while the request is queued does not wait for its turn", async () => {
    await using engine = await fakeEngine({ libraryPath: "fake?ms=2", maxNumSeqs: 1 });
    const running = engine.generate(request({ sampling: { maxTokens: 400 } }));
    await running.next();
    const finished: FinishedRequest[] = [];
    engine.onFinish((r) => finished.push(r));
    const queued = engine.generate(request());
    const next = queued.next();
    await queued.return(undefined);
    expect((await next).done).toBe(true);
    expect(finished).toEqual([]); // the consumer is let go before the engine has answered
    await until(() => engine.stats().waiting === 0, "the queue is empty");
    expect(engine.stats().running).toBe(1);
    await running.return(undefined);
  });

  test("1,000 requests with a third cancelled leave nothing behind", async () => {
    await using engine = await fakeEngine({ maxTotalTokens: 600, maxNumSeqs: 16 });
    const ends = { stop: 0, length: 0, cancelled: 0, error: 0 };
    engine.onFinish(({ finishReason }) => ends[finishReason]++);
    const client = async (index: number): Promise<void> => {
      const wanted = 1 + (index % 23);
      const stream = engine.generate(request({ prompt: prompt(1 + (index % 90), 1 + (index % 5)), sampling: { maxTokens: wanted } }));
      let received = 0;
      for await (const { tokenIds } of stream) {
        received += tokenIds.length;
        if (index % 3 === 0 && received >= wanted / 2) break;
      }
    };
    for (let at = 0; at < 1000; at += 100) await Promise.all(Array.from({ length: 100 }, (_, index) => client(at + index)));
    await until(() => engine.stats().running + engine.stats().waiting === 0, "all ended");
    expect(ends.length + ends.cancelled).toBe(1000);
    expect(ends.error).toBe(0);
    expect(engine.stats()).toMatchObject({ pagesHeld: 0 });
    expect(engine.stats().pagesFree + engine.stats().pagesCached).toBe(engine.stats().pagesTotal);
  });
});

describe("events and reports", () => {
  test("pages are stored with their parents when a request finishes; internal requests and the warm-up report none", async () => {
    await using engine = await fakeEngine();
    const events: KvEvent[] = [];
    engine.onKvEvents((batch) => events.push(...batch));
    await collect(engine.generate(request({ prompt: prompt(40, 3), internal: true })));
    expect(events).toEqual([]);
    await collect(engine.generate(request({ prompt: prompt(40), cacheDomain: 0xfedcba9876543210n, sampling: { maxTokens: 1 } })));
    expect(events).toMatchObject([
      { kind: "stored", parent: null, domain: 0xfedcba9876543210n, tokenIds: prompt(40).slice(0, 16) },
      { kind: "stored", parent: (events[0] as { page: number }).page, tokenIds: prompt(40).slice(16, 32) },
    ]);
    await engine.clearCache();
    expect(events.at(-1)).toEqual({ kind: "cleared" });
  });

  test("steps report the gap between tokens, requests their times", async () => {
    await using engine = await fakeEngine();
    const gaps: number[] = [];
    const finished: FinishedRequest[] = [];
    engine.onStep(({ interTokenMs }) => gaps.push(...interTokenMs));
    engine.onFinish((r) => finished.push(r));
    await collect(engine.generate(request({ sampling: { maxTokens: 5 } })));
    await collect(engine.generate(request({ sampling: { maxTokens: 5 }, internal: true })));
    expect(gaps.length).toBe(4);
    expect(finished.map((r) => r.internal)).toEqual([false, true]);
    const [first] = finished;
    expect(first!.queuedMs).toBeGreaterThanOrEqual(0);
    expect(first!.ttftMs!).toBeGreaterThanOrEqual(first!.queuedMs!);
    expect(first!.durationMs).toBeGreaterThanOrEqual(first!.ttftMs!);
  });
});

describe("life", () => {
  test("a device failure ends every request with error, once, and the engine refuses more", async () => {
    await using engine = await fakeEngine({ libraryPath: "fake?fail=6" });
    const failures: EngineError[] = [];
    engine.onFailure((error) => failures.push(error));
    const results = await Promise.all(Array.from({ length: 12 }, () => collect(engine.generate(request({ sampling: { maxTokens: 100 } })))));
    for (const { last } of results) expect(last).toMatchObject({ finishReason: "error", error: expect.stringContaining("device failed at step 6") });
    expect(failures.map((error) => error.kind)).toEqual(["engine"]);
    expect((await failure(engine.generate(request()).next())).kind).toBe("engine");
    const late: EngineError[] = [];
    engine.onFailure((error) => late.push(error));
    expect(late.length).toBe(1);
  });

  test("drain refuses newcomers and waits for the running", async () => {
    await using engine = await fakeEngine({ libraryPath: "fake?ms=2" });
    const running = collect(engine.generate(request({ sampling: { maxTokens: 50 } })));
    await until(() => engine.stats().running === 1, "it runs");
    const drained = engine.drain(20_000);
    expect((await failure(engine.generate(request()).next())).kind).toBe("unavailable");
    expect(await drained).toBe(true);
    expect((await running).tokens.length).toBe(50);
  });

  test("a drain that runs out of time says so; stop ends what is left with error", async () => {
    const engine = await fakeEngine({ libraryPath: "fake?ms=5" });
    const running = collect(engine.generate(request({ sampling: { maxTokens: 400 } })));
    await until(() => engine.stats().running === 1, "it runs");
    expect(await engine.drain(1)).toBe(false);
    await engine.stop();
    expect((await running).last).toMatchObject({ finishReason: "error", error: expect.stringMatching(/stop/) });
    await engine.stop();
  });

  test("a start that fails says why and leaves no thread", async () => {
    const missing = await failure(Engine.start(fakeOptions({ libraryPath: "/nonexistent/lib.so" }), { workerEntry: WORKER_ENTRY }));
    expect(missing.message).toContain("/nonexistent/lib.so");
    const tooSmall = await failure(Engine.start(fakeOptions({ maxTotalTokens: 3 }), { workerEntry: WORKER_ENTRY }));
    expect(tooSmall.message).toContain("--max-total-tokens 3");
  });

  test("a Worker that dies is a failure, not silence", async () => {
    const error = await failure(Engine.start(fakeOptions(), { workerEntry: new URL("./missing-entry.ts", import.meta.url) }));
    expect(error.kind).toBe("engine");
  });
});
