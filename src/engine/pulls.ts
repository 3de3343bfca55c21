import { EngineError } from "./errors.ts";
import type { KvManager } from "./kv-manager.ts";
import { ls_kv_end } from "./native/abi.gen.ts";
import type { NativeTransferEvent } from "./native/transfer.ts";
import type { Sequence } from "./sequence.ts";
import type { Refusal, TransferOutcome } from "./types.ts";

/** The end of a transfer, or a pull that did not begin. */
export interface TransferNote {
  /** Of the request that pulled; null = a staged copy. */
  key: number | null;
  id: bigint | null;
  outcome: TransferOutcome;
  bytes: number;
  micros: number;
  detail: string;
  /** The prompt is computed here. */
  fallback: boolean;
}

/** A sequence that ends without having run. */
export interface Refused {
  sequence: Sequence;
  refusal: Refusal;
  message: string;
}

/** The latest ids that this engine has used up: a hand-off that comes again is known without asking its sender. */
class RecentIds {
  readonly #ids = new Set<bigint>();
  constructor(private readonly limit = 10_000) {}

  has(id: bigint): boolean {
    return this.#ids.has(id);
  }
  add(id: bigint): void {
    this.#ids.add(id);
    if (this.#ids.size > this.limit) this.#ids.delete(this.#ids.values().next().value!);
  }
}

const OUTCOMES: Record<number, TransferOutcome> = {
  [ls_kv_end.LS_KV_DONE]: "done", [ls_kv_end.LS_KV_REFUSED]: "refused", [ls_kv_end.LS_KV_UNKNOWN]: "unknown", [ls_kv_end.LS_KV_USED]: "used",
  [ls_kv_end.LS_KV_EXPIRED]: "expired", [ls_kv_end.LS_KV_DROPPED]: "dropped", [ls_kv_end.LS_KV_RESET]: "reset", [ls_kv_end.LS_KV_TIMEOUT]: "timeout",
  [ls_kv_end.LS_KV_CORRUPT]: "corrupt", [ls_kv_end.LS_KV_NO_ROUTE]: "no_route", [ls_kv_end.LS_KV_AUTH]: "auth",
};

function outcomeOf(end: number): TransferOutcome {
  const outcome = OUTCOMES[end];
  if (outcome === undefined) throw new EngineError("engine", `ls_kv_events: end ${end} is not known`);
  return outcome;
}

export function noteOf(event: NativeTransferEvent, key: number | null, fallback: boolean): TransferNote {
  const { id, bytes, micros, text } = event;
  return { key, id, outcome: outcomeOf(event.end), bytes, micros, detail: text, fallback };
}

/** Sequences that come with a source: what becomes of it, and the notes that tell. */
export class Pulls {
  /** Since they were taken last. */
  readonly notes: TransferNote[] = [];
  readonly #used = new RecentIds();

  constructor(private readonly kv: Pick<KvManager, "openPull" | "drop" | "available" | "total">) {}

  /**
   * Opens a sequence, with pages on their way or all of them here already (true). false: it is an ordinary prompt now, and not open.
   * An object: it must be refused, since the KV differs.
   */
  open(sequence: Sequence, fits: () => boolean): boolean | { differs: string } {
    const { source } = sequence;
    if (source === null) return false;
    if (this.#used.has(source.id)) {
      sequence.isolated = true;
      return this.#giveUp(sequence, "used", "this worker has had the copy");
    }
    const attempt = fits() ? this.kv.openPull(sequence) : { kind: "pages" as const, text: `${this.kv.available} of ${this.kv.total} pages are free or evictable` };
    if (attempt.kind === "pulling") return true;
    this.kv.drop(source);
    switch (attempt.kind) {
      case "ready":
        this.#used.add(source.id);
        this.#note(sequence, "done", "", false);
        return true;
      case "layout":
        this.#note(sequence, "refused", attempt.text, false);
        return { differs: attempt.text };
      case "pages":
        return this.#giveUp(sequence, "no_pages", attempt.text);
      case "source":
        return this.#giveUp(sequence, "handoff", attempt.text);
    }
  }

  /** @returns whether the pages have come */
  ended(sequence: Sequence, event: NativeTransferEvent): boolean {
    const outcome = outcomeOf(event.end);
    const done = outcome === "done";
    this.notes.push(noteOf(event, sequence.key, !done));
    sequence.source = null;
    if (done) {
      this.#used.add(event.id);
      sequence.pulling = false;
      sequence.numCached = sequence.promptLength - 1;
    } else sequence.isolated = outcome === "used";
    return done;
  }

  preempted(sequence: Sequence): void {
    this.#giveUp(sequence, "preempted", "its pages were needed");
  }

  #giveUp(sequence: Sequence, outcome: TransferOutcome, detail: string): false {
    this.#note(sequence, outcome, detail, true);
    return false;
  }

  /** Of a source that no bytes came from; it is not asked again. */
  #note(sequence: Sequence, outcome: TransferOutcome, detail: string, fallback: boolean): void {
    this.notes.push({ key: sequence.key, id: sequence.source?.id ?? null, outcome, bytes: 0, micros: 0, detail, fallback });
    sequence.source = null;
  }
}
