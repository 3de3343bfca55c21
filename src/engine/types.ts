import type { KvCacheDtype } from "../config/engine-config.ts";
import type { ModelSpec, WeightPlan } from "../config/model-spec.ts";

/** Why a sequence ended. Exactly one per request, on its last output. */
export type FinishReason = "stop" | "length" | "cancelled" | "error";

export interface SamplingParams {
  /** 0 = greedy. */
  temperature: number;
  /** (0, 1]. */
  topP: number;
  /** 64 bits, signed or unsigned; null = the engine draws one. Random numbers are keyed by (seed, position). */
  seed: bigint | null;
  /** null = until eos or the end of the context. */
  maxTokens: number | null;
  ignoreEos: boolean;
  /** null = none; 0..20 = the chosen token's logprob plus that many alternatives. */
  logprobs: number | null;
}

export interface GenerateRequest {
  /** For logs only; need not be unique. */
  id: string;
  promptTokenIds: ArrayLike<number>;
  sampling: SamplingParams;
  /** End the sequence unless ignoreEos; the token is part of the output. */
  eosTokenIds: readonly number[];
  /** End the sequence always; the token is part of the output. */
  stopTokenIds: readonly number[];
  /** Higher runs first; default 0. */
  priority?: number;
  /** 64-bit id of a cache domain; sequences of different domains share no pages. Default 0n. */
  cacheDomain?: bigint;
  /** Warm-up and health checks: not counted in metrics, pages never enter the prefix cache. */
  internal?: boolean;
  /** Prefill role: compute the prompt, keep a copy of its KV for another engine to fetch, end. The last output has `staged`. */
  stage?: boolean;
  /** Decode role: take the prompt's KV from there instead of computing it; whatever fails, the prompt is computed here. */
  pull?: KvSource | null;
}

/** Where a staged copy of a prompt's KV can be fetched, once. */
export interface KvSource {
  /** Numeric address. */
  host: string;
  port: number;
  /** 64 bits. */
  id: bigint;
  /** The sender's layout, as its engine describes it. */
  layout: Uint8Array;
}

export interface TokenLogprob {
  tokenId: number;
  logprob: number;
  /** By falling logprob. */
  top: { tokenId: number; logprob: number }[];
}

export interface Usage {
  promptTokens: number;
  completionTokens: number;
  /** Prompt tokens that were not computed: prefix-cache hits at admission, and what was pulled. */
  cachedTokens: number;
}

/** What one engine step produced for one request. The last one carries finishReason. */
export interface StepOutput {
  tokenIds: number[];
  /** One per token when asked for. */
  logprobs: TokenLogprob[] | null;
  finishReason: FinishReason | null;
  /** The eos or stop token that ended it (also the last of tokenIds). */
  stopTokenId: number | null;
  usage: Usage;
  /** Set with finishReason "error". */
  error: string | null;
  /** With finishReason "error": a refusal that is no fault of the engine. */
  refusal?: Refusal | null;
  /** With the last output of a request with `stage`: the id of the copy. */
  staged?: bigint | null;
}

/** overloaded: staged copies have reached their cap · layout: the KV of the other engine does not fit this one */
export type Refusal = "overloaded" | "layout";

/** How a transfer ended; the last three before it began. */
export type TransferOutcome =
  | "done" | "refused" | "unknown" | "used" | "expired" | "dropped" | "reset" | "timeout" | "corrupt" | "no_route" | "auth"
  | "handoff" | "no_pages" | "preempted";

/** One per staged copy and per pull, when it has ended. */
export interface TransferReport {
  role: "send" | "receive";
  requestId: string;
  /** Decimal; null when the hand-off could not be read. */
  transferId: string | null;
  outcome: TransferOutcome;
  /** Of KV. */
  bytes: number;
  /** Of a pull from its beginning, of a copy from its publication. */
  seconds: number;
  /** Words for people; empty when all went well. */
  detail: string;
  /** The prompt is computed here instead. */
  fallback: boolean;
}

/** Gauges of the transfer of KV. */
export interface TransferCounts {
  /** Copies that wait to be fetched or are being sent, and their host memory. */
  staged: number;
  stagedBytes: number;
  /** Copies of prompts that are being computed. */
  filling: number;
  fillingBytes: number;
  /** Pulls under way. */
  pulls: number;
}

export interface TransferOptions {
  /** Numeric address of the listener; null = this engine only pulls. */
  host: string | null;
  /** How long a staged copy waits to be fetched. */
  holdMs: number;
  /** Pre-shared key, 16 to 64 bytes; null = transfers are neither authenticated nor encrypted. */
  key: Uint8Array | null;
}

export interface TransferInfo {
  /** Of the listener; 0 = none. */
  port: number;
  /** Travels with the hand-off of a copy. */
  layout: Uint8Array;
  /** Staged bytes from which new prompts are refused. */
  capBytes: number;
}

/** A snapshot after a step; counters are since start. */
export interface EngineStats {
  running: number;
  waiting: number;
  pagesTotal: number;
  pagesFree: number;
  pagesCached: number;
  pagesHeld: number;
  steps: number;
  preemptions: number;
  evictions: number;
  /** Times that work was queued and no step was possible for 5 s; each one is also a failure. */
  stalls: number;
  /** Prompt tokens computed here; neither cached nor pulled. Internal requests excluded. */
  promptTokensComputed: number;
  /** null = this engine does not transfer KV. */
  transfer: TransferCounts | null;
}

/** One per request, after its last output. Times in milliseconds; null = that moment never came. */
export interface FinishedRequest {
  id: string;
  finishReason: FinishReason;
  usage: Usage;
  internal: boolean;
  /** From generate() until pages were first given. */
  queuedMs: number | null;
  /** From generate() until the first token. */
  ttftMs: number | null;
  durationMs: number;
}

/** What listeners get after each engine step. */
export interface StepReport {
  stats: EngineStats;
  /** One per token that followed another token of its request in this step; internal requests excluded. */
  interTokenMs: number[];
}

export interface LoadProgress {
  phase: "weights" | "repack" | "pool" | "warm-up";
  /** 0..100 of this phase. */
  percent: number;
  /** Weight bytes placed so far, of totalBytes. */
  bytes: number;
  totalBytes: number;
}

export interface EngineStartOptions {
  /** Module that the Worker runs; the program's own entry by default. Tests give their own. */
  workerEntry?: string | URL;
  onProgress?: (progress: LoadProgress) => void;
  /** Refuse to go on when native page counts differ from the scheduler's arithmetic. Tests switch it on. */
  checkPages?: boolean;
  /** Steps that the device gets before the first of them is waited for: 1 or 2. By default 2 where the device queues them. */
  stepsSubmitted?: number;
}

/** Prefix-cache events, in order. Pages are native page ids; parent null = first page of a prompt. */
export type KvEvent =
  | { kind: "stored"; page: number; parent: number | null; domain: bigint; tokenIds: number[] }
  | { kind: "removed"; page: number }
  | { kind: "cleared" };

/** Everything the engine Worker needs; structured-cloneable. */
export interface EngineOptions {
  spec: ModelSpec;
  weights: WeightPlan;
  /** Path of the native library. */
  libraryPath: string;
  /** Tokens a sequence may hold (prompt + output): min of model, flag and licence. */
  contextLength: number;
  maxNumSeqs: number;
  /** Token budget of one step (chunked prefill). */
  chunkedPrefillSize: number;
  /** KV pool in tokens; null = from memory. */
  maxTotalTokens: number | null;
  /** Fraction of available memory that weights and pool may take. */
  memoryUtilization: number;
  kvCacheDtype: KvCacheDtype;
  prefixCache: boolean;
  /** 0 = one per core. */
  threads: number;
  /** First GPU and tensor-parallel ranks on it and those after it; null = the library's device has no GPUs. */
  gpu: { index: number; ranks: number } | null;
  /** null = KV does not leave or enter. */
  transfer: TransferOptions | null;
}

export interface EngineInfo {
  device: string;
  isa: string;
  threads: number;
  pageTokens: number;
  pages: number;
  /** min(contextLength, pool tokens). */
  contextLength: number;
  maxNumSeqs: number;
  maxBatchTokens: number;
  kvCacheDtype: KvCacheDtype;
  prefixCache: boolean;
  weightBytes: number;
  pageBytes: number;
  /** Words for people: how the pool size came about. */
  memoryRule: string;
  loadSeconds: number;
  transfer: TransferInfo | null;
}
