import type { EngineError } from "../engine/errors.ts";
import type { EngineInfo, KvEvent, KvSource, TransferReport } from "../engine/types.ts";
import type { LoadedModel } from "../model/types.ts";
import type { MetricsSource } from "../telemetry/metrics.ts";
import type { Tokenizer } from "../tokenizer/tokenizer.ts";
import type { GeneratingEngine } from "./handler.ts";

/** What a worker needs of the engine. */
export interface WorkerEngine extends GeneratingEngine, MetricsSource {
  readonly info: EngineInfo;
  onFailure(listener: (error: EngineError) => void): () => void;
  onKvEvents(listener: (events: KvEvent[]) => void): () => void;
  onTransfer(listener: (report: TransferReport) => void): () => void;
  dropCopy(source: KvSource): void;
  releaseCopy(copy: bigint): void;
  drain(timeoutMs: number): Promise<boolean>;
  stop(): Promise<void>;
}

/** What administrative calls need of it beside. */
export interface ControlledEngine extends WorkerEngine {
  pause(): Promise<void>;
  resume(): Promise<void>;
  clearCache(): Promise<void>;
}

/** Makes an engine over other weights of the same model. */
export interface WeightSource {
  /** Reads headers and settings. @throws ModelError when the weights do not fit the running model, or cannot be read */
  check(path: string): Promise<LoadedModel>;
  /** An engine like the first one: same shapes, same pool. @throws EngineError */
  start(model: LoadedModel): Promise<ControlledEngine>;
}

export interface LoadedWorker {
  engine: WorkerEngine;
  model: LoadedModel;
  tokenizer: Tokenizer;
  servedName: string;
  /** The repo that the model came from, as it was asked for; null or absent for a local path. */
  source?: string | null;
  /** Present where weights can be exchanged and generation paused (--enable-rl); the engine is a ControlledEngine then. */
  weights?: WeightSource;
}
