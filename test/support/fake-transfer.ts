import { ls_kv_end, ls_status } from "../../src/engine/native/abi.gen.ts";
import { NativeError } from "../../src/engine/native/backend.ts";
import type { NativeTransfer, NativeTransferEvent, OpenedPull } from "../../src/engine/native/transfer.ts";
import type { KvSource, TransferCounts, TransferOptions } from "../../src/engine/types.ts";
import type { FakeBackend } from "./fake-backend.ts";

/** Bytes of KV per token in this model of a transfer. */
const TOKEN_BYTES = 8;
let ports = 40_000;
let ids = 1n;

/** Engines that can reach each other: all of this process, by port. */
const listeners = new Map<number, FakeTransfer>();

interface Pull {
  slot: number;
  tokens: number[];
  source: KvSource;
}

/**
 * The transfer semantics of native/layerscale.h between model backends of one process. The network stands still until deliver(), which is
 * when pulls end and drops arrive.
 */
export class FakeTransfer implements NativeTransfer {
  readonly port: number;
  /** Copies by id: the tokens of their positions. */
  readonly copies = new Map<bigint, number[]>();
  readonly ended = new Map<bigint, number>();
  readonly dropped: bigint[] = [];
  /** Set: the next stage() finds no host memory. */
  noMemory = false;
  /** Set: pulls end like this. */
  fault: keyof typeof ls_kv_end | null = null;
  readonly #staging = new Map<number, number>();
  readonly #pulls: Pull[] = [];
  readonly #drops: KvSource[] = [];
  #events: NativeTransferEvent[] = [];

  constructor(
    private readonly backend: FakeBackend,
    options: TransferOptions,
    private readonly digest: Uint8Array,
  ) {
    this.port = options.host === null ? 0 : ports++;
    if (this.port > 0) listeners.set(this.port, this);
  }

  layout(): Uint8Array {
    return this.digest;
  }

  stats(): TransferCounts {
    const bytes = (lengths: Iterable<number>) => [...lengths].reduce((sum, length) => sum + length * TOKEN_BYTES, 0);
    return {
      staged: this.copies.size, stagedBytes: bytes([...this.copies.values()].map((tokens) => tokens.length)),
      filling: this.#staging.size, fillingBytes: bytes(this.#staging.values()), pulls: this.#pulls.length,
    };
  }

  stage(slot: number, tokens: number): void {
    if (this.noMemory) throw new NativeError(ls_status.LS_NO_MEMORY, "ls_kv_stage", "no memory");
    this.#staging.set(slot, tokens);
  }

  publish(slot: number): bigint {
    const tokens = this.#staging.get(slot);
    const content = this.backend.contentOf(slot);
    if (tokens === undefined || content.length < tokens) throw new NativeError(ls_status.LS_STATE, "ls_kv_publish", `${content.length} of ${tokens} tokens computed`);
    this.#staging.delete(slot);
    const id = ids++;
    this.copies.set(id, content.slice(0, tokens));
    return id;
  }

  release(id: bigint): void {
    if (!this.end(id, "LS_KV_DROPPED")) throw new NativeError(ls_status.LS_INVALID, "ls_kv_release", "no copy");
  }

  openPull(tokens: Int32Array, count: number, domain: bigint, source: KvSource): OpenedPull {
    if (source.layout.join() !== this.digest.join()) throw new NativeError(ls_status.LS_LAYOUT, "ls_seq_open_pull", `model digest is ${source.layout.join()} on the prefill worker and ${this.digest.join()} on the decode worker`);
    const { slot, cachedTokens, start } = this.backend.openSequence(tokens, count, domain);
    const known = count - 1;
    const held = Math.ceil(start / 16);
    try {
      this.backend.reserve(slot, known);
    } catch (error) {
      this.backend.closeSequence(slot, 0);
      throw error;
    }
    const pages = start === known ? 0 : Math.max(1, Math.ceil(known / 16) - held);
    if (pages > 0) this.#pulls.push({ slot, tokens: Array.from(tokens.subarray(0, known)), source });
    return { slot, cachedTokens, start: known, pages };
  }

  drop(source: KvSource): void {
    this.#drops.push(source);
  }

  events(): NativeTransferEvent[] {
    return this.#events.splice(0);
  }

  /** Part of closing a slot: its copy is abandoned, its pull is called off. */
  closed(slot: number): void {
    this.#staging.delete(slot);
    const at = this.#pulls.findIndex((pull) => pull.slot === slot);
    if (at >= 0) this.#drops.push(this.#pulls.splice(at, 1)[0]!.source);
  }

  /** A copy ends. @returns false when there is none */
  end(id: bigint, end: keyof typeof ls_kv_end): boolean {
    const content = this.copies.get(id);
    if (content === undefined) return false;
    this.copies.delete(id);
    this.ended.set(id, ls_kv_end[end]);
    this.#event(-1, end, id, end === "LS_KV_DONE" ? content.length * TOKEN_BYTES : 0);
    return true;
  }

  /** The network moves: every pull ends, every drop arrives. */
  deliver(): void {
    for (const { slot, tokens, source } of this.#pulls.splice(0)) {
      const sender = listeners.get(source.port);
      const content = sender?.copies.get(source.id);
      const fault = this.fault ?? (sender === undefined ? "LS_KV_NO_ROUTE" : content === undefined ? "LS_KV_UNKNOWN" : content.join() !== tokens.join() ? "LS_KV_REFUSED" : null);
      if (fault === null) {
        this.backend.fill(slot, content!);
        sender!.end(source.id, "LS_KV_DONE");
      } else sender?.end(source.id, "LS_KV_DROPPED");
      this.#event(slot, fault ?? "LS_KV_DONE", source.id, fault === null ? tokens.length * TOKEN_BYTES : 0);
    }
    for (const { port, id } of this.#drops.splice(0)) {
      this.dropped.push(id);
      listeners.get(port)?.end(id, "LS_KV_DROPPED");
    }
  }

  #event(slot: number, end: keyof typeof ls_kv_end, id: bigint, bytes: number): void {
    this.#events.push({ slot, end: ls_kv_end[end], id, bytes, micros: 1000, text: end === "LS_KV_DONE" ? "" : end });
  }
}
