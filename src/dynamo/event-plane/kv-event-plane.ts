import type { EngineInfo, EngineStats, KvEvent } from "../../engine/types.ts";
import type { MetricsSource } from "../../telemetry/metrics.ts";
import type { DiscoveryRecord } from "../discovery/discovery.ts";
import { type EndpointName, eventChannelRecord, eventSourceRecord, hexId, type Instance, instanceRecord } from "../discovery/records.ts";
import type { RequestPlane } from "../request-plane/request-plane.ts";
import { WorkHandler } from "../request-plane/work-handler.ts";
import type { DynamoMetrics } from "../system-server/metrics.ts";
import type { KvEventLog, RouterEvent } from "./kv-event-log.ts";
import type { EventPlane, TopicPublisher } from "./topic-publisher.ts";

/** Changes of the load within this time are one message. */
const LOAD_COALESCE_MS = 5;
/** What one message carries at most; far less than a message broker takes. */
const MAX_EVENTS = 128;
const MAX_BLOCKS = 8192;

export interface EventEngine extends MetricsSource {
  readonly info: EngineInfo;
  onKvEvents(listener: (events: KvEvent[]) => void): () => void;
}

export interface KvEventPlaneOptions {
  engine: EventEngine;
  plane: RequestPlane;
  events: EventPlane;
  endpoint: EndpointName;
  workerId: bigint;
  metrics: DynamoMetrics;
  /** What the prefix cache holds, numbered; it outlives this plane. null = no prefix cache, no events. */
  eventLog: KvEventLog | null;
  instance: (name: EndpointName) => Instance;
}

/** Tells routers what the prefix cache holds and how full the pool is. Without a prefix cache only the load is told. */
export class KvEventPlane {
  /** To be registered in this order, before the model. */
  readonly records: DiscoveryRecord[] = [];
  readonly #undo: (() => void)[] = [];
  #publisher: TopicPublisher | null = null;

  private constructor() {}

  /** @throws Error when no port can be bound */
  static async start(options: KvEventPlaneOptions): Promise<KvEventPlane> {
    const self = new KvEventPlane();
    try {
      if (options.eventLog !== null) await self.#startEvents(options, options.eventLog);
      await self.#startLoad(options);
    } catch (error) {
      self.close();
      throw error;
    }
    return self;
  }

  /** @param events of the log this plane was started with, without a gap */
  publish(events: readonly RouterEvent[]): void {
    for (const message of messages(events)) this.#publisher?.publish(message);
  }

  close(): void {
    for (const undo of this.#undo.splice(0)) undo();
  }

  async #startEvents({ plane, events, endpoint, workerId, metrics, instance }: KvEventPlaneOptions, eventLog: KvEventLog): Promise<void> {
    const publisher = (this.#publisher = await events.publisher("kv-events", endpoint));
    this.#undo.push(() => publisher.close());
    // What a router has already is ignored by its id; what it missed follows on. Under a later identity the log is another publisher's.
    publisher.onInterruption = () => {
      if (eventLog.workerId === workerId) this.publish(eventLog.recent());
    };
    const query: EndpointName = { ...endpoint, endpoint: `worker_kv_query_source_${hexId(publisher.id)}` };
    const handler = new WorkHandler(
      async function* (body) {
        yield eventLog.answer(body);
      },
      metrics.endpoint(query.endpoint),
      (why) => metrics.rejected(why),
    );
    this.#undo.push(() => metrics.forget(query.endpoint));
    await plane.register(query, workerId, handler.accept);
    this.#undo.push(() => void plane.unregister(query, workerId));
    const target = instance(query);
    this.records.push(
      eventChannelRecord(endpoint, publisher.topic, publisher.id, publisher.transport),
      instanceRecord(query, target),
      eventSourceRecord(endpoint, publisher.topic, publisher.id, workerId, target),
    );
  }

  async #startLoad({ engine, events, endpoint, workerId }: KvEventPlaneOptions): Promise<void> {
    const publisher = await events.publisher("kv_metrics", endpoint);
    let told: number | null = null;
    let timer: ReturnType<typeof setTimeout> | null = null;
    // Cached pages can be taken at any time, so only held ones are load.
    const used = (stats: EngineStats) => stats.pagesHeld;
    const tell = () => {
      timer = null;
      const now = used(engine.stats());
      if (now === told) return;
      told = now;
      publisher.publish({ worker_id: workerId, dp_rank: 0, active_decode_blocks: null, active_prefill_tokens: null, kv_used_blocks: now });
    };
    const soon = () => {
      timer ??= setTimeout(tell, LOAD_COALESCE_MS);
    };
    publisher.onListener = publisher.onInterruption = () => {
      told = null;
      soon();
    };
    const offStep = engine.onStep(soon);
    const offFinish = engine.onFinish(soon);
    this.#undo.push(() => {
      offStep();
      offFinish();
      if (timer) clearTimeout(timer);
      publisher.close();
    });
    this.records.push(eventChannelRecord(endpoint, publisher.topic, publisher.id, publisher.transport));
  }
}

/** Cuts events into messages, in order. */
function* messages(events: readonly RouterEvent[]): Generator<RouterEvent[]> {
  let message: RouterEvent[] = [];
  let blocks = 0;
  for (const event of events) {
    const { data } = event.event;
    const more = data === "cleared" ? 0 : "stored" in data ? data.stored.blocks.length : data.removed.block_hashes.length;
    if (message.length > 0 && (message.length === MAX_EVENTS || blocks + more > MAX_BLOCKS)) {
      yield message;
      message = [];
      blocks = 0;
    }
    message.push(event);
    blocks += more;
  }
  if (message.length > 0) yield message;
}
