import type { KvEvent } from "../../engine/types.ts";
import { type EventData, KvState } from "./kv-state.ts";

export interface RouterEvent {
  worker_id: bigint;
  storage_tier: "device";
  residency_domain: "worker";
  event: { event_id: number; data: EventData; dp_rank: 0 };
}

export type RecoveryAnswer =
  | { TreeDump: { events: RouterEvent[]; last_event_id: number; reset_scope: "all" } }
  | { Events: { events: RouterEvent[]; last_event_id: number } }
  | { TooNew: { requested_start: number; requested_end: number | null; newest_available: number } }
  | { InvalidRange: { start_id: number; end_id: number } }
  | { Error: string };

/** Events that a router may ask for again one by one. */
const RING = 1024;

/** Numbers the events of one worker, remembers the latest, and answers routers that missed some. */
export class KvEventLog {
  readonly #state = new KvState();
  readonly #ring: RouterEvent[] = [];
  #last = 0;
  #workerId: bigint;

  constructor(workerId: bigint) {
    this.#workerId = workerId;
  }

  get workerId(): bigint {
    return this.#workerId;
  }

  /** The worker goes by another id from now on. What is held stays; earlier events, which bear the old id, are answered with all that is held. */
  rename(workerId: bigint): void {
    this.#workerId = workerId;
    this.#ring.length = 0;
  }

  /** Ids start at 1 and have no gaps. */
  append(events: readonly KvEvent[], unknownParent?: (event: KvEvent) => void): RouterEvent[] {
    const out = this.#state.apply(events, unknownParent).map((data) => this.#event(++this.#last, data));
    this.#ring.push(...out);
    if (this.#ring.length > RING) this.#ring.splice(0, this.#ring.length - RING);
    return out;
  }

  /** The latest events, oldest first, without a gap. */
  recent(): readonly RouterEvent[] {
    return this.#ring;
  }

  /** @param body a decoded recovery query */
  answer(body: unknown): RecoveryAnswer {
    if (typeof body !== "object" || body === null) return { Error: "recovery query: expected an object" };
    const query = body as Record<string, unknown>;
    if (query.worker_id !== undefined && query.worker_id !== null && BigInt(asInteger(query.worker_id) ?? -1) !== this.workerId)
      return { Error: `recovery query: worker_id ${String(query.worker_id)} is not this worker, ${this.workerId}` };
    if (query.dp_rank !== undefined && query.dp_rank !== null && query.dp_rank !== 0) return { Error: `recovery query: dp_rank ${String(query.dp_rank)}, expected 0` };
    const start = query.start_event_id ?? null;
    const end = query.end_event_id ?? null;
    if (start === null) return this.#dump();
    if (typeof start !== "number" || !(end === null || typeof end === "number")) return { Error: "recovery query: start_event_id and end_event_id must be integers" };
    if (end !== null && end < start) return { InvalidRange: { start_id: start, end_id: end } };
    if (start > this.#last) return { TooNew: { requested_start: start, requested_end: end, newest_available: this.#last } };
    const oldest = this.#ring[0]?.event.event_id;
    if (oldest === undefined || start < oldest) return this.#dump();
    return { Events: { events: this.#ring.filter(({ event }) => event.event_id >= start && (end === null || event.event_id <= end)), last_event_id: this.#last } };
  }

  #event(id: number, data: EventData): RouterEvent {
    return { worker_id: this.workerId, storage_tier: "device", residency_domain: "worker", event: { event_id: id, data, dp_rank: 0 } };
  }
  /** Taken in one go with the last id, so nothing falls between. */
  #dump(): RecoveryAnswer {
    return { TreeDump: { events: this.#state.dump().map((data, i) => this.#event(i, data)), last_event_id: this.#last, reset_scope: "all" } };
  }
}

const asInteger = (value: unknown): bigint | number | null => (typeof value === "bigint" || Number.isSafeInteger(value) ? (value as bigint | number) : null);
