/** One engine of the CPU library below the scheduler, with the ls_kv_* calls as native/layerscale.h has them: what transfer tests drive. */
import { expect } from "bun:test";
import type { Pointer } from "bun:ffi";
import { loadEngine, planPool } from "../../src/engine/loader.ts";
import {
  LS_KV_EVENT_WORDS, LS_KV_LAYOUT_BYTES, ls_kv_config, ls_kv_end, ls_kv_source, ls_kv_stats_t,
} from "../../src/engine/native/abi.gen.ts";
import { NativeError } from "../../src/engine/native/backend.ts";
import { FfiBackend, openLibrary } from "../../src/engine/native/ffi-backend.ts";
import { maxBatchTokens } from "../../src/engine/step-budget.ts";
import { Sequence } from "../../src/engine/sequence.ts";
import { StepPlan, type RowResult } from "../../src/engine/step-plan.ts";
import type { EngineOptions } from "../../src/engine/types.ts";
import { int32Words, joinU64, splitU64 } from "../../src/util/words.ts";

export interface KvOptions {
  /** null: this engine only pulls. */
  host: string | null;
  digest?: number;
  key?: Uint8Array;
  holdMs?: number;
  ranks?: number;
}

export interface Source {
  port: number;
  id: bigint;
  layout: Uint8Array;
}

export interface KvEvent {
  slot: number;
  end: keyof typeof ls_kv_end;
  id: bigint;
  bytes: number;
  text: string;
}

const endName = (value: number): keyof typeof ls_kv_end => Object.entries(ls_kv_end).find(([, end]) => end === value)![0] as keyof typeof ls_kv_end;

function owned(bytes: Uint8Array | string): Uint8Array {
  const from = typeof bytes === "string" ? Buffer.from(`${bytes}\0`) : bytes;
  const copy = new Uint8Array(new ArrayBuffer(Math.max(1, from.length)));
  copy.set(from);
  return copy;
}

export async function until(what: string, done: () => boolean): Promise<void> {
  const deadline = performance.now() + 30_000;
  while (!done()) {
    if (performance.now() > deadline) throw new Error(`30 s are over: ${what}`);
    await Bun.sleep(1);
  }
}

export class KvNode implements Disposable {
  readonly backend: FfiBackend;
  readonly port: number = 0;
  readonly #symbols: ReturnType<typeof openLibrary>["symbols"];
  readonly #engine: Pointer;
  readonly #plans: StepPlan;
  readonly #words = int32Words(4096);
  #step = 0;
  #keys = 0;

  constructor(options: EngineOptions, kv?: KvOptions) {
    const tokens = maxBatchTokens(options);
    this.backend = new FfiBackend(options, tokens);
    this.#symbols = openLibrary(options.libraryPath).symbols;
    this.#engine = this.backend.handle as Pointer;
    this.#plans = new StepPlan(options.maxNumSeqs, tokens);
    loadEngine(this.backend, options, planPool(options), this.#plans, () => {});
    if (kv === undefined) return;
    const config = new Uint32Array(new ArrayBuffer(ls_kv_config.size));
    const set = (name: keyof typeof ls_kv_config.fields, value: number): void => void (config[ls_kv_config.fields[name].offset / 4] = value);
    set("struct_size", ls_kv_config.size);
    set("hold_ms", kv.holdMs ?? 0);
    set("ranks", kv.ranks ?? 0);
    set("key_bytes", kv.key?.length ?? 0);
    const digest = owned(new Uint8Array(32).fill(kv.digest ?? 7));
    this.port = this.#check("ls_kv_start", this.#symbols.ls_kv_start(this.#engine, config, digest, null, kv.key ? owned(kv.key) : null, kv.host === null ? null : owned(kv.host)));
  }

  get layout(): Uint8Array {
    const layout = owned(new Uint8Array(LS_KV_LAYOUT_BYTES));
    this.#check("ls_kv_layout", this.#symbols.ls_kv_layout(this.#engine, layout));
    return layout;
  }

  stats(): Record<keyof typeof ls_kv_stats_t.fields, number> {
    const words = new Uint32Array(new ArrayBuffer(ls_kv_stats_t.size));
    words[0] = ls_kv_stats_t.size;
    this.#check("ls_kv_stats", this.#symbols.ls_kv_stats(this.#engine, words));
    return Object.fromEntries(Object.entries(ls_kv_stats_t.fields).map(([name, { offset }]) => [name, words[offset / 4]!])) as Record<keyof typeof ls_kv_stats_t.fields, number>;
  }

  sequence(prompt: readonly number[], sampling: Partial<Sequence["sampling"]> = {}): Sequence {
    return new Sequence({
      key: ++this.#keys, prompt: [...prompt], sampling: { temperature: 0, topP: 1, seed: 5n, maxTokens: 100, ignoreEos: true, logprobs: 20, ...sampling },
      eosTokenIds: [], stopTokenIds: [], priority: 0, cacheDomain: 0n, internal: false, submittedAt: 0,
    });
  }

  open(sequence: Sequence): void {
    const { slot, start } = this.backend.openSequence(sequence.tokens, sequence.numTokens, 0n);
    sequence.slot = slot;
    sequence.numComputed = start;
  }

  /** Computes up to `end` in chunks; the last row's result. */
  compute(sequence: Sequence, end: number, sample: boolean, chunk = 64): RowResult | undefined {
    let result: RowResult | undefined;
    while (sequence.numComputed < end) {
      const length = Math.min(chunk, end - sequence.numComputed);
      const rows = [{ sequence, start: sequence.numComputed, length, sample: sample && sequence.numComputed + length === end }];
      this.backend.submit(this.#plans.pack(rows, ++this.#step).words, this.#plans.length);
      result = this.#plans.unpack(this.backend.wait(this.#plans.result)).rows[0];
      sequence.numComputed += length;
    }
    return result;
  }

  /** Token, logprob and alternatives of the next `count` tokens, from wherever the sequence stands. */
  decode(sequence: Sequence, count: number): Omit<RowResult, "slot">[] {
    return Array.from({ length: count }, () => {
      const { token, logprob, top } = this.compute(sequence, sequence.numTokens, true)!;
      sequence.append(token!);
      return { token, logprob, top };
    });
  }

  alone(prompt: readonly number[], count: number, sampling?: Partial<Sequence["sampling"]>): Omit<RowResult, "slot">[] {
    const sequence = this.sequence(prompt, sampling);
    this.open(sequence);
    const rows = this.decode(sequence, count);
    this.backend.closeSequence(sequence.slot, 0);
    return rows;
  }

  /** Computes all but the last token and offers it; the first `commit` tokens stay in the prefix cache. */
  prefill(prompt: readonly number[], chunk?: number, commit = 0): Source {
    const sequence = this.sequence(prompt);
    this.open(sequence);
    this.#check("ls_kv_stage", this.#symbols.ls_kv_stage(this.#engine, sequence.slot, prompt.length - 1));
    this.compute(sequence, prompt.length - 1, false, chunk);
    const id = new Uint32Array(new ArrayBuffer(8));
    this.#check("ls_kv_publish", this.#symbols.ls_kv_publish(this.#engine, sequence.slot, id));
    this.backend.closeSequence(sequence.slot, commit);
    return { port: this.port, id: joinU64(id[0]!, id[1]!), layout: this.layout };
  }

  release(id: bigint): void {
    const [low, high] = splitU64(id);
    this.#check("ls_kv_release", this.#symbols.ls_kv_release(this.#engine, low >>> 0, high >>> 0));
  }

  openPull(sequence: Sequence, source: Source): { cached: number; pages: number } {
    const [low, high] = splitU64(source.id);
    const words = new Uint32Array(new ArrayBuffer(ls_kv_source.size));
    words.set([ls_kv_source.size, source.port, low, high, source.layout.length]);
    const out = int32Words(4);
    this.#check("ls_seq_open_pull", this.#symbols.ls_seq_open_pull(this.#engine, sequence.tokens, sequence.numTokens, 0, 0, words, owned("127.0.0.1"), owned(source.layout), out));
    expect(out[2]!).toBe(sequence.numTokens - 1);
    sequence.slot = out[0]!;
    sequence.numComputed = out[2]!;
    return { cached: out[1]!, pages: out[3]! };
  }

  /** Pulls a prompt and waits for its end. */
  async pull(source: Source, prompt: readonly number[], end: KvEvent["end"] = "LS_KV_DONE", sampling?: Partial<Sequence["sampling"]>): Promise<Sequence> {
    const sequence = this.sequence(prompt, sampling);
    if (this.openPull(sequence, source).pages > 0) {
      const event = await this.event();
      expect([event.end, event.slot, event.id]).toEqual([end, sequence.slot, source.id]);
    }
    return sequence;
  }

  /** The one event that comes next. */
  async event(): Promise<KvEvent> {
    let events: KvEvent[] = [];
    await until("a transfer event", () => (events = this.events()).length > 0);
    expect(events.length).toBe(1);
    return events[0]!;
  }

  events(): KvEvent[] {
    const events: KvEvent[] = [];
    const count = this.#check("ls_kv_events", this.#symbols.ls_kv_events(this.#engine, this.#words, this.#words.length));
    for (let at = 0; at < count; at += this.#words[at]!) {
      const [, slot, end, idLow, idHigh, bytesLow, bytesHigh, , textBytes] = this.#words.subarray(at) as unknown as number[];
      const text = Buffer.from(this.#words.buffer, 4 * (at + LS_KV_EVENT_WORDS), textBytes!).toString("utf8");
      events.push({ slot: slot!, end: endName(end!), id: joinU64(idLow!, idHigh!), bytes: Number(joinU64(bytesLow!, bytesHigh!)), text });
    }
    return events;
  }

  [Symbol.dispose](): void {
    this.backend.checkPool();
    expect(this.backend.poolStats().held).toBe(0);
    this.backend.destroy();
  }

  #check(call: string, result: number): number {
    if (result >= 0) return result;
    const text = Buffer.from(new ArrayBuffer(4096));
    const length = this.#symbols.ls_last_error(text, text.length);
    throw new NativeError(result, call, text.toString("utf8", 0, length));
  }
}
