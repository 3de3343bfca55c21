import { join } from "node:path";
import type { ModelSpec } from "../../src/config/model-spec.ts";
import { Engine } from "../../src/engine/engine.ts";
import type { EngineOptions, EngineStartOptions, GenerateRequest, SamplingParams, StepOutput } from "../../src/engine/types.ts";

export const WORKER_ENTRY = join(import.meta.dir, "engine-worker.ts");

export const tinySpec: ModelSpec = {
  architecture: "llama", hidden: 64, layers: 2, heads: 4, kvHeads: 2, headDim: 16, intermediate: 128, vocab: 1000, rmsEps: 1e-5, maxContext: 2048,
  rope: { style: "half", invFreq: [1, 0.5, 0.25, 0.125, 0.1, 0.05, 0.02, 0.01], scale: 1 },
  qkvBias: false, oBias: false, qkNorm: false, tiedEmbeddings: true,
};

export function fakeOptions(overrides: Partial<EngineOptions> = {}): EngineOptions {
  return {
    spec: tinySpec, weights: { files: [], tensors: [] }, libraryPath: "fake", contextLength: 512, maxNumSeqs: 8, chunkedPrefillSize: 64,
    maxTotalTokens: 1024, memoryUtilization: 0.5, kvCacheDtype: "f32", kvScales: null, prefixCache: true, threads: 1, gpu: null, transfer: null, ...overrides,
  };
}

/** A real Engine with its real Worker over the model backend. `await using` stops it. */
export async function fakeEngine(overrides: Partial<EngineOptions> = {}, start: EngineStartOptions = {}): Promise<Engine & AsyncDisposable> {
  const engine = await Engine.start(fakeOptions(overrides), { workerEntry: WORKER_ENTRY, checkPages: true, ...start });
  return Object.assign(engine, { [Symbol.asyncDispose]: () => engine.stop() });
}

export function request(overrides: Partial<Omit<GenerateRequest, "sampling">> & { prompt?: number | number[]; sampling?: Partial<SamplingParams> } = {}): GenerateRequest {
  const { prompt = 20, sampling, ...rest } = overrides;
  return {
    id: "test",
    promptTokenIds: typeof prompt === "number" ? Array.from({ length: prompt }, (_, index) => (index * 7) % 1000) : prompt,
    sampling: { temperature: 0, topP: 1, seed: 1n, maxTokens: 8, ignoreEos: false, logprobs: null, ...sampling },
    eosTokenIds: [], stopTokenIds: [], ...rest,
  };
}

/** All outputs of a request. */
export async function collect(outputs: AsyncIterable<StepOutput>): Promise<{ tokens: number[]; outputs: StepOutput[]; last: StepOutput }> {
  const all: StepOutput[] = [];
  for await (const output of outputs) all.push(output);
  const last = all.at(-1);
  if (last === undefined) throw new Error("the stream ended without an output");
  return { tokens: all.flatMap((output) => output.tokenIds), outputs: all, last };
}
