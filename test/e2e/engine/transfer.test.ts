/** KV moved between two engines of the real CPU library: the receiver's tokens and logprobs are those of one engine alone, to the bit. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { WeightPlan } from "../../../src/config/model-spec.ts";
import { ls_status } from "../../../src/engine/native/abi.gen.ts";
import { NativeError } from "../../../src/engine/native/backend.ts";
import { findLibrary } from "../../../src/engine/native/library.ts";
import type { EngineOptions } from "../../../src/engine/types.ts";
import { fakeOptions, tinySpec } from "../../support/fake-engine.ts";
import { KvNode, until, type KvOptions, type Source } from "../../support/kv-node.ts";
import { tinyWeights } from "../../support/tiny-weights.ts";

let directory: string;
let weights: WeightPlan;
let libraryPath: string;

beforeAll(async () => {
  directory = mkdtempSync(join(tmpdir(), "layerscale-transfer-"));
  weights = tinyWeights(tinySpec, join(directory, "weights.bin"));
  libraryPath = await findLibrary();
});
afterAll(() => rmSync(directory, { recursive: true, force: true }));

const options = (overrides: Partial<EngineOptions> = {}): EngineOptions => fakeOptions({ weights, libraryPath, contextLength: 2048, maxTotalTokens: 8192, ...overrides });
const sender = (overrides: Partial<EngineOptions> = {}, kv: Partial<KvOptions> = {}): KvNode => new KvNode(options(overrides), { host: "127.0.0.1", ...kv });
const receiver = (overrides: Partial<EngineOptions> = {}, kv: Partial<KvOptions> = {}): KvNode => new KvNode(options(overrides), { host: null, ...kv });
const single = (overrides: Partial<EngineOptions> = {}): KvNode => new KvNode(options({ prefixCache: false, ...overrides }));
const prompt = (length: number): number[] => Array.from({ length }, (_, index) => (index * index * 7 + length * 31 + index) % tinySpec.vocab);
/** K and V of 16 tokens over all layers. */
const pageBytes = (elementBytes: number): number => 2 * 16 * tinySpec.layers * tinySpec.kvHeads * tinySpec.headDim * elementBytes;

test.each([["f32", 4, 1], ["bf16", 2, 2]] as const)("tokens and logprobs are those of one engine, %s cache", async (kvCacheDtype, elementBytes, threads) => {
  using from = sender({ kvCacheDtype, threads });
  using to = receiver({ kvCacheDtype });
  using alone = single({ kvCacheDtype });
  for (const length of [1, 2, 15, 16, 17, 18, 31, 32, 33, 100, 257, 1000]) {
    for (const sampling of [{ temperature: 0 }, { temperature: 1, seed: BigInt(length) }]) {
      const source = from.prefill(prompt(length), 1 + (length % 64));
      const sequence = await to.pull(source, prompt(length), "LS_KV_DONE", sampling);
      if (length === 1) from.release(source.id);
      expect([length, to.decode(sequence, 12)]).toEqual([length, alone.alone(prompt(length), 12, sampling)]);
      to.backend.closeSequence(sequence.slot, 0);
      const bytes = Math.ceil((length - 1) / 16) * pageBytes(elementBytes);
      expect(await from.event()).toMatchObject({ slot: -1, end: length === 1 ? "LS_KV_DROPPED" : "LS_KV_DONE", id: source.id, bytes });
    }
  }
  expect(from.stats()).toMatchObject({ staged: 0, staged_bytes_lo: 0, filling: 0, filling_bytes_lo: 0 });
});

test("warm on either side: cached pages and heads are staged, and held ones are not pulled", async () => {
  using from = sender();
  using to = receiver();
  using alone = single();
  const base = prompt(200);
  const longer = [...base, ...prompt(90)];
  from.release(from.prefill(base, 64, 1000).id);
  expect((await from.event()).end).toBe("LS_KV_DROPPED");
  // The sender has all but the last token, the head of a page included: no step runs.
  const first = await to.pull(from.prefill(base), base);
  expect(to.decode(first, 4)).toEqual(alone.alone(base, 4));
  expect((await from.event()).end).toBe("LS_KV_DONE");
  to.backend.closeSequence(first.slot, 200);

  const second = await to.pull(from.prefill(longer), longer);
  expect(to.decode(second, 4)).toEqual(alone.alone(longer, 4));
  expect((await from.event()).bytes / pageBytes(4)).toBe(Math.ceil(289 / 16) - Math.floor(200 / 16));
  to.backend.closeSequence(second.slot, 290);

  const third = to.sequence(longer);
  expect(to.openPull(third, from.prefill(longer))).toEqual({ cached: 288, pages: 0 });
  expect(to.decode(third, 4)).toEqual(alone.alone(longer, 4));
  to.backend.closeSequence(third.slot, 0);
});

test("with a key; without it the pull ends with auth", async () => {
  const key = crypto.getRandomValues(new Uint8Array(32));
  using from = sender({}, { key });
  using to = receiver({}, { key });
  using stranger = receiver();
  using alone = single();
  const sequence = await to.pull(from.prefill(prompt(500)), prompt(500));
  expect(to.decode(sequence, 4)).toEqual(alone.alone(prompt(500), 4));
  to.backend.closeSequence(sequence.slot, 0);
  const refused = await stranger.pull(from.prefill(prompt(100)), prompt(100), "LS_KV_AUTH");
  stranger.backend.closeSequence(refused.slot, 0);
});

test("another model, cache dtype or number of ranks is refused at open, with the field and both values", () => {
  using from = sender();
  const source = from.prefill(prompt(50));
  for (const [overrides, kv, text] of [
    [{}, { digest: 9 }, "model configuration is 0707070707070707... on the prefill worker and 0909090909090909... on the decode worker"],
    [{ kvCacheDtype: "bf16" }, {}, "cache dtype is f32 on the prefill worker and bf16 on the decode worker"],
    [{}, { ranks: 2 }, "tensor-parallel ranks is 1 on the prefill worker and 2 on the decode worker"],
  ] as [Partial<EngineOptions>, Partial<KvOptions>, string][]) {
    using to = receiver(overrides, kv);
    const before = to.backend.poolStats();
    let error: unknown;
    try {
      to.openPull(to.sequence(prompt(50)), source);
    } catch (thrown) {
      error = thrown;
    }
    expect(error).toBeInstanceOf(NativeError);
    expect((error as NativeError).status).toBe(ls_status.LS_LAYOUT);
    expect(String(error)).toContain(text);
    expect(to.backend.poolStats()).toEqual(before);
  }
});

test("used, released, expired and unknown ids; a slot whose pull failed is closed and the prompt runs whole", async () => {
  using from = sender({}, { holdMs: 2000 });
  using to = receiver();
  using alone = single();
  const used = from.prefill(prompt(60));
  const good = await to.pull(used, prompt(60));
  to.backend.closeSequence(good.slot, 0);
  expect((await from.event()).end).toBe("LS_KV_DONE");
  const released = from.prefill(prompt(60));
  from.release(released.id);
  expect((await from.event()).end).toBe("LS_KV_DROPPED");
  const expired = from.prefill(prompt(60));
  expect((await from.event()).end).toBe("LS_KV_EXPIRED");
  for (const [source, end] of [[used, "LS_KV_USED"], [released, "LS_KV_DROPPED"], [expired, "LS_KV_EXPIRED"], [{ ...used, id: used.id ^ 1n }, "LS_KV_UNKNOWN"]] as [Source, "LS_KV_USED"][]) {
    const sequence = await to.pull(source, prompt(60), end);
    expect(() => to.compute(sequence, 60, true)).toThrow("it can only be closed");
    to.backend.closeSequence(sequence.slot, 0);
    expect(to.alone(prompt(60), 3)).toEqual(alone.alone(prompt(60), 3));
  }
});

test("closed before, during and after its pull, nothing stays on either side", async () => {
  using from = sender();
  using to = receiver();
  for (let round = 0; round < 40; round++) {
    const sequence = to.sequence(prompt(900));
    to.openPull(sequence, from.prefill(prompt(900), 64, 1000));
    for (let turn = 0; turn < round % 7; turn++) await Bun.sleep(0);
    to.backend.closeSequence(sequence.slot, 0);
    to.backend.checkPool();
    await until("the copy is gone", () => from.stats().staged === 0);
  }
  await until("pulls are over", () => to.stats().pulls === 0);
});
