/** Answers do not depend on what the prefix cache holds, who runs beside, or who left: the CPU library over a tiny random model. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Engine } from "../../../src/engine/engine.ts";
import type { EngineOptions } from "../../../src/engine/types.ts";
import { collect, fakeOptions, request, tinySpec, WORKER_ENTRY } from "../../support/fake-engine.ts";
import { nativeDevice } from "../../support/native-device.ts";
import { tinyWeights } from "../../support/tiny-weights.ts";
import { Random } from "../../support/random.ts";

const device = await nativeDevice();
let directory: string;
let base: EngineOptions;
beforeAll(async () => {
  directory = mkdtempSync(join(tmpdir(), "layerscale-cache-"));
  base = fakeOptions({ ...device.options, weights: tinyWeights(tinySpec, join(directory, "weights.bin")), maxTotalTokens: 4096, threads: 2 });
});
afterAll(() => rmSync(directory, { recursive: true, force: true }));
const engine = async (overrides: Partial<EngineOptions> = {}) => {
  const started = await Engine.start({ ...base, ...overrides }, { workerEntry: WORKER_ENTRY, checkPages: true });
  return Object.assign(started, { [Symbol.asyncDispose]: () => started.stop() });
};
type Running = Awaited<ReturnType<typeof engine>>;
const answer = async (on: Running, prompt: number[], sampling: Parameters<typeof request>[0] = {}) => {
  const { tokens, outputs, last } = await collect(on.generate(request({ prompt, ...sampling })));
  return { tokens, logprobs: outputs.flatMap((output) => output.logprobs ?? []).map(({ logprob }) => logprob), cached: last.usage.cachedTokens };
};

test(`${device.simulated ? 40 : 200} random prompts that share prefixes: cold, warm and without a prefix cache the same tokens and logprobs`, async () => {
  const random = new Random(7);
  const below = (limit: number) => random.below(limit);
  const stems = Array.from({ length: 5 }, () => Array.from({ length: 120 }, () => below(tinySpec.vocab)));
  const prompts = Array.from({ length: device.simulated ? 40 : 200 }, () => {
    const length = 1 + below(120);
    const shared = below(length + 1);
    return [...stems[below(5)]!.slice(0, shared), ...Array.from({ length: length - shared }, () => below(tinySpec.vocab))];
  });
  const ask = (on: Running) => Promise.all(prompts.map((prompt) => answer(on, prompt, { sampling: { temperature: 0, maxTokens: 6, ignoreEos: true, logprobs: 0 } })));
  await using caching = await engine();
  await using plain = await engine({ prefixCache: false });
  const [cold, warm, none] = [await ask(caching), await ask(caching), await ask(plain)];
  const tokens = (answers: typeof cold) => answers.map((one) => one.tokens);
  expect(tokens(warm)).toEqual(tokens(cold));
  expect(tokens(none)).toEqual(tokens(cold));
  for (const other of [warm, none]) other.forEach(({ logprobs }, i) => logprobs.forEach((logprob, at) => expect(Math.abs(logprob - cold[i]!.logprobs[at]!)).toBeLessThan(1e-3)));
  expect(warm.reduce((sum, { cached }) => sum + cached, 0)).toBeGreaterThan(1000);
  expect(none.every(({ cached }) => cached === 0)).toBe(true);
}, 120_000);

describe("seed 42 at temperature 0.8", () => {
  const prompt = Array.from({ length: 50 }, (_, i) => (i * 11 + 3) % tinySpec.vocab);
  const sampled = { sampling: { temperature: 0.8, seed: 42n, maxTokens: 64, ignoreEos: true } };
  test("alone, with seven others, warm, and after a cancelled twin: identical ids", async () => {
    await using one = await engine();
    const alone = (await answer(one, prompt, sampled)).tokens;
    const others = Array.from({ length: 7 }, (_, i) => answer(one, Array.from({ length: 20 + i }, (_, at) => at * 3 + i), { sampling: { temperature: 1, seed: BigInt(i), maxTokens: 64, ignoreEos: true } }));
    expect((await answer(one, prompt, sampled)).tokens).toEqual(alone);
    await Promise.all(others);
    const warm = await answer(one, prompt, sampled);
    expect([warm.tokens, warm.cached]).toEqual([alone, 48]);
    const leave = new AbortController();
    const twin = one.generate(request({ prompt, ...sampled }), leave.signal);
    await twin.next();
    leave.abort();
    await twin.return();
    expect((await answer(one, prompt, sampled)).tokens).toEqual(alone);
  }, 120_000);
});

test("a pool of 12 pages: a shared prefix in use is never evicted under the one that decodes on it", async () => {
  await using small = await engine({ maxTotalTokens: 192, contextLength: 190 });
  const prefix = Array.from({ length: 64 }, (_, i) => (i * 5 + 1) % tinySpec.vocab);
  const long = { sampling: { temperature: 0, maxTokens: 100, ignoreEos: true } };
  const solo = (await answer(small, prefix, long)).tokens;
  await small.clearCache();
  await answer(small, prefix, { sampling: { temperature: 0, maxTokens: 1, ignoreEos: true } });
  const running = answer(small, prefix, long);
  const crowd = Array.from({ length: 7 }, (_, i) => answer(small, Array.from({ length: 48 }, (_, at) => (at * 7 + i * 131 + 9) % tinySpec.vocab), { sampling: { temperature: 0, maxTokens: 2, ignoreEos: true } }));
  expect((await running).tokens).toEqual(solo);
  await Promise.all(crowd);
  expect(small.stats().evictions).toBeGreaterThan(0);
  expect(small.stats()).toMatchObject({ pagesHeld: 0, running: 0 });
}, 120_000);

test("a short prompt is answered while long ones are prefilled, and a running answer gets a token in every step", async () => {
  await using busy = await engine({ chunkedPrefillSize: 32, contextLength: 512 });
  const order: string[] = [];
  const running = busy.generate(request({ prompt: [1, 2, 3], sampling: { temperature: 0, maxTokens: 40, ignoreEos: true } }));
  const begun = (await running.next()).value!.tokenIds.length;
  const { steps: before } = busy.stats();
  const long = Array.from({ length: 3 }, (_, i) => collect(busy.generate(request({ prompt: Array.from({ length: 480 }, (_, at) => (at * 3 + i) % tinySpec.vocab), sampling: { maxTokens: 1 } }))).then(() => order.push("long")));
  const short = collect(busy.generate(request({ prompt: [9, 8, 7, 6], sampling: { maxTokens: 1 } }))).then(() => order.push("short"));
  // Told with the step that ends the answer: what runs on until this thread reads it does not count.
  const { promise: steps, resolve } = Promise.withResolvers<number>();
  busy.onFinish(({ usage }) => usage.completionTokens === 40 && resolve(busy.stats().steps - before));
  const rest = collect(running);
  await Promise.all([short, ...long]);
  expect(order[0]).toBe("short");
  // A token in each of the steps that follow.
  expect([(await rest).tokens.length, (await steps) <= 40 - begun]).toEqual([40 - begun, true]);
}, 120_000);
