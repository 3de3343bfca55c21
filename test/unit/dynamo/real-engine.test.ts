/** The worker over the real engine and its Worker thread, with a device library in TypeScript: what a request asks for is what it gets. */
import { afterEach, describe, expect, test } from "bun:test";
import type { EngineOptions } from "../../../src/engine/types.ts";
import { expectedTokens } from "../../support/fake-backend.ts";
import { fakeEngine } from "../../support/fake-engine.ts";
import { PlaneCall, requestBody, until } from "./plane-client.ts";
import { family, records, type Running, startWith, stopAll } from "./worker-harness.ts";

afterEach(stopAll);
const VOCAB = 1000;
type Real = Awaited<ReturnType<typeof fakeEngine>>;
const start = async (options: Partial<EngineOptions> = {}): Promise<Running<Real>> => startWith(await fakeEngine(options));
const prompt = (length: number, seed = 1) => Array.from({ length }, (_, i) => (i * 7 + seed * 13) % VOCAB);
const model = (ids: number[], seed: bigint, count: number) => expectedTokens(ids, seed, count, VOCAB);
const send = (worker: { address: string }, patch: Parameters<typeof requestBody>[0]) => PlaneCall.send(worker.address, requestBody({ sampling: { temperature: 1, seed: 1 }, ...patch }));
const ask = async (worker: { address: string }, patch: Parameters<typeof requestBody>[0]) => (await send(worker, patch)).done();
const cached = (call: PlaneCall) => (call.items.at(-1)!.data!.completion_usage as Record<string, any>).prompt_tokens_details.cached_tokens as number;
const idle = (worker: Running<Real>) => until("no page held", () => worker.engine.stats().pagesHeld === 0 && worker.engine.stats().running === 0);

describe("a replayed request", () => {
  test.each([[7n], [-(2n ** 63n)], [2n ** 63n - 1n]])("continues exactly on another worker: seed %p, every cut, with and without logprobs", async (seed) => {
    const [first, second] = [await start(), await start({ chunkedPrefillSize: 16 })];
    const ids = prompt(37);
    const whole = await ask(first, { token_ids: ids, sampling: { temperature: 0.8, seed }, stop: { max_tokens: 40 } });
    expect(whole.tokens).toEqual(model(ids, BigInt.asUintN(64, seed), 40));
    for (const delivered of [1, 11, 16, 27, 39])
      for (const logprobs of [null, 2]) {
        const body = { token_ids: [...ids, ...whole.tokens.slice(0, delivered)], sampling: { temperature: 0.8, seed }, stop: { max_tokens: 40 - delivered }, output: { logprobs } };
        const rest = await ask(second, body);
        expect(rest.tokens).toEqual(whole.tokens.slice(delivered));
        expect(rest.items.at(-1)!.data).toMatchObject({ finish_reason: "length", completion_usage: { completion_tokens: 40 - delivered } });
      }
  });
});

describe("the queue", () => {
  test("routing.priority orders it: higher first, then arrival", async () => {
    const worker = await start({ maxNumSeqs: 1, libraryPath: "fake?ms=2" });
    const running = await send(worker, { token_ids: prompt(5), stop: { max_tokens: 400 } });
    await until("it runs", () => running.tokens.length > 0);
    const ended: string[] = [];
    worker.engine.onFinish(({ id, finishReason }) => void (finishReason === "length" && ended.push(id)));
    const queue = await Promise.all(
      ([["a", 0], ["b", 5], ["c", -2], ["d", 5], ["e", null], ["f", 2 ** 31 - 1]] as const).map(async ([name, priority], i) => {
        // One after the other into the queue, so that the order of arrival is known.
        await until("the ones before wait", () => worker.engine.stats().waiting >= i);
        const body = requestBody({ token_ids: prompt(6, i + 2), stop: { max_tokens: 3 }, routing: priority === null ? {} : { priority } });
        return PlaneCall.send(worker.address, body, { control: { id: name } });
      }),
    );
    await until("all wait", () => worker.engine.stats().waiting === 6);
    expect(queue.every((call) => call.tokens.length === 0)).toBe(true);
    running.control("kill");
    for (const call of queue) await call.done();
    expect(ended).toEqual(["f", "b", "d", "a", "e", "c"]);
    running.close();
  });

  test("a health check is answered while the batch and the pool are full, and costs nobody a token", async () => {
    const worker = await start({ maxNumSeqs: 2, maxTotalTokens: 256, libraryPath: "fake?ms=2" });
    const ids = [prompt(60, 1), prompt(60, 2), prompt(60, 3)];
    const busy = await Promise.all(ids.map((token_ids) => send(worker, { token_ids, stop: { max_tokens: 60 } })));
    await until("a full batch and a queue", () => worker.engine.stats().running === 2 && worker.engine.stats().waiting === 1);
    const probe = await ask(worker, { token_ids: [3], _HEALTH_CHECK: true, stop: { max_tokens: 1, ignore_eos: true }, sampling: { temperature: 0 } });
    expect([probe.tokens.length, probe.errors]).toEqual([1, []]);
    expect(busy.filter((call) => call.final).length).toBe(0);
    for (const [i, call] of busy.entries()) expect((await call.done()).tokens).toEqual(model(ids[i]!, 1n, 60));
    await idle(worker);
    expect(await family(worker, "layerscale_prompt_tokens_total")).toBe(180);
  });
});

describe("the prefix cache", () => {
  test("is reported as it was used: all full pages before the last token", async () => {
    const worker = await start({ maxTotalTokens: 4096 });
    for (const length of [15, 16, 17, 31, 32, 33, 48]) {
      const body = { token_ids: prompt(length, length), stop: { max_tokens: 5 } };
      const [cold, warm] = [await ask(worker, body), await ask(worker, body)];
      expect([cached(cold), cached(warm)]).toEqual([0, 16 * Math.floor((length - 1) / 16)]);
      expect(warm.tokens).toEqual(cold.tokens);
    }
  });
  test("is separate for each salt, and health checks leave nothing in it", async () => {
    const worker = await start();
    const body = (cache_salt: string | null, more = {}) => ({ token_ids: prompt(40), stop: { max_tokens: 2 }, routing: cache_salt === null ? {} : { cache_salt }, ...more });
    expect(cached(await ask(worker, body(null, { _HEALTH_CHECK: true })))).toBe(0);
    for (const salt of [null, "a", "b"]) {
      expect(cached(await ask(worker, body(salt)))).toBe(0);
      expect(cached(await ask(worker, body(salt)))).toBe(32);
    }
    // No salt and an empty one ask for the same.
    expect(cached(await ask(worker, body("")))).toBe(32);
  });
});

describe("limits", () => {
  test("prompts around the context: one token at least is generated, or a refusal has both numbers", async () => {
    const worker = await start({ contextLength: 100, maxTotalTokens: 4096 });
    for (const max_tokens of [null, 1, 1_048_576]) {
      for (const [length, count] of [[98, 2], [99, 1]] as const) {
        const call = await ask(worker, { token_ids: prompt(length), stop: { max_tokens } });
        expect([call.tokens.length, call.items.at(-1)!.data!.finish_reason]).toEqual([max_tokens === 1 ? 1 : count, "length"]);
      }
      for (const length of [100, 101, 300]) {
        const [error] = (await ask(worker, { token_ids: prompt(length), stop: { max_tokens } })).errors;
        expect(error).toMatchObject({ error_type: { Backend: "InvalidArgument" } });
        expect(error!.message).toContain(`${length} tokens`);
        expect(error!.message).toContain("100 tokens");
      }
    }
  });
  test("a prompt larger than the pool is refused with the numbers, and the next one is served", async () => {
    const worker = await start({ maxTotalTokens: 256, contextLength: 2048 });
    const [error] = (await ask(worker, { token_ids: prompt(300) })).errors;
    expect(error!.message).toMatch(/300 tokens.*256 tokens/);
    expect((await ask(worker, { token_ids: prompt(10) })).tokens.length).toBe(4);
  });
  test("ids outside the vocabulary and empty prompts are refused, tiny temperatures are greedy", async () => {
    const worker = await start();
    for (const token_ids of [[1, VOCAB], [999_999], []]) expect((await ask(worker, { token_ids })).errors[0]!.error_type).toEqual({ Backend: "InvalidArgument" });
    expect((await ask(worker, { token_ids: prompt(10), sampling: { temperature: 9.999999717180685e-10, top_p: 9.999999717180685e-10, seed: 1 } })).tokens.length).toBe(4);
  });
  test("more work than the pool holds: all of it finishes, each as if alone", async () => {
    const worker = await start({ maxTotalTokens: 256 });
    for (const count of [4, 8]) {
      const ids = Array.from({ length: count }, (_, i) => prompt(60, i + 1));
      const calls = await Promise.all(ids.map((token_ids) => send(worker, { token_ids, stop: { max_tokens: 128, ignore_eos: true } })));
      for (const [i, call] of calls.entries()) expect((await call.done()).tokens).toEqual(model(ids[i]!, 1n, 128));
    }
    expect(worker.engine.stats().preemptions).toBeGreaterThan(0);
    await idle(worker);
  });
});

describe("an engine that fails", () => {
  test.each([["streamed", null], ["held back", 1]] as const)("ends every %s stream, running and queued, as migratable; exit code 1, nothing left in discovery", async (_name, logprobs) => {
    const worker = await start({ maxNumSeqs: 2, libraryPath: "fake?ms=2&fail=40" });
    const calls = await Promise.all([1, 2, 3, 4].map((i) => send(worker, { token_ids: prompt(20, i), stop: { max_tokens: 400 }, output: { logprobs } })));
    for (const call of calls) {
      await call.done();
      expect(call.errors).toEqual([{ error_type: { Backend: "EngineShutdown" }, message: expect.stringContaining("device failed at step 40") }]);
      expect([call.final, call.sentinel]).toEqual([true, true]);
    }
    expect(await worker.exit).toBe(1);
    for (const bucket of ["v1/instances", "v1/mdc", "v1/event_channels", "v1/event_sources"]) expect(records(worker.kv, bucket)).toEqual([]);
  });
});

test("20,000 one-token requests and 1,000 that are cancelled leave no listener, no page and no request behind", async () => {
  const worker = await start();
  const rounds = process.env.LAYERSCALE_PROOFS ? 20_000 : 400;
  const batch = 20;
  for (let done = 0; done < rounds; done += batch) await Promise.all(Array.from({ length: batch }, (_, i) => ask(worker, { token_ids: [done % 900, i + 1], stop: { max_tokens: 1 } })));
  for (let done = 0; done < rounds / 20; done += batch) {
    await Promise.all(
      Array.from({ length: batch }, async (_, i) => {
        const call = await send(worker, { token_ids: [i + 1, 2, 3], stop: { max_tokens: 400 } });
        await until("a first token", () => call.tokens.length > 0);
        call.control("kill");
        await call.done();
      }),
    );
  }
  await idle(worker);
  expect(worker.engine.stats()).toMatchObject({ running: 0, waiting: 0, pagesHeld: 0 });
  expect(await family(worker, "dynamo_component_inflight_requests")).toBe(0);
}, 600_000);
