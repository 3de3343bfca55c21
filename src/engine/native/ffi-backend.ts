import { dlopen, type Library, type Pointer } from "bun:ffi";
import type { KvScale, WeightDtype, WeightTensor } from "../../config/model-spec.ts";
import { int32Words, splitU64 } from "../../util/words.ts";
import { EngineError } from "../errors.ts";
import type { KvCacheDtype } from "../../config/engine-config.ts";
import type { EngineOptions, TransferOptions } from "../types.ts";
import { loadProblem } from "./library.ts";
import { LS_ABI_VERSION, ls_config, ls_dtype, ls_kv_dtype, ls_memory_t, ls_pool_stats_t, ls_rope_style, symbols } from "./abi.gen.ts";
import { NativeError, type DeviceInfo, type DeviceMemory, type NativeBackend, type PoolCounts } from "./backend.ts";
import { FfiTransfer, type NativeTransfer } from "./transfer.ts";

type Symbols = Library<typeof symbols>["symbols"];

const DTYPE: Record<WeightDtype, number> = {
  f32: ls_dtype.LS_DTYPE_F32, f16: ls_dtype.LS_DTYPE_F16, bf16: ls_dtype.LS_DTYPE_BF16,
  q8_0: ls_dtype.LS_DTYPE_Q8_0, q4_0: ls_dtype.LS_DTYPE_Q4_0, q4_1: ls_dtype.LS_DTYPE_Q4_1,
};

const KV_DTYPE: Record<KvCacheDtype, number> = { f32: ls_kv_dtype.LS_KV_F32, bf16: ls_kv_dtype.LS_KV_BF16, fp8_e4m3: ls_kv_dtype.LS_KV_E4M3, fp8_e5m2: ls_kv_dtype.LS_KV_E5M2 };

/** Loads a device library and checks its ABI version before anything else is called. */
export function openLibrary(path: string): Library<typeof symbols> {
  let library: Library<typeof symbols>;
  try {
    library = dlopen(path, symbols);
  } catch (error) {
    throw new EngineError("engine", `cannot load the native library ${path}: ${loadProblem(error)}`);
  }
  const version = library.symbols.ls_abi_version();
  if (version !== LS_ABI_VERSION) {
    library.close();
    throw new EngineError("engine", `native library ${path}: ABI version ${version}, expected ${LS_ABI_VERSION}`);
  }
  return library;
}

/** Text of the last failure on this thread. */
function lastError(native: Symbols): string {
  const text = Buffer.from(new ArrayBuffer(4096));
  const length = native.ls_last_error(text, text.length);
  return length <= 0 ? "no error text" : text.toString("utf8", 0, Math.min(length, text.length - 1));
}

function check(native: Symbols, call: string, result: number): number {
  if (result < 0) throw new NativeError(result, call, lastError(native));
  return result;
}

/** What a library can do on this machine; needs no engine. Throws NativeError on a machine below its minimum. */
export function deviceInfo(native: Symbols): DeviceInfo {
  const json = Buffer.from(new ArrayBuffer(8192));
  const length = check(native, "ls_device_info", native.ls_device_info(json, json.length));
  return JSON.parse(json.toString("utf8", 0, Math.min(length, json.length - 1))) as DeviceInfo;
}

/** An engine of a device library through bun:ffi. Every buffer that native sees is over an ArrayBuffer of its own and kept. */
export class FfiBackend implements NativeBackend {
  readonly device: DeviceInfo;
  readonly #library: Library<typeof symbols>;
  readonly #native: Symbols;
  #engine: Pointer | null;
  readonly #stats = new Uint32Array(new ArrayBuffer(ls_pool_stats_t.size));
  readonly #opened = int32Words(3);

  constructor(options: EngineOptions, batchTokens: number) {
    this.#library = openLibrary(options.libraryPath);
    this.#native = this.#library.symbols;
    this.device = deviceInfo(this.#native);
    const config = packConfig(options, batchTokens);
    const inverseFrequencies = new Float32Array(new ArrayBuffer(options.spec.rope.invFreq.length * 4));
    inverseFrequencies.set(options.spec.rope.invFreq);
    const out = new BigUint64Array(new ArrayBuffer(8));
    check(this.#native, "ls_engine_create", this.#native.ls_engine_create(config, inverseFrequencies, out));
    this.#engine = Number(out[0]) as Pointer;
    this.#stats[ls_pool_stats_t.fields.struct_size.offset / 4] = ls_pool_stats_t.size;
  }

  get handle(): number | null {
    return this.#engine;
  }

  mapWeights(path: string, bytes: number): number {
    return this.#check("ls_weights_map", this.#native.ls_weights_map(this.#engine, Buffer.from(`${path}\0`), BigInt(bytes)));
  }

  setTensor(tensor: WeightTensor, file: number): void {
    const { id, offset, bytes, dtype, rows, cols } = tensor;
    const result = this.#native.ls_weights_set(this.#engine, id, file, BigInt(offset), BigInt(bytes), DTYPE[dtype], rows, cols);
    if (result < 0) throw new NativeError(result, "ls_weights_set", `tensor ${tensor.name}: ${lastError(this.#native)}`);
  }

  setKvScales(scales: readonly KvScale[]): void {
    const values = new Float32Array(new ArrayBuffer(Math.max(8, scales.length * 8)));
    values.set(scales.flatMap(({ k, v }) => [k, v]));
    this.#check("ls_kv_scales", this.#native.ls_kv_scales(this.#engine, values, scales.length));
  }

  finishWeights(): void {
    this.#check("ls_weights_finish", this.#native.ls_weights_finish(this.#engine));
  }

  memory(): DeviceMemory | null {
    const words = new Uint32Array(new ArrayBuffer(ls_memory_t.size));
    const { fields } = ls_memory_t;
    words[fields.struct_size.offset / 4] = ls_memory_t.size;
    this.#check("ls_memory", this.#native.ls_memory(this.#engine, words));
    if (words[fields.known.offset / 4] === 0) return null;
    const bytes = (low: keyof typeof fields): number => words[fields[low].offset / 4]! + words[fields[low].offset / 4 + 1]! * 2 ** 32;
    return {
      total: bytes("total_lo"), usedBefore: bytes("used_before_lo"), weights: bytes("weights_lo"), workspace: bytes("workspace_lo"),
      graphs: bytes("graphs_lo"), free: bytes("free_lo"), pageBytes: bytes("page_bytes_lo"),
    };
  }

  createPool(pages: number): void {
    this.#check("ls_pool_create", this.#native.ls_pool_create(this.#engine, pages));
  }

  poolStats(): PoolCounts {
    this.#check("ls_pool_stats", this.#native.ls_pool_stats(this.#engine, this.#stats));
    const { fields } = ls_pool_stats_t;
    const field = (name: keyof typeof fields): number => this.#stats[fields[name].offset / 4]!;
    return {
      total: field("total"), free: field("free"), cached: field("cached"), held: field("held"), openSeqs: field("open_seqs"),
      evictions: field("evictions_hi") * 2 ** 32 + field("evictions_lo"),
    };
  }

  checkPool(): void {
    this.#check("ls_pool_check", this.#native.ls_pool_check(this.#engine));
  }

  openSequence(tokens: Int32Array, count: number, domain: bigint): { slot: number; cachedTokens: number; start: number } {
    const [low, high] = splitU64(domain);
    this.#check("ls_seq_open", this.#native.ls_seq_open(this.#engine, tokens, count, low >>> 0, high >>> 0, this.#opened));
    return { slot: this.#opened[0]!, cachedTokens: this.#opened[1]!, start: this.#opened[2]! };
  }

  closeSequence(slot: number, commit: number): void {
    this.#check("ls_seq_close", this.#native.ls_seq_close(this.#engine, slot, commit));
  }

  submit(plan: Int32Array, words: number): void {
    this.#check("ls_step_submit", this.#native.ls_step_submit(this.#engine, plan, words));
  }

  wait(result: Int32Array): number {
    return this.#check("ls_step_wait", this.#native.ls_step_wait(this.#engine, result, result.length));
  }

  clearCache(): void {
    this.#check("ls_cache_clear", this.#native.ls_cache_clear(this.#engine));
  }

  drainEvents(words: Int32Array): number {
    return this.#check("ls_events_drain", this.#native.ls_events_drain(this.#engine, words, words.length));
  }

  startTransfer(options: TransferOptions, modelDigest: Uint8Array): NativeTransfer {
    return new FfiTransfer(this.#native, this.#engine, (call, result) => this.#check(call, result), options, modelDigest);
  }

  destroy(): void {
    if (this.#engine === null) return;
    this.#native.ls_engine_destroy(this.#engine);
    this.#engine = null;
    // The library stays loaded: other threads may have it open, and unloading code is never worth the risk.
  }

  #check(call: string, result: number): number {
    return check(this.#native, call, result);
  }
}

/** ls_config as bytes. Exported for tests. */
export function packConfig(options: EngineOptions, batchTokens: number): Uint8Array {
  const { spec } = options;
  const values: Record<keyof typeof ls_config.fields, number> = {
    struct_size: ls_config.size,
    hidden: spec.hidden, layers: spec.layers, heads: spec.heads, kv_heads: spec.kvHeads, head_dim: spec.headDim,
    intermediate: spec.intermediate, vocab: spec.vocab,
    rope_style: spec.rope.style === "half" ? ls_rope_style.LS_ROPE_HALF : ls_rope_style.LS_ROPE_INTERLEAVED,
    qkv_bias: Number(spec.qkvBias), o_bias: Number(spec.oBias), qk_norm: Number(spec.qkNorm), tied_embeddings: Number(spec.tiedEmbeddings),
    max_context: options.contextLength, max_seqs: options.maxNumSeqs, max_batch_tokens: batchTokens,
    kv_dtype: KV_DTYPE[options.kvCacheDtype], prefix_cache: Number(options.prefixCache), threads: options.threads,
    device_index: options.gpu?.index ?? 0, ranks: options.gpu?.ranks ?? 1,
    rms_eps: spec.rmsEps, attn_scale: spec.headDim ** -0.5, rope_scale: spec.rope.scale,
  };
  const view = new DataView(new ArrayBuffer(ls_config.size));
  for (const [name, { offset, type }] of Object.entries(ls_config.fields)) {
    const value = values[name as keyof typeof values];
    if (type === "f32") view.setFloat32(offset, value, true);
    else view.setUint32(offset, value, true);
  }
  return new Uint8Array(view.buffer);
}
