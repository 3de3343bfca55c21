import { logger } from "../../../telemetry/log.ts";
import { type Bucket, type Discovery, DiscoveryError, type DiscoveryRecord } from "../discovery.ts";
import { type ApiClient, type ApiObject, type RequestOptions } from "./client.ts";
import { ApiError } from "./errors.ts";
import type { Identity } from "./identity.ts";
import { Retry } from "./retry.ts";
import { collectionPath, FIELD_MANAGER, ownerUid, READINESS_LABEL, readinessPath, readyNames, Records, recordsOf } from "./worker-metadata.ts";

/** How long calls wait for an API server that restarts or is overloaded, in milliseconds. */
export interface Limits {
  /** At the start: later the pod's restart policy takes over. */
  openMs: number;
  addMs: number;
  /** Leaving must fit into a pod's grace period together with everything else. */
  removeMs: number;
  closeMs: number;
}
const LIMITS: Limits = { openMs: 20_000, addMs: 30_000, removeMs: 3_000, closeMs: 3_000 };
/** A call that only finds out whether a server that did not answer is back. */
const PROBE_MS = 500;
/** Two writers of one object must not drive each other round in circles. */
const REPAIR_PAUSE_MS = 1_000;
/** Time of a write that repairs; the next comes with the next look at the object. */
const REPAIR_MS = 2_000;
/** A watch that ends sooner does not start again at once. */
const SHORT_WATCH_MS = 1_000;
/** Versions of the object that come from own writes, to tell them from others'. */
const OWN_VERSIONS = 64;

const log = logger("layerscale::dynamo::discovery::kubernetes");

/**
 * Records as one DynamoWorkerMetadata object named after the pod, written whole by server-side apply. The object has no time to live: its owner is
 * the pod, and readers judge liveness by the pod's readiness. A watch writes it again when somebody removed or changed it.
 */
export class KubernetesDiscovery implements Discovery {
  readonly #records = new Records();
  readonly #path: string;
  readonly #versions: string[] = [];
  #tail: Promise<unknown> = Promise.resolve();
  /** The server may not have what #records says. */
  #dirty = false;
  /** The last write failed in a way that waiting may cure. */
  #away = false;
  /** Another pod owns the object: nothing more is written. */
  #replacedBy: string | null = null;
  #closed = new AbortController();
  #wake = new AbortController();
  #watching: Promise<void> = Promise.resolve();

  private constructor(
    readonly client: ApiClient,
    readonly identity: Identity,
    readonly limits: Limits,
  ) {
    this.#path = `${collectionPath(identity.podNamespace)}/${identity.objectName}`;
  }

  /**
   * Drops what an earlier process of this name left and writes an empty object: whether the server can be reached, knows the resource and grants the
   * rights is known before a model is loaded.
   * @throws DiscoveryError
   */
  static async open(client: ApiClient, identity: Identity, limits: Partial<Limits> = {}): Promise<KubernetesDiscovery> {
    const self = new KubernetesDiscovery(client, identity, { ...LIMITS, ...limits });
    const { instanceId, podNamespace: namespace, objectName: name, mode } = identity;
    const until = performance.now() + self.limits.openMs;
    if (await new Retry(self.limits.openMs).run((limitMs) => self.#drop({ limitMs }), retrying)) log.info("record of an earlier process removed", { name, namespace });
    await self.#apply(until - performance.now());
    log.info("kubernetes discovery is open", { server: client.access.server, source: client.access.source, namespace, name, mode, instance: instanceId.toString(16) });
    self.#watching = self.#watch();
    return self;
  }

  get instanceId(): bigint {
    return this.identity.instanceId;
  }

  async add(record: DiscoveryRecord): Promise<void> {
    if (this.#records.get(record.bucket, record.key) !== undefined) throw new DiscoveryError(`record ${record.bucket}/${record.key} exists`);
    await this.#change(() => this.#records.set(record), () => this.#records.delete(record.bucket, record.key), this.limits.addMs);
  }

  async replace(record: DiscoveryRecord): Promise<void> {
    const { bucket, key } = record;
    const before = this.#records.get(bucket, key);
    if (before === undefined) throw new DiscoveryError(`record ${bucket}/${key} does not exist`);
    await this.#change(() => this.#records.set(record), () => this.#records.set({ bucket, key, value: before }), this.limits.addMs);
  }

  async remove(bucket: Bucket, key: string): Promise<void> {
    if (!this.#records.delete(bucket, key)) return;
    // What is removed stays removed: when the write fails, the watch brings the object up to date later.
    await this.#change(() => {}, () => {}, this.limits.removeMs);
  }

  async list(bucket: Bucket, prefix: string): Promise<DiscoveryRecord[]> {
    const { podNamespace, mode } = this.identity;
    return new Retry(this.limits.addMs).run(async (limitMs) => {
      const [readiness, objects] = await Promise.all([
        this.client.list(readinessPath(podNamespace, mode), { labelSelector: READINESS_LABEL }, { limitMs }),
        this.client.list(collectionPath(podNamespace), {}, { limitMs }),
      ]);
      return recordsOf(objects.items, readyNames(readiness.items, mode), bucket, prefix);
    }, retrying);
  }

  /** The name of a pod cannot be lost. */
  onLost(): () => void {
    return () => {};
  }
  async renew(): Promise<bigint> {
    return this.instanceId;
  }

  metadata(): string {
    return this.#records.metadata();
  }

  /** Removes the object. When the server does not answer, it goes with the pod. */
  async close(): Promise<void> {
    if (this.#closed.signal.aborted) return;
    this.#closed.abort();
    await this.#watching;
    await this.#queue(() => this.#delete()).catch((error: unknown) => log.warn("record is left behind; it goes with the pod", { error }));
  }

  /** @param limitMs how long the write may wait for a server that is away */
  async #change(make: () => void, undo: () => void, limitMs: number): Promise<void> {
    if (this.#closed.signal.aborted) throw new DiscoveryError("discovery is closed");
    if (this.#replacedBy !== null) throw new DiscoveryError(`the record ${this.identity.objectName} belongs to another pod now (uid ${this.#replacedBy})`);
    make();
    try {
      await this.#queue(() => this.#apply(this.#away ? Math.min(PROBE_MS, limitMs) : limitMs));
    } catch (error) {
      undo();
      this.#dirty = true;
      this.#wake.abort();
      throw error;
    }
  }

  /** Writes go one after the other. */
  #queue<T>(step: () => Promise<T>): Promise<T> {
    const result = this.#tail.then(step);
    this.#tail = result.catch(() => {});
    return result;
  }

  async #apply(limitMs: number): Promise<void> {
    const { identity } = this;
    try {
      const object = await new Retry(limitMs).run((ms) => {
        this.#dirty = false;
        const query = { force: "true", fieldManager: FIELD_MANAGER };
        return this.client.request("PATCH", this.#path, { query, contentType: "application/apply-patch+yaml", body: this.#records.body(identity), limitMs: ms });
      }, retrying);
      const version = object.metadata?.resourceVersion;
      if (version !== undefined) this.#versions.push(version);
      if (this.#versions.length > OWN_VERSIONS) this.#versions.shift();
      this.#away = false;
    } catch (error) {
      this.#dirty = true;
      this.#away = error instanceof ApiError && error.transient;
      throw error;
    }
  }

  /** Deletes the object; false when there is none. Without the resource the answer is the same: the first write tells that. */
  async #drop(options: RequestOptions): Promise<boolean> {
    try {
      await this.client.request("DELETE", this.#path, options);
      return true;
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) return false;
      throw error;
    }
  }

  /** Deletes the object as long as it is the one that this process wrote: a successor of the same name keeps its own. */
  async #delete(): Promise<void> {
    if (this.#replacedBy !== null) return;
    await new Retry(this.#away ? PROBE_MS : this.limits.closeMs).run(async (limitMs) => {
      const object = await this.#get(limitMs);
      if (object === null || ownerUid(object) !== this.identity.podUid) return;
      const { uid, resourceVersion } = object.metadata!;
      const body = JSON.stringify({ apiVersion: "v1", kind: "DeleteOptions", preconditions: { uid, resourceVersion } });
      await this.#drop({ contentType: "application/json", body, limitMs });
    });
  }

  /** Follows the own object until close(), through restarts of the server. */
  async #watch(): Promise<void> {
    const { podNamespace, objectName } = this.identity;
    const collection = collectionPath(podNamespace);
    const query = { fieldSelector: `metadata.name=${objectName}` };
    let failures = 0;
    const opened = () => {
      if (failures > 0) log.info("API server answers again", { failures });
      failures = 0;
    };
    while (!this.#closed.signal.aborted && this.#replacedBy === null) {
      this.#wake = new AbortController();
      const wake = this.#wake.signal;
      const signal = AbortSignal.any([this.#closed.signal, wake]);
      const began = performance.now();
      try {
        const { items, resourceVersion } = await this.client.list(collection, query, { signal });
        await this.#check(items[0] ?? null);
        for await (const { type, object } of this.client.watch(collection, query, resourceVersion, signal, opened)) {
          if (type !== "BOOKMARK") await this.#check(type === "DELETED" ? null : object);
          if (this.#replacedBy !== null) return;
        }
      } catch (error) {
        if (this.#closed.signal.aborted) return;
        // A failed write woke this up, or the version was too old: the object is compared again.
        const expected = wake.aborted || (error instanceof ApiError && error.status === 410);
        if (!expected && failures++ === 0) log.warn("API server cannot be followed; requests are served on", { error });
      }
      if (failures > 0) await pause(Retry.backoff(failures), this.#closed.signal);
      else if (performance.now() - began < SHORT_WATCH_MS) await pause(SHORT_WATCH_MS, this.#closed.signal);
    }
  }

  /** Writes the object again when it is not what this process wrote last. @param object null = there is none */
  async #check(object: ApiObject | null): Promise<void> {
    await this.#tail;
    if (this.#isOwn(object)) return;
    await pause(REPAIR_PAUSE_MS, this.#closed.signal);
    if (this.#closed.signal.aborted || this.#replacedBy !== null) return;
    await this.#queue(async () => {
      // A pod of the same name may have written its own meanwhile; that one is newer.
      if (this.#isOwn(await this.#get()) || this.#replacedBy !== null) return;
      await this.#apply(REPAIR_MS);
      log.warn("record was gone or changed and is written again", { name: this.identity.objectName });
    });
  }

  /** Whether the server has what was written last; finds out also when another pod has taken the object over. */
  #isOwn(object: ApiObject | null): boolean {
    const owner = object === null ? null : ownerUid(object);
    if (owner !== null && owner !== this.identity.podUid) {
      this.#replacedBy = owner;
      log.error("another pod of the same name has taken the record over; this one is no longer found", { name: this.identity.objectName, uid: owner });
      return true;
    }
    const version = object?.metadata?.resourceVersion;
    return !this.#dirty && version !== undefined && this.#versions.includes(version);
  }

  /** The object as it is now; null when there is none. */
  async #get(limitMs?: number): Promise<ApiObject | null> {
    try {
      return await this.client.request("GET", this.#path, limitMs === undefined ? {} : { limitMs });
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) return null;
      throw error;
    }
  }
}

const retrying = (error: unknown, waitMs: number): void => log.warn("API server does not take the request yet", { error, retryMs: Math.round(waitMs) });

/** Resolves after a time, or at once with the signal. */
function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, signal.aborted ? 0 : ms);
    signal.addEventListener("abort", done, { once: true });
  });
}
