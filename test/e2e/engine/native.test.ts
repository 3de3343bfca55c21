/** The engine over a real library (the CPU's, or what LAYERSCALE_NATIVE_LIB names) and a tiny random model: page counts are compared with native ones after every step. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Engine } from "../../../src/engine/engine.ts";
import { EngineError } from "../../../src/engine/errors.ts";
import type { EngineOptions, EngineStartOptions, FinishedRequest, KvEvent } from "../../../src/engine/types.ts";
import { collect, fakeOptions, request, tinySpec, WORKER_ENTRY } from "../../support/fake-engine.ts";
import { nativeDevice } from "../../support/native-device.ts";
import { tinyWeights } from "../../support/tiny-weights.ts";

const device = await nativeDevice();
/** Work for a device that runs at its own speed, and for one that is simulated. */
const amount = (real: number, simulated: number): number => (device.simulated ? simulated : real);
const SMALL_POOL = amount(256, 112);
let directory: string;
let base: EngineOptions;

beforeAll(async () => {
  directory = mkdtempSync(join(tmpdir(), "layerscale-engine-"));
  base = fakeOptions({ ...device.options, weights: tinyWeights(tinySpec, join(directory, "weights.bin")), maxTotalTokens: 4096, threads: 2 });
});
afterAll(() => rmSync(directory, { recursive: true, force: true }));

async function engine(overrides: Partial<EngineOptions> = {}, start: EngineStartOptions = {}): Promise<Engine & AsyncDisposable> {
  const started = await Engine.start({ ...base, ...overrides }, { workerEntry: WORKER_ENTRY, checkPages: true, ...start });
  return Object.assign(started, { [Symbol.asyncDispose]: () => started.stop() });
}

const prompt = (length: number, seed: number): number[] => Array.from({ length }, (_, index) => (index * index * seed + index + seed) % tinySpec.vocab);
const seeded = (index: number, maxTokens = amount(40, 12)) => request({ prompt: prompt(5 + index * 7, index + 1), sampling: { temperature: 0.9, topP: 0.95, seed: BigInt(index) - 3n, maxTokens, ignoreEos: true } });
const all = Array.from({ length: amount(12, 6) }, (_, index) => index);

/** Tokens of each request, run alone on an engine of default settings. */
async function solo(): Promise<number[][]> {
  await using alone = await engine({ prefixCache: false });
  const tokens: number[][] = [];
  for (const index of all) tokens.push((await collect(alone.generate(seeded(index)))).tokens);
  return tokens;
}

/**
 * On the CPU to the last token. On a GPU chunks change the order of attention's sums, and bf16 rounds them: once in a while another token is
 * drawn, and the rest of that answer is another one.
 */
function expectSame(round: string, tokens: number[][], expected: number[][]): void {
  if (device.options.gpu === null) return expect([round, tokens]).toEqual([round, expected]);
  expect(tokens.map((answer) => answer.length)).toEqual(expected.map((answer) => answer.length));
  const same = tokens.filter((answer, index) => Bun.deepEquals(answer, expected[index])).length;
  expect([round, same * 2 >= tokens.length, same]).toEqual([round, true, same]);
}

describe("the same request gives the same tokens", () => {
  let expected: number[][];
  beforeAll(async () => (expected = await solo()));

  test.each([
    ["together", {}],
    ["in chunks of 16", { chunkedPrefillSize: 16 }],
    ["one token a step", { chunkedPrefillSize: 1 }],
    ["in a pool so small that sequences are preempted", { maxTotalTokens: SMALL_POOL }],
    ["on one thread", { threads: 1 }],
  ] as [string, Partial<EngineOptions>][])("%s, cold and warm", async (_, overrides) => {
    await using together = await engine(overrides);
    for (const round of ["cold", "warm"]) {
      const results = await Promise.all(all.map((index) => collect(together.generate(seeded(index)))));
      expectSame(round, results.map((result) => result.tokens), expected);
    }
    if (overrides.maxTotalTokens === SMALL_POOL && !device.simulated) expect(together.stats().preemptions).toBeGreaterThan(0);
    expect(together.stats()).toMatchObject({ pagesHeld: 0, running: 0, waiting: 0, stalls: 0 });
  });

  test.each([1, 2])("with %d steps submitted at a time, beside answers that are cancelled or stop early", async (stepsSubmitted) => {
    await using together = await engine({ maxTotalTokens: SMALL_POOL }, { stepsSubmitted });
    const asked = all.map((index) => collect(together.generate(seeded(index))));
    const others = all.map(async (index) => {
      const { tokens } = await collect(together.generate({ ...seeded(index), stopTokenIds: [expected[index]![3]!] }));
      const abort = new AbortController();
      for await (const _ of together.generate(seeded((index + 3) % all.length), abort.signal)) if (index % 2 === 0) abort.abort();
      return tokens;
    });
    expectSame("together", (await Promise.all(asked)).map((result) => result.tokens), expected);
    expectSame("stopped", await Promise.all(others), expected.map((tokens) => tokens.slice(0, tokens.indexOf(tokens[3]!) + 1)));
    expect(together.stats()).toMatchObject({ pagesHeld: 0, running: 0, waiting: 0, stalls: 0 });
  });

  test("on a second life of the engine in the same process", async () => {
    await using again = await engine();
    expect((await collect(again.generate(seeded(3)))).tokens).toEqual(expected[3]!);
  });
});

test(`${amount(1000, 100)} requests with a third cancelled leave nothing held`, async () => {
  await using busy = await engine({ maxTotalTokens: 1024, maxNumSeqs: 16 });
  const finished: FinishedRequest[] = [];
  busy.onFinish((r) => finished.push(r));
  const client = async (index: number): Promise<void> => {
    const wanted = 1 + (index % 19);
    let received = 0;
    for await (const { tokenIds } of busy.generate(request({ prompt: prompt(1 + ((index * 13) % 120), 1 + (index % 4)), sampling: { maxTokens: wanted, ignoreEos: true } }))) {
      received += tokenIds.length;
      if (index % 3 === 0 && received >= wanted / 2) break;
    }
  };
  for (let at = 0; at < amount(1000, 100); at += 50) await Promise.all(Array.from({ length: 50 }, (_, index) => client(at + index)));
  expect(await busy.drain(30_000)).toBe(true);
  expect(finished.length).toBe(amount(1000, 100));
  expect(finished.filter((r) => r.finishReason === "error")).toEqual([]);
  const { pagesFree, pagesCached, pagesHeld, pagesTotal } = busy.stats();
  expect([pagesHeld, pagesFree + pagesCached]).toEqual([0, pagesTotal]);
});

test("events replay into a tree: parents first, children removed before parents, no page twice", async () => {
  await using small = await engine({ maxTotalTokens: 400 });
  const tree = new Map<number, { parent: number | null; tokenIds: number[] }>();
  const problems: string[] = [];
  small.onKvEvents((events: KvEvent[]) => {
    for (const event of events) {
      if (event.kind === "cleared") tree.clear();
      else if (event.kind === "stored") {
        if (tree.has(event.page)) problems.push(`page ${event.page} stored twice`);
        if (event.parent !== null && !tree.has(event.parent)) problems.push(`page ${event.page} before its parent`);
        tree.set(event.page, event);
      } else {
        if (!tree.delete(event.page)) problems.push(`page ${event.page} removed but not stored`);
        if ([...tree.values()].some((other) => other.parent === event.page)) problems.push(`page ${event.page} removed before a child`);
      }
    }
  });
  for (let index = 0; index < amount(60, 20); index++) await collect(small.generate(request({ prompt: prompt(20 + ((index * 17) % 150), 1 + (index % 7)) })));
  expect(problems).toEqual([]);
  // Tails, last pages that are not full, are cached and not told.
  expect(tree.size).toBeGreaterThan(0);
  expect(tree.size).toBeLessThanOrEqual(small.stats().pagesCached);
  expect(small.stats().evictions).toBeGreaterThan(0);
  await small.clearCache();
  expect(tree.size).toBe(0);
});

test("cached tokens are all full pages but the last token's, and a finished answer is reused", async () => {
  await using warm = await engine();
  for (const length of [15, 16, 17, 31, 32, 33, 48]) {
    await warm.clearCache();
    const ask = () => collect(warm.generate(request({ prompt: prompt(length, 9), sampling: { maxTokens: 1, ignoreEos: true } })));
    const cold = await ask();
    const again = await ask();
    expect([length, again.last.usage.cachedTokens]).toEqual([length, 16 * Math.floor((length - 1) / 16)]);
    expect(again.tokens).toEqual(cold.tokens);
  }
});

test("logprobs: the chosen token and its alternatives, falling, finite, the same in company", async () => {
  await using busy = await engine();
  const ask = () => collect(busy.generate(request({ prompt: prompt(30, 2), sampling: { maxTokens: 6, logprobs: 20, ignoreEos: true } })));
  const [first, second] = [(await ask()).outputs, (await Promise.all([ask(), collect(busy.generate(seeded(4)))]))[0].outputs];
  // Several steps may travel as one output: how tokens are grouped is chance.
  const entries = (outputs: typeof first) => outputs.flatMap((output) => output.logprobs!);
  expect(entries(second)).toEqual(entries(first));
  expect(entries(first).map((entry) => entry.tokenId)).toEqual(first.flatMap((output) => output.tokenIds));
  expect(entries(first).length).toBe(6);
  for (const entry of entries(first)) {
    expect(entry.top.length).toBe(20);
    expect(entry.top[0]).toEqual({ tokenId: entry.tokenId, logprob: entry.logprob }); // temperature 0
    entry.top.reduce((previous, { logprob }) => (expect(logprob).toBeLessThanOrEqual(previous), logprob), 0);
  }
});

describe("refusals at start name what is wrong", () => {
  const start = (overrides: Partial<EngineOptions>) => Engine.start({ ...base, ...overrides }, { workerEntry: WORKER_ENTRY }).then(() => null, (error: unknown) => error);

  test("a missing tensor", async () => {
    const error = await start({ weights: { ...base.weights, tensors: base.weights.tensors.slice(1) } });
    expect(error).toBeInstanceOf(EngineError);
    expect(String(error)).toContain("ls_weights_finish");
  });

  test("a tensor of another shape, by its name in the file", async () => {
    const [first, ...rest] = base.weights.tensors;
    expect(String(await start({ weights: { ...base.weights, tensors: [{ ...first!, rows: first!.rows - 1 }, ...rest] } }))).toContain("tensor embedding");
  });

  test("a weight file shorter than promised", async () => {
    const [file] = base.weights.files;
    expect(String(await start({ weights: { ...base.weights, files: [{ ...file!, bytes: file!.bytes + 1 }] } }))).toContain("weights.bin");
  });
});
