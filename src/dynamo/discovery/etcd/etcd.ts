import { logger } from "../../../telemetry/log.ts";
import { parseJson, stringifyJson } from "../../protocol/bigint-json.ts";
import { type Bucket, type Discovery, DiscoveryError, type DiscoveryRecord } from "../discovery.ts";
import { hexId } from "../records.ts";
import { type Answer, EtcdError, EtcdGateway, EtcdUnreachable, NOT_FOUND, PERMISSION_DENIED } from "./gateway.ts";
import type { EtcdOptions } from "./options.ts";

/** At start etcd may come up later than the worker; Dynamo's own workers wait as long. */
const CONNECT_LIMIT_MS = 120_000;
/** A change of a record is given up after this time; a removal sooner, since an unreachable record expires by itself. */
const CHANGE_LIMIT_MS = 10_000;
const REMOVE_LIMIT_MS = 2_000;
/** The lease is renewed this often, or thrice in its time to live: a lost one is noticed, and all is registered again, within 5 s. */
const BEAT_MS = 2_000;
const RETRY_MS = 500;
/** How long a silent etcd is tried before the next line about it. */
const COMPLAIN_MS = 5_000;
const FIRST_COMPLAINT_MS = 1_000;

const log = logger("layerscale::dynamo::discovery");
const base64 = (text: string) => Buffer.from(text).toString("base64");
const text = (value: unknown) => (typeof value === "string" ? Buffer.from(value, "base64").toString() : "");
const etcdKey = (record: { bucket: Bucket; key: string }) => `${record.bucket}/${record.key}`;

/** End of the range of all keys that begin with a prefix. */
function rangeEnd(prefix: string): string {
  const bytes = Buffer.from(prefix);
  bytes[bytes.length - 1] = (bytes[bytes.length - 1] as number) + 1;
  return bytes.toString("base64");
}

/**
 * Records in etcd, all under one lease, whose id is this process's identity. A lease that etcd no longer knows (it expired, was revoked, or
 * etcd came back empty) is a lost identity; an etcd that does not answer is waited for, since a restarted one still knows its leases.
 */
export class EtcdDiscovery implements Discovery {
  readonly #own = new Map<string, DiscoveryRecord>();
  readonly #listeners = new Set<(cause: string) => void>();
  readonly #gateway: EtcdGateway;
  #lease = 0n;
  #lost: string | null = null;
  #closed = false;
  #timer: ReturnType<typeof setTimeout> | undefined;
  #silentSince: number | null = null;
  /** Changes follow each other, so that a repair never brings back what is being removed. */
  #work: Promise<unknown> = Promise.resolve();

  private constructor(
    readonly options: EtcdOptions,
    /** Whether the process is well; a lease is not renewed for one that hangs. */
    readonly alive: () => boolean,
  ) {
    this.#gateway = new EtcdGateway(options);
  }

  /** Takes a lease. @throws DiscoveryError naming ETCD_ENDPOINTS when there is none within the time */
  static async open(options: EtcdOptions, alive: () => boolean = () => true, limitMs = CONNECT_LIMIT_MS): Promise<EtcdDiscovery> {
    const self = new EtcdDiscovery(options, alive);
    const deadline = performance.now() + limitMs;
    for (let patience = FIRST_COMPLAINT_MS; ; patience = COMPLAIN_MS) {
      try {
        await self.#grant(Math.min(patience, deadline - performance.now()));
        return self;
      } catch (error) {
        const final = !(error instanceof EtcdUnreachable) || error.hopeless || performance.now() + RETRY_MS > deadline;
        if (final) {
          self.#closed = true;
          throw new DiscoveryError(`ETCD_ENDPOINTS: ${error instanceof EtcdUnreachable ? "etcd does not answer" : "etcd refuses"}: ${(error as Error).message}`);
        }
        log.warn("etcd does not answer yet", { error, secondsLeft: Math.round((deadline - performance.now()) / 1000) });
      }
    }
  }

  get instanceId(): bigint {
    return this.#lease;
  }

  add(record: DiscoveryRecord): Promise<void> {
    return this.#change(`cannot write record ${etcdKey(record)}`, async () => {
      await this.#create(record);
      this.#own.set(etcdKey(record), record);
    });
  }

  replace(record: DiscoveryRecord): Promise<void> {
    return this.#change(`cannot write record ${etcdKey(record)}`, async () => {
      this.#mustBeHeld();
      const key = etcdKey(record);
      await this.#gateway.call("/v3/kv/put", { key: base64(key), value: base64(stringifyJson(record.value)), lease: this.#lease.toString() }, CHANGE_LIMIT_MS);
      this.#own.set(key, record);
    });
  }

  remove(bucket: Bucket, key: string): Promise<void> {
    const full = etcdKey({ bucket, key });
    this.#own.delete(full);
    return this.#change(`cannot remove record ${full}`, async () => {
      // Records go with their lease.
      if (this.#lost !== null) return;
      await this.#gateway.call("/v3/kv/deleterange", { key: base64(full) }, REMOVE_LIMIT_MS);
    });
  }

  async list(bucket: Bucket, prefix: string): Promise<DiscoveryRecord[]> {
    const full = etcdKey({ bucket, key: prefix });
    const { kvs } = await this.#explain(`cannot list records ${full}`, () => this.#gateway.call("/v3/kv/range", { key: base64(full), range_end: rangeEnd(full) }, CHANGE_LIMIT_MS));
    const out: DiscoveryRecord[] = [];
    for (const item of Array.isArray(kvs) ? (kvs as Answer[]) : []) {
      const key = text(item.key);
      try {
        out.push({ bucket, key: key.slice(bucket.length + 1), value: parseJson(text(item.value)) });
      } catch (error) {
        log.debug("record skipped", { key, error });
      }
    }
    return out;
  }

  onLost(listener: (cause: string) => void): () => void {
    this.#listeners.add(listener);
    if (this.#lost !== null) listener(this.#lost);
    return () => void this.#listeners.delete(listener);
  }

  async renew(): Promise<bigint> {
    const before = this.#lost === null ? this.#lease : null;
    clearTimeout(this.#timer);
    this.#own.clear();
    while (!this.#closed) {
      try {
        await this.#grant(COMPLAIN_MS);
        // What was registered under a lease that is still good must not stay beside the new records.
        if (before !== null) await this.#gateway.call("/v3/lease/revoke", { ID: before.toString() }, 0).catch((error: unknown) => log.warn("old lease not revoked", { error }));
        return this.#lease;
      } catch (error) {
        if (!this.#closed) log.warn("no new lease yet", { error });
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
    throw new DiscoveryError("discovery is closed");
  }

  async close(): Promise<void> {
    if (this.#closed) return;
    this.#closed = true;
    clearTimeout(this.#timer);
    const last = this.#lost === null ? { path: "/v3/lease/revoke", body: { ID: this.#lease.toString() } } : null;
    await this.#gateway.close(last).catch((error: unknown) => log.warn("lease not revoked; its records expire", { error, ttlSeconds: this.options.leaseTtlSeconds }));
    this.#own.clear();
  }

  async #grant(limitMs: number): Promise<void> {
    const { ID } = await this.#gateway.call("/v3/lease/grant", { TTL: String(this.options.leaseTtlSeconds) }, limitMs);
    if (typeof ID !== "string" || !/^\d{1,19}$/.test(ID) || ID === "0") throw new EtcdError(`unexpected lease id ${JSON.stringify(ID)}`, null);
    this.#lease = BigInt(ID);
    this.#lost = null;
    this.#silentSince = null;
    log.info("lease taken", { lease: hexId(this.#lease), ttlSeconds: this.options.leaseTtlSeconds });
    this.#schedule(this.#beatMs);
  }

  get #beatMs(): number {
    return Math.min(BEAT_MS, (this.options.leaseTtlSeconds * 1000) / 3);
  }

  #schedule(ms: number): void {
    clearTimeout(this.#timer);
    if (this.#closed) return;
    this.#timer = setTimeout(() => void this.#beat(), ms);
  }

  /** Renews the lease and puts back what somebody removed. */
  async #beat(): Promise<void> {
    if (!this.alive()) return this.#schedule(RETRY_MS);
    const lease = this.#lease;
    const current = () => lease === this.#lease && this.#lost === null && !this.#closed;
    try {
      const { TTL } = await this.#gateway.call("/v3/lease/keepalive", { ID: lease.toString() }, 0);
      if (!current()) return;
      if (!(Number(TTL) > 0)) return this.#setLost(`lease ${hexId(lease)} is unknown to etcd: expired, revoked, or etcd came back empty`);
      if (this.#silentSince !== null) log.info("etcd answers again", { afterSeconds: Math.round((performance.now() - this.#silentSince) / 1000) });
      this.#silentSince = null;
      await this.#repair(lease);
      if (current()) this.#schedule(this.#beatMs);
    } catch (error) {
      if (!current()) return;
      if (error instanceof EtcdError && error.code === NOT_FOUND) return this.#setLost(`lease ${hexId(lease)}: ${error.message}`);
      if (this.#silentSince === null) log.warn("lease not renewed, trying on", { error });
      this.#silentSince ??= performance.now();
      this.#schedule(RETRY_MS);
    }
  }

  async #repair(lease: bigint): Promise<void> {
    const { keys } = await this.#gateway.call("/v3/lease/timetolive", { ID: lease.toString(), keys: true }, 0);
    const present = new Set((Array.isArray(keys) ? keys : []).map(text));
    for (const key of this.#own.keys()) {
      if (present.has(key)) continue;
      await this.#serially(async () => {
        const record = this.#own.get(key);
        if (record === undefined || lease !== this.#lease || (await this.#create(record)) === "present") return;
        log.warn("discovery record was gone and is written again", { key });
      });
    }
  }

  /** Writes a key that is not there. @throws DiscoveryError when another lease has it */
  async #create(record: DiscoveryRecord): Promise<"written" | "present"> {
    this.#mustBeHeld();
    const key = base64(etcdKey(record));
    const lease = this.#lease.toString();
    const value = base64(stringifyJson(record.value));
    const answer = await this.#gateway.call(
      "/v3/kv/txn",
      { compare: [{ target: "VERSION", result: "EQUAL", key, version: "0" }], success: [{ request_put: { key, value, lease } }], failure: [{ request_range: { key } }] },
      CHANGE_LIMIT_MS,
    );
    if (answer.succeeded === true) return "written";
    // A try whose answer was lost may have written it.
    const found = (answer.responses as { response_range?: { kvs?: Answer[] } }[] | undefined)?.[0]?.response_range?.kvs?.[0];
    if (found?.lease !== lease || found.value !== value) throw new DiscoveryError("it exists");
    return "present";
  }

  #mustBeHeld(): void {
    if (this.#lost !== null) throw new DiscoveryError(this.#lost);
  }

  #setLost(cause: string): void {
    if (this.#lost !== null || this.#closed) return;
    this.#lost = cause;
    clearTimeout(this.#timer);
    for (const listener of this.#listeners) listener(cause);
  }

  #serially<T>(body: () => Promise<T>): Promise<T> {
    const run = this.#work.then(body);
    this.#work = run.catch(() => {});
    return run;
  }

  #change(what: string, body: () => Promise<void>): Promise<void> {
    return this.#serially(() => this.#explain(what, body));
  }

  async #explain<T>(what: string, body: () => Promise<T>): Promise<T> {
    const lease = this.#lease;
    try {
      return await body();
    } catch (error) {
      const code = error instanceof EtcdError ? error.code : null;
      if (code === NOT_FOUND && lease === this.#lease) this.#setLost(`lease ${hexId(lease)}: ${(error as Error).message}`);
      const denied = code === PERMISSION_DENIED || /user name is empty/.test((error as Error).message);
      const hint = denied ? `; ETCD_AUTH_USERNAME${this.options.user === null ? " is not set" : ` = "${this.options.user.name}"`}: expected a user who may read and write keys that begin with v1/` : "";
      throw new DiscoveryError(`${what}: ${(error as Error).message}${hint}`);
    }
  }
}
