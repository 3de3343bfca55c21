import { basename } from "node:path";
import type { EngineConfig } from "../config/engine-config.ts";
import type { KvScale } from "../config/model-spec.ts";
import { Engine } from "../engine/engine.ts";
import { EngineError } from "../engine/errors.ts";
import type { EngineInfo, EngineOptions, TransferOptions } from "../engine/types.ts";
import { openModel } from "../model/model.ts";
import { type LoadedModel, ModelError } from "../model/types.ts";
import { logger } from "../telemetry/log.ts";
import { ranksFor } from "./device.ts";
import { type SelectedDevice, selectDevice } from "./select-device.ts";
import { Tokenizer } from "../tokenizer/tokenizer.ts";
import { resolveModel } from "./resolve-model.ts";

export interface LoadedEngine {
  engine: Engine;
  model: LoadedModel;
  tokenizer: Tokenizer;
  /** Tokens a sequence may hold: min of model, --ctx, licence and pool. */
  contextLength: number;
  /** The name clients send. */
  servedName: string;
  /** The repo that the model came from, as it was asked for; null for a local path. */
  source: string | null;
  /** Engines over other weights of this model. */
  weights: { check(path: string): Promise<LoadedModel>; start(model: LoadedModel): Promise<Engine> };
}

/** Fraction of available memory on the CPU, where other programs live too. */
const CPU_MEMORY_UTILIZATION = 0.5;
const GPU_MEMORY_UTILIZATION = 0.9;
/** An engine in place of another one: the share was judged when the first one started. */
const REPLACEMENT_UTILIZATION = 0.95;

/**
 * Tokens of a step: as many as a core computes in a few hundred milliseconds. A step cannot be interrupted, so this bounds how long other
 * sequences wait for their next token and how long a cancelled one holds its pages.
 */
const CHUNK_BY_ISA: Record<string, number> = { amx: 512, avx512: 256, avx2: 128 };
/** On GPUs: enough rows to fill one, while its buffers stay small beside its memory. */
const LARGE_GPU_BYTES = 64 * 2 ** 30;

function chunkFor({ device, info }: SelectedDevice): number {
  if (device.kind === "cpu") return CHUNK_BY_ISA[info.isa] ?? 128;
  return Math.min(...device.gpus.map((gpu) => gpu.memory ?? 0)) >= LARGE_GPU_BYTES ? 8192 : 2048;
}

export function servedModelName(config: EngineConfig, model: LoadedModel): string {
  return config.servedModelName ?? (model.format === "gguf" ? basename(model.path).replace(/\.gguf$/i, "") : model.name);
}

/** A model without its weights, and where it came from. */
export interface OpenedModel {
  model: LoadedModel;
  source: string | null;
}

/**
 * Opens a model without loading weights, after a download where it is one of the hub: shapes, names and tokenizer files are checked here.
 * @param check judges the settings of a repo before its weights are downloaded
 * @throws ModelError, HubError; the signal's reason when it is raised during the download
 */
export async function openConfiguredModel(config: EngineConfig, signal: AbortSignal, check?: (directory: string) => void): Promise<OpenedModel> {
  const { config: local, source } = await resolveModel(config, signal, check);
  return { model: await openModel(local.model), source };
}

/** Tokens a sequence may hold before the size of the pool is known. */
export const contextLimit = (config: EngineConfig, model: LoadedModel): number => Math.min(model.spec.maxContext, config.ctx ?? Infinity, config.licenseMaxCtx ?? Infinity);

/** Scales of the checkpoint for an fp8 cache. Another cache has no use for them, whatever they are. @throws ModelError */
const scalesFor = (kvCacheDtype: string, model: LoadedModel): KvScale[] | null => (kvCacheDtype.startsWith("fp8") ? model.kvScales() : null);

function reportScales({ kvCacheDtype, kvScales }: EngineOptions, model: LoadedModel): void {
  if (!kvCacheDtype.startsWith("fp8")) return;
  const log = logger("layerscale::load");
  if (kvScales === null) return log.warn("the checkpoint has no scales for its KV cache: all are 1", { kvCacheDtype, model: model.name });
  const range = (side: keyof KvScale): number[] => [Math.min(...kvScales.map((scale) => scale[side])), Math.max(...kvScales.map((scale) => scale[side]))];
  log.info("KV cache scales of the checkpoint", { kvCacheDtype, model: model.name, layers: kvScales.length, k: range("k"), v: range("v") });
}

/**
 * What an engine for this model is started with on a device, which sets how many tokens a step computes.
 * @throws UsageError where --tp does not fit the model, ModelError where its scales do not fit an fp8 cache
 */
export function engineOptions(config: EngineConfig, model: LoadedModel, selected: SelectedDevice, transfer: TransferOptions | null): EngineOptions {
  const { device, libraryPath } = selected;
  const gpu = device.kind === "cuda" ? { index: device.index, ranks: ranksFor(device, model.spec) } : null;
  return {
    spec: model.spec,
    weights: model.weights,
    libraryPath,
    contextLength: contextLimit(config, model),
    maxNumSeqs: config.maxNumSeqs,
    chunkedPrefillSize: config.chunkedPrefillSize ?? chunkFor(selected),
    maxTotalTokens: config.maxTotalTokens,
    memoryUtilization: config.gpuMemoryUtilization ?? (gpu === null ? CPU_MEMORY_UTILIZATION : GPU_MEMORY_UTILIZATION),
    // f32 keeps quantised and bf16 models within the golden tolerance; bf16 halves the pool at about 0.1 in logprobs of unlikely tokens.
    kvCacheDtype: config.kvCacheDtype !== "auto" ? config.kvCacheDtype : gpu === null ? "f32" : "bf16",
    kvScales: scalesFor(config.kvCacheDtype, model),
    prefixCache: config.prefixCache,
    threads: 0,
    gpu,
    transfer,
  };
}

/**
 * Starts the engine for a model: checks limits, loads weights, warms up. Shared by both subcommands.
 * @param opened by openConfiguredModel, so that names are known while weights load
 * @param transfer how KV is exchanged with other engines; null = not at all
 * @throws ModelError, EngineError
 */
export async function loadEngine(config: EngineConfig, { model, source }: OpenedModel, transfer: TransferOptions | null = null): Promise<LoadedEngine> {
  const log = logger("layerscale::load");
  const wanted = contextLimit(config, model);
  if (config.ctx !== null && config.ctx > wanted)
    log.warn("--ctx is cut", { ctx: config.ctx, model: model.spec.maxContext, license: config.licenseMaxCtx, used: wanted });
  const selected = await selectDevice(config);
  const options = engineOptions(config, model, selected, transfer);
  reportScales(options, model);
  if (selected.device.kind === "cuda" && options.gpu !== null) log.info("GPUs", { used: selected.device.gpus.slice(0, options.gpu.ranks), driver: selected.info.driver });
  const [engine, tokenizer] = await Promise.all([
    Engine.start(options),
    Promise.resolve().then(() => Tokenizer.create(model.assets.tokenizerJson, model.assets.tokenizerConfig)),
  ]);
  const { transfer: exchange, ...info } = engine.info;
  log.info("engine ready", { ...info, ...(exchange && { transferPort: exchange.port, transferCapBytes: exchange.capBytes }), model: model.name, format: model.format, dtype: model.dtype });
  return {
    engine, model, tokenizer, contextLength: engine.info.contextLength, servedName: servedModelName(config, model), source,
    weights: weightSource(options, engine.info, model),
  };
}

/**
 * Starts engines like the first one over other checkpoints: the same shapes and vocabulary, the same pool and limits, so that nothing that
 * was told about the worker changes. Number formats may differ.
 */
function weightSource(options: EngineOptions, info: EngineInfo, first: LoadedModel): LoadedEngine["weights"] {
  return {
    async check(path) {
      const model = await openModel(path);
      const differing = (Object.keys(first.spec) as (keyof typeof first.spec)[]).find((field) => JSON.stringify(first.spec[field]) !== JSON.stringify(model.spec[field]));
      if (differing !== undefined)
        throw new ModelError(model.path, differing, `${JSON.stringify(model.spec[differing])}, expected ${JSON.stringify(first.spec[differing])} as in the model that runs`);
      scalesFor(options.kvCacheDtype, model);
      return model;
    },
    async start(model) {
      const maxTotalTokens = info.pages * info.pageTokens;
      const next: EngineOptions = { ...options, spec: model.spec, weights: model.weights, kvScales: scalesFor(options.kvCacheDtype, model), maxTotalTokens, memoryUtilization: REPLACEMENT_UTILIZATION };
      reportScales(next, model);
      const engine = await Engine.start(next);
      if (engine.info.pages === info.pages) return engine;
      await engine.stop();
      throw new EngineError("engine", `memory for ${engine.info.pages} KV pages is left, ${info.pages} are needed: the worker has told its pool size`);
    },
  };
}
