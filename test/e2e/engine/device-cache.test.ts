/**
 * What the prefix cache promises, on whichever library is found (the CPU's, or what LAYERSCALE_NATIVE_LIB names), in few tokens: short enough for a simulated GPU.
 * cache.test.ts has the same at full length for the CPU. Page counts are compared with native ones after every step.
 */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { ModelSpec } from "../../../src/config/model-spec.ts";
import { Engine } from "../../../src/engine/engine.ts";
import type { EngineOptions, TokenLogprob } from "../../../src/engine/types.ts";
import { collect, fakeOptions, request, tinySpec, WORKER_ENTRY } from "../../support/fake-engine.ts";
import { nativeDevice } from "../../support/native-device.ts";
import { Random } from "../../support/random.ts";
import { tinyWeights } from "../../support/tiny-weights.ts";

const spec: ModelSpec = { ...tinySpec, hidden: 32, heads: 2, kvHeads: 1, intermediate: 64, vocab: 200 };
const device = await nativeDevice();
/** Logprobs of the same token computed in another way: chunks and single tokens are summed in different orders on a GPU, and rounded to bf16 between layers. */
const NEAR = device.options.gpu ? 0.15 : 1e-3;
const PROMPTS = device.simulated ? 10 : 60;
let directory: string;
let base: EngineOptions;

beforeAll(() => {
  directory = mkdtempSync(join(tmpdir(), "layerscale-device-cache-"));
  base = fakeOptions({ ...device.options, spec, weights: tinyWeights(spec, join(directory, "weights.bin")), maxTotalTokens: PROMPTS * 112, contextLength: 1024, maxNumSeqs: 8, threads: 2 });
});
afterAll(() => rmSync(directory, { recursive: true, force: true }));

const engine = async (overrides: Partial<EngineOptions> = {}) => {
  const started = await Engine.start({ ...base, ...overrides }, { workerEntry: WORKER_ENTRY, checkPages: true });
  return Object.assign(started, { [Symbol.asyncDispose]: () => started.stop() });
};
type Running = Awaited<ReturnType<typeof engine>>;
interface Answer {
  tokens: number[];
  logprobs: TokenLogprob[];
  cached: number;
}
const answer = async (on: Running, prompt: number[], maxTokens = 3, cacheDomain = 0n): Promise<Answer> => {
  const { tokens, outputs, last } = await collect(on.generate(request({ prompt, cacheDomain, sampling: { temperature: 0, maxTokens, ignoreEos: true, logprobs: 2 } })));
  return { tokens, logprobs: outputs.flatMap((output) => output.logprobs ?? []), cached: last.usage.cachedTokens };
};
const prompt = (length: number, seed: number): number[] => Array.from({ length }, (_, at) => (at * at * seed + at * 3 + seed) % spec.vocab);

/** Same tokens with nearly the same logprobs, up to the first place where the two best tokens are so close that rounding may choose. What follows is another text. */
function expectSame(what: string, got: Answer, want: Answer): void {
  for (const [at, { tokenId, logprob, top }] of want.logprobs.entries()) {
    const mine = got.logprobs[at]!;
    if (mine.tokenId !== tokenId) return expect([what, at, top[0]!.logprob - top[1]!.logprob < NEAR]).toEqual([what, at, true]);
    expect([what, at, Math.abs(mine.logprob - logprob) < NEAR, mine.logprob, logprob]).toEqual([what, at, true, mine.logprob, logprob]);
  }
}

/** free + cached + held = total, with nothing held once all is answered. */
function expectSettled(on: Running): void {
  const { pagesFree, pagesCached, pagesHeld, pagesTotal, running, waiting } = on.stats();
  expect({ sum: pagesFree + pagesCached + pagesHeld, pagesHeld, running, waiting }).toEqual({ sum: pagesTotal, pagesHeld: 0, running: 0, waiting: 0 });
}

test("prompts that share prefixes: warm, side by side and without a cache the answers are the cold ones", async () => {
  const random = new Random(11);
  const stems = Array.from({ length: 3 }, () => Array.from({ length: 70 }, () => random.below(spec.vocab)));
  const prompts = Array.from({ length: PROMPTS }, () => {
    const length = 1 + random.below(70);
    const shared = random.below(length + 1);
    return [...stems[random.below(3)]!.slice(0, shared), ...Array.from({ length: length - shared }, () => random.below(spec.vocab))];
  });
  await using caching = await engine();
  await using plain = await engine({ prefixCache: false });
  const none: Answer[] = [];
  const first: Answer[] = [];
  for (const each of prompts) {
    none.push(await answer(plain, each));
    first.push(await answer(caching, each));
  }
  const warm = await Promise.all(prompts.map((each) => answer(caching, each)));
  for (const [index, want] of none.entries()) {
    expectSame(`prompt ${index}, first`, first[index]!, want);
    expectSame(`prompt ${index}, warm`, warm[index]!, want);
  }
  expect(none.every(({ cached }) => cached === 0)).toBe(true);
  // All full pages but the last token's.
  expect(warm.map(({ cached }) => cached)).toEqual(prompts.map(({ length }) => 16 * Math.floor((length - 1) / 16)));
  expectSettled(caching);
  expectSettled(plain);
}, 120_000);

test("domains share no pages; clearing forgets all of them", async () => {
  await using salted = await engine();
  const tokens = prompt(40, 7);
  const cached = async (domain: bigint) => (await answer(salted, tokens, 1, domain)).cached;
  expect([await cached(0n), await cached(0n), await cached(5n), await cached(2n ** 63n + 5n), await cached(5n), await cached(0n)]).toEqual([0, 32, 0, 0, 32, 32]);
  expectSettled(salted);
  await salted.clearCache();
  expect(salted.stats()).toMatchObject({ pagesCached: 0, pagesHeld: 0, pagesFree: salted.stats().pagesTotal });
  expect([await cached(5n), await cached(0n)]).toEqual([0, 0]);
}, 120_000);

test("a full pool evicts what was used least recently, never what a running sequence reads, and counts stay whole", async () => {
  await using small = await engine({ maxTotalTokens: 160, contextLength: 150 });
  const kept = prompt(48, 3);
  const alone = await answer(small, kept, 20);
  await small.clearCache();
  await answer(small, kept, 1);
  const running = answer(small, kept, 20);
  const crowd = Array.from({ length: 6 }, (_, index) => answer(small, prompt(40, 20 + index), 1));
  expectSame("on a shared prefix beside evictions", await running, alone);
  await Promise.all(crowd);
  expect(small.stats().evictions).toBeGreaterThan(0);
  expectSettled(small);
  // The newest is still there, the oldest of the crowd is not.
  expect((await answer(small, prompt(40, 25), 1)).cached).toBe(32);
  expect((await answer(small, prompt(40, 20), 1)).cached).toBe(0);
  expectSettled(small);
}, 120_000);

test("a request that is cancelled midway gives its pages back, and its twin gets the same answer", async () => {
  await using busy = await engine();
  const tokens = prompt(50, 9);
  const want = await answer(busy, tokens);
  await busy.clearCache();
  const leave = new AbortController();
  const left = busy.generate(request({ prompt: tokens, sampling: { temperature: 0, maxTokens: 100, ignoreEos: true } }), leave.signal);
  await left.next();
  leave.abort();
  await left.return();
  expectSame("after a cancelled twin", await answer(busy, tokens), want);
  expectSettled(busy);
}, 120_000);
