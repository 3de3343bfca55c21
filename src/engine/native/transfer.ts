import type { Library, Pointer } from "bun:ffi";
import { descriptorLimit } from "../../util/descriptors.ts";
import { int32Words, joinU64, splitU64 } from "../../util/words.ts";
import type { KvSource, TransferCounts, TransferOptions } from "../types.ts";
import { LS_KV_DIGEST_BYTES, LS_KV_EVENT_WORDS, LS_KV_LAYOUT_BYTES, ls_kv_config, ls_kv_source, ls_kv_stats_t, type symbols } from "./abi.gen.ts";

/** Of the transfer listener: an eighth of the descriptors, which requests, discovery and these share; at most what the library takes by itself. */
const MAX_CONNECTIONS = Math.max(8, Math.min(256, descriptorLimit() >> 3));

type Symbols = Library<typeof symbols>["symbols"];

/** How a transfer ended, as ls_kv_events tells it. */
export interface NativeTransferEvent {
  /** Of the sequence that pulled; -1 = a staged copy. */
  slot: number;
  /** ls_kv_end. */
  end: number;
  id: bigint;
  bytes: number;
  micros: number;
  /** Words for people; may name a field and both values. */
  text: string;
}

export interface OpenedPull {
  slot: number;
  /** Tokens whose pages came from the prefix cache. */
  cachedTokens: number;
  /** count - 1. */
  start: number;
  /** Pages on their way; 0 = everything was here. */
  pages: number;
}

/** The KV transfer of one engine (see native/layerscale.h), without pointers. Methods throw NativeError; none waits for the network. */
export interface NativeTransfer {
  /** Of the listener; 0 = none. */
  readonly port: number;
  layout(): Uint8Array;
  stats(): TransferCounts;
  /** Reserves host memory for positions [0, tokens) of an open sequence, which its coming steps fill. */
  stage(slot: number, tokens: number): void;
  /** Offers the copy, once all is computed. Returns its id. */
  publish(slot: number): bigint;
  /** Frees a published copy. */
  release(id: bigint): void;
  /** Opens a sequence whose missing pages are pulled in the background; its rows are refused until events() tells that all came. */
  openPull(tokens: Int32Array, count: number, domain: bigint, source: KvSource): OpenedPull;
  /** Tells a sender, in the background, that its copy will not be fetched. */
  drop(source: KvSource): void;
  /** Takes the ends of transfers, oldest first. */
  events(): NativeTransferEvent[];
}

type Fields = Record<string, { offset: number }>;
type Check = (call: string, result: number) => number;

/** A struct of uint32 fields; the first is its size. */
function struct<F extends Fields>({ size, fields }: { size: number; fields: F }, values: Partial<Record<keyof F, number>> = {}): Uint32Array<ArrayBuffer> {
  const words = new Uint32Array(new ArrayBuffer(size));
  words[0] = size;
  for (const [name, value] of Object.entries(values) as [keyof F, number][]) words[fields[name]!.offset / 4] = value;
  return words;
}

/** Bytes that native may read: over an ArrayBuffer of their own. */
function owned(bytes: Uint8Array): Uint8Array {
  const copy = new Uint8Array(new ArrayBuffer(Math.max(1, bytes.length)));
  copy.set(bytes);
  return copy;
}

const cString = (text: string): Uint8Array => owned(Buffer.from(`${text}\0`));

export class FfiTransfer implements NativeTransfer {
  readonly port: number;
  readonly #native: Symbols;
  readonly #engine: Pointer | null;
  readonly #check: Check;
  readonly #stats = struct(ls_kv_stats_t);
  readonly #id = new Uint32Array(new ArrayBuffer(8));
  readonly #opened = int32Words(4);
  readonly #events = int32Words(4096);

  /** @param modelDigest LS_KV_DIGEST_BYTES */
  constructor(native: Symbols, engine: Pointer | null, check: Check, { host, holdMs, key }: TransferOptions, modelDigest: Uint8Array) {
    this.#native = native;
    this.#engine = engine;
    this.#check = check;
    if (modelDigest.length !== LS_KV_DIGEST_BYTES) throw new RangeError(`model digest of ${modelDigest.length} bytes, expected ${LS_KV_DIGEST_BYTES}`);
    const config = struct(ls_kv_config, { hold_ms: holdMs, key_bytes: key?.length ?? 0, max_connections: MAX_CONNECTIONS });
    this.port = check("ls_kv_start", native.ls_kv_start(engine, config, owned(modelDigest), key === null ? null : owned(key), host === null ? null : cString(host)));
  }

  layout(): Uint8Array {
    const out = new Uint8Array(new ArrayBuffer(LS_KV_LAYOUT_BYTES));
    this.#check("ls_kv_layout", this.#native.ls_kv_layout(this.#engine, out));
    return out;
  }

  stats(): TransferCounts {
    this.#check("ls_kv_stats", this.#native.ls_kv_stats(this.#engine, this.#stats));
    const { fields } = ls_kv_stats_t;
    const field = (name: keyof typeof fields): number => this.#stats[fields[name].offset / 4]!;
    return {
      staged: field("staged"), stagedBytes: field("staged_bytes_hi") * 2 ** 32 + field("staged_bytes_lo"),
      filling: field("filling"), fillingBytes: field("filling_bytes_hi") * 2 ** 32 + field("filling_bytes_lo"),
      pulls: field("pulls"),
    };
  }

  stage(slot: number, tokens: number): void {
    this.#check("ls_kv_stage", this.#native.ls_kv_stage(this.#engine, slot, tokens));
  }

  publish(slot: number): bigint {
    this.#check("ls_kv_publish", this.#native.ls_kv_publish(this.#engine, slot, this.#id));
    return joinU64(this.#id[0]!, this.#id[1]!);
  }

  release(id: bigint): void {
    const [low, high] = splitU64(id);
    this.#check("ls_kv_release", this.#native.ls_kv_release(this.#engine, low >>> 0, high >>> 0));
  }

  openPull(tokens: Int32Array, count: number, domain: bigint, { host, port, id, layout }: KvSource): OpenedPull {
    const [low, high] = splitU64(domain);
    const [idLow, idHigh] = splitU64(id);
    const source = struct(ls_kv_source, { port, id_lo: idLow, id_hi: idHigh, layout_bytes: layout.length });
    this.#check(
      "ls_seq_open_pull",
      this.#native.ls_seq_open_pull(this.#engine, tokens, count, low >>> 0, high >>> 0, source, cString(host), owned(layout), this.#opened),
    );
    const [slot, cachedTokens, start, pages] = this.#opened as unknown as [number, number, number, number];
    return { slot, cachedTokens, start, pages };
  }

  drop({ host, port, id }: KvSource): void {
    const [low, high] = splitU64(id);
    this.#check("ls_kv_drop", this.#native.ls_kv_drop(this.#engine, cString(host), port, low >>> 0, high >>> 0));
  }

  events(): NativeTransferEvent[] {
    const events: NativeTransferEvent[] = [];
    const words = this.#events;
    for (;;) {
      const written = this.#check("ls_kv_events", this.#native.ls_kv_events(this.#engine, words, words.length));
      if (written === 0) return events;
      for (let at = 0; at < written; at += words[at]!) events.push(unpackTransferEvent(words, at));
    }
  }
}

/** One event of ls_kv_events at `at`. Exported for tests. */
export function unpackTransferEvent(words: Int32Array, at: number): NativeTransferEvent {
  const length = words[at]!;
  const textBytes = words[at + 8]!;
  if (length < LS_KV_EVENT_WORDS || at + length > words.length || textBytes < 0 || textBytes > (length - LS_KV_EVENT_WORDS) * 4)
    throw new RangeError(`transfer event of ${length} words with ${textBytes} bytes of text at word ${at} of ${words.length}`);
  return {
    slot: words[at + 1]!,
    end: words[at + 2]!,
    id: joinU64(words[at + 3]!, words[at + 4]!),
    bytes: Number(joinU64(words[at + 5]!, words[at + 6]!)),
    micros: words[at + 7]! >>> 0,
    text: Buffer.from(words.buffer, words.byteOffset + (at + LS_KV_EVENT_WORDS) * 4, textBytes).toString("utf8"),
  };
}
