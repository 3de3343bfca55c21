import type { WeightTensor } from "../../config/model-spec.ts";
import type { TransferOptions } from "../types.ts";
import { ls_status } from "./abi.gen.ts";
import type { NativeTransfer } from "./transfer.ts";

/** Page accounting of the native pool; free + cached + held = total always. */
export interface PoolCounts {
  total: number;
  free: number;
  /** In the prefix cache and held by no sequence: evictable. */
  cached: number;
  held: number;
  openSeqs: number;
  /** Pages evicted since start. */
  evictions: number;
}

export interface DeviceInfo {
  device: string;
  isa: string;
  isas: string[];
  threads: number;
  name: string;
  /** It works on submitted steps while nobody waits for them. */
  queues?: boolean;
  /** Of the CUDA library: versions as 1000 * major + 10 * minor (driver 0 = none), the visible GPUs, and why there are none. */
  driver?: number;
  runtime?: number;
  devices?: GpuInfo[];
  error?: string;
}

export interface GpuInfo {
  index: number;
  name?: string;
  uuid?: string;
  /** Compute capability, "9.0". */
  capability?: string;
  /** Bytes. */
  memory?: number;
  multiprocessors?: number;
  /** Why it cannot be used: the library has no code for it. */
  error?: string;
}

/** Memory of a device that has its own, in bytes, once weights are loaded; of several GPUs the tightest. */
export interface DeviceMemory {
  total: number;
  /** By others, when the engine was created. */
  usedBefore: number;
  weights: number;
  workspace: number;
  graphs: number;
  /** Now, before the graphs. */
  free: number;
  /** Of one KV page over all layers. */
  pageBytes: number;
}

/** A native call failed. `status` is a negative ls_status. */
export class NativeError extends Error {
  override name = "NativeError";
  constructor(
    readonly status: number,
    readonly call: string,
    /** Of the library. */
    readonly text: string,
  ) {
    super(`${call}: ${text} (${statusName(status)})`);
  }
}

export function statusName(status: number): string {
  return Object.entries(ls_status).find(([, value]) => value === status)?.[0] ?? `status ${status}`;
}

/**
 * One engine of a device library, as the engine loop uses it: native/layerscale.h without pointers. Every method throws NativeError
 * on failure; only finishWeights and wait block. All calls come from the engine thread.
 */
export interface NativeBackend {
  readonly device: DeviceInfo;
  /** Address that ls_load_progress takes, for other threads; null where there is none. */
  readonly handle: number | null;
  /** Maps a weight file read-only. Returns its index. */
  mapWeights(path: string, bytes: number): number;
  setTensor(tensor: WeightTensor, file: number): void;
  finishWeights(): void;
  /** After finishWeights; null = the device's memory is the host's. */
  memory(): DeviceMemory | null;
  createPool(pages: number): void;
  poolStats(): PoolCounts;
  /** Walks every structure of pool and prefix cache; throws at the first broken invariant. */
  checkPool(): void;
  /** Attaches the longest cached prefix of tokens[0, count). Computing begins at start: a copied head of a further page may lie between. */
  openSequence(tokens: Int32Array, count: number, domain: bigint): { slot: number; cachedTokens: number; start: number };
  /** The pages of the first `commit` tokens enter the prefix cache, the rest are freed. */
  closeSequence(slot: number, commit: number): void;
  /** Accepts the plan whole, or throws and changes nothing. */
  submit(plan: Int32Array, words: number): void;
  /** Completes the oldest submitted step. Returns the words written to result. */
  wait(result: Int32Array): number;
  clearCache(): void;
  /** Takes prefix-cache events as words (see ls_events_drain). Returns the words written; 0 = none left. */
  drainEvents(words: Int32Array): number;
  /** Once, after createPool. modelDigest: 32 bytes that two engines must share to exchange KV. */
  startTransfer(options: TransferOptions, modelDigest: Uint8Array): NativeTransfer;
  /** Idempotent. */
  destroy(): void;
}
