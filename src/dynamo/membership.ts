import type { KvEvent } from "../engine/types.ts";
import { logger } from "../telemetry/log.ts";
import { within } from "../util/within.ts";
import { type Discovery, DiscoveryError, type DiscoveryRecord } from "./discovery/discovery.ts";
import { type EndpointName, endpointKey, hexId, instance, type Instance, instanceRecord, modelRecord } from "./discovery/records.ts";
import { KvEventLog } from "./event-plane/kv-event-log.ts";
import { type EventEngine, KvEventPlane } from "./event-plane/kv-event-plane.ts";
import type { EventPlane } from "./event-plane/topic-publisher.ts";
import { refuseConflict } from "./registration/conflict.ts";
import type { Endpoint, RequestPlane } from "./request-plane/request-plane.ts";
import type { DynamoMetrics } from "./system-server/metrics.ts";

/** Between attempts to register again, when the store answers and refuses. */
const RETRY_MS = 1_000;
/** A stop waits no longer for a registration in progress. */
const SETTLE_MS = 2_000;

const log = logger("layerscale::dynamo::membership");

/** What is registered, whatever the identity. */
export interface MembershipOptions {
  discovery: Discovery;
  plane: RequestPlane;
  events: EventPlane;
  engine: EventEngine;
  metrics: DynamoMetrics;
  endpoint: EndpointName;
  /** Takes the requests of `endpoint`. */
  accept: Endpoint;
  /** The model's record, as the frontend reads it. */
  card: Record<string, unknown>;
  codec: "json" | "msgpack";
  /** A frontend that has not heard of a new identity yet may call the old one for this long. */
  graceMs: number;
}

/** An endpoint beside the main one, for instance of control calls. */
interface SideEndpoint {
  name: EndpointName;
  accept: Endpoint;
}

/** Everything that is registered for one identity, in this order; it goes in reverse. */
interface Registration {
  id: bigint;
  records: DiscoveryRecord[];
  events: KvEventPlane;
  endpoints: EndpointName[];
}

/** This worker in the Dynamo system: it joins, comes back under a new identity when the store forgot the old one, and leaves. */
export class Membership {
  readonly #options: MembershipOptions;
  readonly #eventLog: KvEventLog | null;
  readonly #sides: SideEndpoint[] = [];
  readonly #undo: (() => void)[] = [];
  readonly #retired = new Map<Registration, ReturnType<typeof setTimeout>>();
  #card: Record<string, unknown>;
  #routable = true;
  #now: Registration | null = null;
  #lost: string | null = null;
  #joined = false;
  #leaving = false;
  /** Changes of the registration follow each other. */
  #work: Promise<unknown> = Promise.resolve();

  private constructor(options: MembershipOptions) {
    this.#options = options;
    this.#card = options.card;
    const { engine, discovery } = options;
    this.#eventLog = engine.info.prefixCache ? new KvEventLog(discovery.instanceId) : null;
    const orphan = (event: KvEvent) => log.error("stored page has an unknown parent and is not reported", { event });
    const eventLog = this.#eventLog;
    // Heard from the start and across identities: what the cache holds does not depend on who is told.
    if (eventLog !== null)
      this.#undo.push(
        engine.onKvEvents((events) => {
          const numbered = eventLog.append(events, orphan);
          this.#now?.events.publish(numbered);
        }),
      );
    this.#undo.push(discovery.onLost((cause) => this.#onLost(cause)));
  }

  /**
   * Registers everything; the instance record, which makes the worker routable, comes last.
   * @throws DiscoveryError when the store cannot be reached, or another model has the endpoint; PlaneError
   */
  static async join(options: MembershipOptions): Promise<Membership> {
    const self = new Membership(options);
    try {
      await self.#serially(() => self.#enter());
      self.#joined = true;
      return self;
    } catch (error) {
      await self.close();
      throw error;
    }
  }

  get instanceId(): bigint {
    return this.#options.discovery.instanceId;
  }

  /** Serves another endpoint under the same identity, registered after the main one and removed before it. */
  addEndpoint(name: EndpointName, accept: Endpoint): Promise<void> {
    const side = { name, accept };
    return this.#change(() => void this.#sides.push(side), (now) => this.#addSide(now, side));
  }

  /** Takes the instance record away, so that no new request is sent here, or brings it back. */
  setRoutable(routable: boolean): Promise<void> {
    return this.#change(
      () => (this.#routable = routable),
      async (now) => {
        const record = this.#mainRecord(now);
        const there = now.records.some((other) => other.bucket === record.bucket && other.key === record.key);
        if (routable !== there) await (routable ? this.#add(now, record) : this.#remove(now, record));
      },
    );
  }

  /** Gives the model record another value. */
  updateCard(card: Record<string, unknown>): Promise<void> {
    return this.#change(() => (this.#card = card), (now) => this.#options.discovery.replace(modelRecord(this.#options.endpoint, now.id, card)));
  }

  /** Leaves discovery: every record in reverse order, the identity last. Open streams and requests that still arrive are served. Bounded. */
  async leave(): Promise<void> {
    this.#leaving = true;
    const { discovery } = this.#options;
    if (await within(this.#work, SETTLE_MS)) {
      try {
        for (const record of this.#now?.records.toReversed() ?? []) await discovery.remove(record.bucket, record.key);
      } catch (error) {
        log.warn("records could not be removed and will expire", { error });
      }
    }
    await discovery.close();
  }

  /** Stops telling events and taking requests; safe at any point. */
  async close(): Promise<void> {
    this.#leaving = true;
    for (const undo of this.#undo.splice(0)) undo();
    for (const [registration, timer] of this.#retired) {
      clearTimeout(timer);
      await this.#retire(registration);
    }
    if (this.#now !== null) await this.#retire(this.#now);
    this.#now = null;
  }

  /** Remembers a change and makes it; without an identity, or when it is lost meanwhile, the next registration has it. */
  #change(remember: () => void, make: (now: Registration) => Promise<void>): Promise<void> {
    return this.#serially(async () => {
      remember();
      if (this.#now === null || this.#lost !== null) return;
      try {
        await make(this.#now);
      } catch (error) {
        if (this.#lost === null) throw error;
      }
    });
  }

  #serially<T>(body: () => Promise<T>): Promise<T> {
    const run = this.#work.then(body);
    this.#work = run.catch(() => {});
    return run;
  }

  #onLost(cause: string): void {
    if (this.#leaving) return;
    log.warn("identity lost, the worker registers again", { cause, instance: hexId(this.instanceId) });
    this.#lost = cause;
    if (this.#joined) void this.#serially(() => this.#recover());
  }

  /** The first time: a store that refuses ends the start. An identity that was lost while loading is replaced. */
  async #enter(): Promise<void> {
    for (;;) {
      if (this.#lost !== null) await this.#renew();
      try {
        return await this.#register();
      } catch (error) {
        if (this.#lost === null) throw error;
      }
    }
  }

  /** Later: tries until it is back, or the worker leaves. */
  async #recover(): Promise<void> {
    while (this.#lost !== null && !this.#leaving) {
      const cause = this.#lost;
      try {
        await this.#renew();
        await this.#register();
        log.info("worker registered again", { instance: hexId(this.instanceId), cause });
      } catch (error) {
        if (this.#leaving) return;
        log.error("worker could not register again", { error, retrySeconds: RETRY_MS / 1000 });
        this.#lost ??= cause;
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
  }

  async #renew(): Promise<void> {
    this.#lost = null;
    const id = await this.#options.discovery.renew();
    this.#eventLog?.rename(id);
    this.#options.metrics.rename(id);
  }

  async #register(): Promise<void> {
    const { discovery, plane, events, engine, metrics, endpoint, accept } = this.#options;
    const id = discovery.instanceId;
    const before = this.#now;
    await plane.register(endpoint, id, accept);
    const records = await KvEventPlane.start({ engine, plane, events, endpoint, workerId: id, metrics, eventLog: this.#eventLog, instance: (name) => this.#instance(name, id) });
    const now: Registration = (this.#now = { id, records: [], events: records, endpoints: [endpoint] });
    if (before !== null) this.#retireLater(before);
    for (const record of records.records) await this.#add(now, record);
    const key = endpointKey(endpoint, id);
    await refuseConflict(discovery, endpoint, key, this.#card);
    await this.#add(now, modelRecord(endpoint, id, this.#card));
    // Again, now that others see the record: of two that start together at least one notices.
    await refuseConflict(discovery, endpoint, key, this.#card);
    if (this.#routable) await this.#add(now, this.#mainRecord(now));
    for (const side of this.#sides) await this.#addSide(now, side);
  }

  async #addSide(now: Registration, { name, accept }: SideEndpoint): Promise<void> {
    await this.#options.plane.register(name, now.id, accept);
    now.endpoints.push(name);
    await this.#add(now, instanceRecord(name, this.#instance(name, now.id)));
  }

  async #add(now: Registration, record: DiscoveryRecord): Promise<void> {
    if (this.#leaving) throw new DiscoveryError("the worker is leaving");
    await this.#options.discovery.add(record);
    now.records.push(record);
  }

  async #remove(now: Registration, record: DiscoveryRecord): Promise<void> {
    await this.#options.discovery.remove(record.bucket, record.key);
    const at = now.records.findIndex((other) => other.bucket === record.bucket && other.key === record.key);
    if (at >= 0) now.records.splice(at, 1);
  }

  #mainRecord(now: Registration): DiscoveryRecord {
    return instanceRecord(this.#options.endpoint, this.#instance(this.#options.endpoint, now.id));
  }

  #instance(name: EndpointName, id: bigint): Instance {
    const { engine, plane, codec } = this.#options;
    return instance(name, id, plane.transport(name, id), engine.info.device.startsWith("cuda") ? "cuda" : "cpu", codec);
  }

  /** The old paths stay until frontends have heard of the new ones. */
  #retireLater(registration: Registration): void {
    const timer = setTimeout(() => void this.#retire(registration), this.#options.graceMs);
    timer.unref();
    this.#retired.set(registration, timer);
  }

  async #retire(registration: Registration): Promise<void> {
    this.#retired.delete(registration);
    registration.events.close();
    for (const name of registration.endpoints) {
      await this.#options.plane.unregister(name, registration.id).catch((error: unknown) => log.warn("endpoint not withdrawn", { endpoint: name.endpoint, error }));
    }
  }
}
