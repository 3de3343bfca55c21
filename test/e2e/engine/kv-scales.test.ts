/** Scales of a checkpoint's fp8 KV cache through the executable, over the simulated CUDA library. */
import { afterAll, expect, test } from "bun:test";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { EngineOptions } from "../../../src/engine/types.ts";
import { fakeOptions, tinySpec } from "../../support/fake-engine.ts";
import { KvNode } from "../../support/kv-node.ts";
import { tinyWeights } from "../../support/tiny-weights.ts";
import { addTensors, scalar, scaleName, scaleTensors } from "../../support/kv-scales.ts";
import { launch } from "../../support/launch.ts";
import { tinyModel, writeTinyHf } from "../../support/models.ts";

const simulator = join(import.meta.dir, "../../../dist/liblayerscale_cuda_sim.so");
// Built by `bun build.ts cuda-tests`; npm test does so first.
const built = test.skipIf(!existsSync(simulator));
const scratch = mkdtempSync(join(tmpdir(), "layerscale-e2e-scales-"));
afterAll(() => rmSync(scratch, { recursive: true }));

const LIMIT = 180_000;
const env = { LAYERSCALE_NATIVE_LIB: simulator };
const FLAGS = ["--port", "0", "--ctx", "128", "--max-num-seqs", "2", "--max-total-tokens", "512", "--chunked-prefill-size", "64"];
const SIZE = 400;
const LAYERS = [0, 1, 2];

/** A model whose K and V reach far beyond the 448 of e4m3; q and o are so much smaller that its answers are those of the tiny model. */
function large(scales: Record<string, number>): string {
  const directory = writeTinyHf(mkdtempSync(join(scratch, "model-")), tinyModel("tiny-llama"));
  scaleTensors(directory, /\.[kv]_proj\.weight$/, SIZE);
  scaleTensors(directory, /\.[qo]_proj\.weight$/, 1 / SIZE);
  addTensors(directory, Object.fromEntries(Object.entries(scales).map(([name, value]) => [name, scalar(value, "F32", [1])])));
  return directory;
}
const scales = (value: number): Record<string, number> => Object.fromEntries(LAYERS.flatMap((layer) => [[scaleName(layer, "k_proj.k_scale"), value], [scaleName(layer, "v_proj.v_scale"), value]]));

const PROMPTS = ["a b c d", "the same words again and again, the same words", "0123456789", "What is this?"];

/** Log probabilities of the likeliest tokens after each prompt, and the log lines of the start. */
async function likely(model: string, dtype: string): Promise<{ tops: Record<string, number>[]; messages: string[] }> {
  await using server = launch(["serve", "--model", model, "--kv-cache-dtype", dtype, ...FLAGS], { env });
  const { url } = await server.log("listening");
  await server.log("ready", LIMIT);
  const tops: Record<string, number>[] = [];
  for (const prompt of PROMPTS) {
    const response = await fetch(`${url as string}/v1/completions`, { method: "POST", body: JSON.stringify({ prompt, temperature: 0, max_tokens: 3, logprobs: 5, ignore_eos: true }) });
    expect(response.status).toBe(200);
    const { choices } = (await response.json()) as { choices: { logprobs: { top_logprobs: Record<string, number>[] } }[] };
    tops.push(choices[0]!.logprobs.top_logprobs[0]!);
  }
  return { tops, messages: server.logs.map(({ message }) => message) };
}

/** Mean difference; a token that is told on one side only counts as one as likely as the last that the other side tells. */
function difference(a: Record<string, number>[], b: Record<string, number>[]): number {
  const offs = a.flatMap((top, i) => Object.entries(top).map(([token, logprob]) => Math.abs(logprob - (b[i]![token] ?? Math.min(...Object.values(b[i]!))))));
  return offs.reduce((sum, off) => sum + off, 0) / offs.length;
}

const USED = "KV cache scales of the checkpoint";
const NONE = "the checkpoint has no scales for its KV cache: all are 1";

built("a checkpoint with scales answers as with a bf16 cache, and does not without them", async () => {
  // Whoever does not ask for an fp8 cache does not meet its scales, whatever they are.
  const exact = await likely(large({ ...scales(4), [scaleName(1, "k_proj.k_scale")]: NaN }), "bf16");
  const scaled = await likely(large(scales(6.7)), "fp8_e4m3");
  const cut = await likely(large({}), "fp8_e4m3");
  const [near, far] = [difference(scaled.tops, exact.tops), difference(cut.tops, exact.tops)];
  expect(near).toBeLessThan(0.1);
  expect(far).toBeGreaterThan(4 * near);
  expect([exact, scaled, cut].map(({ messages }) => [USED, NONE].map((line) => messages.filter((message) => message === line).length))).toEqual([[0, 0], [1, 0], [0, 1]]);
}, LIMIT);

built.each([
  ["a scale that is no number", { ...scales(4), [scaleName(1, "v_proj.v_scale")]: NaN }, /^error: .*model\.safetensors: tensor "model\.layers\.1\.self_attn\.v_proj\.v_scale": is NaN, expected a finite number above 0$/],
  ["a layer without scales", Object.fromEntries(Object.entries(scales(4)).slice(0, 4)), /^error: .*tensor "model\.layers\.0\.self_attn\.k_proj\.k_scale": layer 0 has a scale, but layer 2 has none/],
  ["K without V", Object.fromEntries(Object.entries(scales(4)).slice(0, 5)), /^error: .*tensor "model\.layers\.2\.self_attn\.k_proj\.k_scale": is 4, but layer 2 has no scale for V: expected both$/],
] as [string, Record<string, number>, RegExp][])("%s is refused with one line before weights load", async (_, tensors, line) => {
  await using server = launch(["serve", "--model", large(tensors), "--kv-cache-dtype", "fp8_e5m2", ...FLAGS], { env });
  expect(await server.exit()).toBe(1);
  expect(server.stderr.trim().split("\n").filter((text) => !text.startsWith("{"))).toEqual([expect.stringMatching(line)]);
  expect(server.logs.map(({ message }) => message).filter((message) => /loading|weights|ready$/.test(message))).toEqual([]);
}, LIMIT);

built("a worker that reloads weights takes their scales, and keeps its own where they are not usable", async () => {
  const [first, second, bad] = [large(scales(6.5)), large(scales(7)), large({ ...scales(4), [scaleName(0, "k_proj.k_scale")]: 0 })];
  const dynamo = { DYN_DISCOVERY_BACKEND: "file", DYN_FILE_KV: join(scratch, "discovery"), DYN_TCP_RPC_HOST: "127.0.0.1", DYN_REQUEST_PLANE: "tcp", DYN_EVENT_PLANE: "zmq", DYN_SYSTEM_PORT: "0", DYN_SYSTEM_HOST: "127.0.0.1" };
  await using worker = launch(["dynamo", "--model", first, "--enable-rl", "--kv-cache-dtype", "fp8_e4m3", ...FLAGS.slice(2)], { env: { ...env, ...dynamo } });
  const { port } = await worker.log("system server listens", LIMIT);
  await worker.log("worker ready", LIMIT);
  const call = async (route: string, body: unknown) => (await (await fetch(`http://127.0.0.1:${port as number}/engine/${route}`, { method: "POST", body: JSON.stringify(body) })).json()) as Record<string, unknown>;
  expect(await call("pause_generation", { mode: "wait" })).toMatchObject({ status: "ok" });
  expect(await call("update_weights_from_disk", { model_path: bad })).toMatchObject({ status: "error", message: expect.stringContaining('tensor "model.layers.0.self_attn.k_proj.k_scale": is 0, expected') });
  expect(await call("update_weights_from_disk", { model_path: second })).toMatchObject({ status: "ok" });
  expect(worker.logs.filter(({ message }) => message === USED).map(({ k, v }) => [k, v])).toEqual([[[6.5, 6.5], [6.5, 6.5]], [[7, 7], [7, 7]]]);
}, LIMIT);

built("engines with other scales refuse each other's KV by name, those with the same take it", async () => {
  const weights = tinyWeights(tinySpec, join(scratch, "weights.bin"));
  const scalesOf = (values: [k: number, v: number][]) => values.map(([k, v]) => ({ k, v }));
  const node = (kvScales: EngineOptions["kvScales"], host: string | null) =>
    new KvNode(fakeOptions({ weights, libraryPath: simulator, kvCacheDtype: "fp8_e4m3", gpu: { index: 0, ranks: 1 }, memoryUtilization: 0.5, contextLength: 256, maxNumSeqs: 2, kvScales }), { host });
  const own = scalesOf([[0.5, 0.02], [0.03, 0.25]]);
  const prompt = Array.from({ length: 40 }, (_, index) => (index * 7) % tinySpec.vocab);
  using from = node(own, "127.0.0.1");
  for (const other of [null, scalesOf([[0.5, 0.02], [0.03, 0.26]]), own.toReversed()]) {
    using to = node(other, null);
    expect(() => to.openPull(to.sequence(prompt), from.prefill(prompt))).toThrow(/cache scales is [0-9a-f]{16}\.\.\. on the prefill worker and [0-9a-f]{16}\.\.\. on the decode worker/);
  }
  using to = node(structuredClone(own), null);
  expect(to.layout).toEqual(from.layout);
  const sequence = await to.pull(from.prefill(prompt), prompt);
  to.backend.closeSequence(sequence.slot, 0);
  using unit = node(scalesOf([[1, 1], [1, 1]]), null);
  using none = node(null, null);
  expect(unit.layout).toEqual(none.layout);
}, LIMIT);
