/** The CUDA library without a GPU: the scenarios of the CPU library over its simulator build, and the program's choice and refusals. */
import { expect, test } from "bun:test";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Engine } from "../../../src/engine/engine.ts";
import type { EngineOptions } from "../../../src/engine/types.ts";
import { program } from "../../support/launch.ts";
import { collect, fakeOptions, request, tinySpec, WORKER_ENTRY } from "../../support/fake-engine.ts";
import { tinyWeights } from "../../support/tiny-weights.ts";

const root = join(import.meta.dir, "../../..");
const simulator = join(root, "dist/liblayerscale_cuda_sim.so");
// Built by `bun build.ts cuda-tests`; npm test does so first.
const built = test.skipIf(!existsSync(simulator));

built.each(["native", "device-cache", "device-golden"])("%s.test.ts over the simulator", (name) => {
  const run = Bun.spawnSync([process.execPath, "test", "--timeout", "600000", join(import.meta.dir, `${name}.test.ts`)], { cwd: root, env: { ...process.env, LAYERSCALE_NATIVE_LIB: simulator } });
  expect([run.exitCode, run.exitCode === 0 ? "" : run.stderr.toString().slice(-4000)]).toEqual([0, ""]);
}, 900_000);

built("pages come from the device's memory: what weights, buffers and graphs leave of the fraction", async () => {
  const directory = mkdtempSync(join(tmpdir(), "layerscale-cuda-"));
  const options: EngineOptions = fakeOptions({
    libraryPath: simulator, weights: tinyWeights(tinySpec, join(directory, "weights.bin")), kvCacheDtype: "bf16", gpu: { index: 0, ranks: 1 }, maxTotalTokens: null, memoryUtilization: 0.5,
    contextLength: 512, maxNumSeqs: 8,
  });
  try {
    const engine = await Engine.start(options, { workerEntry: WORKER_ENTRY, checkPages: true });
    expect(engine.info).toMatchObject({ device: "cuda", pages: 8 * 32, kvCacheDtype: "bf16" });
    expect((await collect(engine.generate(request({ prompt: 40, sampling: { maxTokens: 4, ignoreEos: true } })))).tokens.length).toBe(4);
    await engine.stop();
    const refused = await Engine.start({ ...options, memoryUtilization: 0.0001 }, { workerEntry: WORKER_ENTRY }).then(() => "", (error: Error) => error.message);
    expect(refused).toMatch(/too little memory for one sequence of 512 tokens: 0\.0001 of 8\.00 GiB device memory, minus .* of weights, .* of step buffers, .* of graphs/);
  } finally {
    rmSync(directory, { recursive: true, force: true });
  }
}, 120_000);

built.each([
  ["no driver", { LAYERSCALE_SIM_DRIVER: "0" }, [], 1, /^error: --device cuda.*no CUDA driver is installed/],
  ["an old driver", { LAYERSCALE_SIM_DRIVER: "12040" }, [], 1, /^error: --device cuda.*too old/],
  ["an architecture without bf16", { LAYERSCALE_SIM_CAPABILITY: "7.5" }, [], 1, /^error: --device cuda.*GPU 0 .*7\.5.*no bf16/],
  ["no fp8", { LAYERSCALE_SIM_CAPABILITY: "8.0" }, ["--kv-cache-dtype", "fp8_e4m3"], 2, /^error: --kv-cache-dtype: GPU 0 .*no fp8/],
  ["more ranks than GPUs", { LAYERSCALE_SIM_DEVICES: "2" }, ["--tp", "3"], 2, /^error: --tp: expected at most 2, got "3"; 2 GPUs are visible/],
  ["a GPU that is not there", { LAYERSCALE_SIM_DEVICES: "2" }, ["--device", "cuda:2"], 2, /^error: --device: GPU 2 is asked for, 2 GPUs are visible/],
  ["f32 pages", {}, ["--kv-cache-dtype", "f32"], 2, /^error: --kv-cache-dtype/],
] as [string, Record<string, string>, string[], number, RegExp][])("%s is told in one line before a model is opened", (_, environment, flags, code, line) => {
  const run = Bun.spawnSync([...program(), "--model", "no-such-model", "--port", "0", ...flags], { env: { ...process.env, ...environment, LAYERSCALE_NATIVE_LIB: simulator } });
  const lines = run.stderr.toString().trim().split("\n").filter((text) => !text.startsWith("{"));
  expect(lines).toEqual([expect.stringMatching(line)]);
  expect(run.exitCode).toBe(code);
});
