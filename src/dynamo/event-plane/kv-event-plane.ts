import type { EngineInfo, EngineStats, KvEvent } from "../../engine/types.ts";
import { logger } from "../../telemetry/log.ts";
import type { MetricsSource } from "../../telemetry/metrics.ts";
import type { DiscoveryRecord } from "../discovery/discovery.ts";
import { type EndpointName, endpointPath, eventChannelRecord, eventSourceRecord, hexId, type Instance, instanceRecord } from "../discovery/records.ts";
import type { TcpRequestPlane } from "../request-plane/tcp-server.ts";
import { WorkHandler } from "../request-plane/work-handler.ts";
import type { DynamoMetrics } from "../system-server/metrics.ts";
import { KvEventLog } from "./kv-event-log.ts";
import { TopicPublisher } from "./topic-publisher.ts";

/** Changes of the load within this time are one message. */
const LOAD_COALESCE_MS = 5;
/** A message carries at most this many events. */
const MAX_EVENTS = 128;

const log = logger("layerscale::dynamo::event_plane");

export interface EventEngine extends MetricsSource {
  readonly info: EngineInfo;
  onKvEvents(listener: (events: KvEvent[]) => void): () => void;
}

export interface KvEventPlaneOptions {
  engine: EventEngine;
  plane: TcpRequestPlane;
  /** IP to bind and advertise. */
  host: string;
  endpoint: EndpointName;
  workerId: bigint;
  metrics: DynamoMetrics;
  instance: (name: EndpointName) => Instance;
}

/** Tells routers what the prefix cache holds and how full the pool is. Without a prefix cache only the load is told. */
export class KvEventPlane {
  /** To be registered in this order, before the model. */
  readonly records: DiscoveryRecord[] = [];
  readonly #undo: (() => void)[] = [];

  private constructor() {}

  /** @throws Error when no port can be bound */
  static async start(options: KvEventPlaneOptions): Promise<KvEventPlane> {
    const self = new KvEventPlane();
    try {
      if (options.engine.info.prefixCache) await self.#startEvents(options);
      await self.#startLoad(options);
    } catch (error) {
      self.close();
      throw error;
    }
    return self;
  }

  close(): void {
    for (const undo of this.#undo.splice(0)) undo();
  }

  async #startEvents({ engine, plane, host, endpoint, workerId, metrics, instance }: KvEventPlaneOptions): Promise<void> {
    const publisher = await TopicPublisher.start("kv-events", host);
    this.#undo.push(() => publisher.close());
    const eventLog = new KvEventLog(workerId);
    const orphan = (event: KvEvent) => log.error("stored page has an unknown parent and is not reported", { event });
    this.#undo.push(
      engine.onKvEvents((events) => {
        const out = eventLog.append(events, orphan);
        for (let i = 0; i < out.length; i += MAX_EVENTS) publisher.publish(out.slice(i, i + MAX_EVENTS));
      }),
    );
    const query: EndpointName = { ...endpoint, endpoint: `worker_kv_query_source_${hexId(publisher.id)}` };
    const handler = new WorkHandler(
      async function* (body) {
        yield eventLog.answer(body);
      },
      metrics.endpoint(query.endpoint),
      () => metrics.rejected(),
    );
    const path = endpointPath(query, workerId);
    plane.register(path, handler.accept);
    this.#undo.push(() => plane.unregister(path));
    const target = instance(query);
    this.records.push(
      eventChannelRecord(endpoint, publisher.topic, publisher.id, publisher.socket.endpoint),
      instanceRecord(query, target),
      eventSourceRecord(endpoint, publisher.topic, publisher.id, workerId, target),
    );
  }

  async #startLoad({ engine, host, endpoint, workerId }: KvEventPlaneOptions): Promise<void> {
    const publisher = await TopicPublisher.start("kv_metrics", host);
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
    publisher.socket.onSubscribe = () => {
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
    this.records.push(eventChannelRecord(endpoint, publisher.topic, publisher.id, publisher.socket.endpoint));
  }
}
