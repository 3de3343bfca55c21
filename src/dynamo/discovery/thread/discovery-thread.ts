import { join } from "node:path";
import { Worker } from "node:worker_threads";
import { logger } from "../../../telemetry/log.ts";
import type { LogFilter } from "../../../util/log-filter.ts";
import { type Bucket, type Discovery, DiscoveryError, type DiscoveryRecord, newInstanceId } from "../discovery.ts";
import type { Call, DiscoveryThreadData, FromThread, StoreSpec } from "./store.ts";

const PULSE_MS = 1_000;
/** Changes are bounded inside the thread; this is for a thread that hangs, for instance in a dead network file system. */
const CALL_LIMIT_MS = 30_000;
const CLOSE_LIMIT_MS = 5_000;

const log = logger("layerscale::dynamo::discovery");

/** In the executable a thread starts at the program's own entry; from sources, at a file of its own, so that tests need no entry. */
const ownEntry = (): string => (import.meta.dir.startsWith("/$bunfs/") ? Bun.main : join(import.meta.dir, "main.ts"));

/**
 * A store that lives in a thread of its own. Records expire 10 s after their last renewal, and parsing a huge request, building a tokenizer or a
 * slow disk may hold the main thread for longer.
 */
export class DiscoveryThread implements Discovery {
  readonly #listeners = new Set<(cause: string) => void>();
  readonly #calls = new Map<number, PromiseWithResolvers<unknown>>();
  readonly #pulse = new Int32Array(new SharedArrayBuffer(4));
  readonly #heart: ReturnType<typeof setInterval>;
  #worker: Worker | null = null;
  #instanceId = 0n;
  #lost: string | null = null;
  #next = 1;
  #closing: Promise<void> | null = null;
  #opening: ReturnType<typeof Promise.withResolvers<void>> | null = null;

  private constructor(
    private spec: StoreSpec,
    readonly filter: LogFilter,
    /** Path of the thread's program. */
    readonly entry: string,
  ) {
    this.#heart = setInterval(() => Atomics.add(this.#pulse, 0, 1), PULSE_MS);
    this.#heart.unref();
  }

  /** @throws DiscoveryError when the store cannot be used, after the store's own limit */
  static async open(spec: StoreSpec, filter: LogFilter, entry = ownEntry()): Promise<DiscoveryThread> {
    const self = new DiscoveryThread(spec, filter, entry);
    try {
      await self.#start();
      return self;
    } catch (error) {
      clearInterval(self.#heart);
      throw error;
    }
  }

  get instanceId(): bigint {
    return this.#instanceId;
  }
  async add(record: DiscoveryRecord): Promise<void> {
    await this.#call({ op: "add", record }, CALL_LIMIT_MS);
  }
  async replace(record: DiscoveryRecord): Promise<void> {
    await this.#call({ op: "replace", record }, CALL_LIMIT_MS);
  }
  async remove(bucket: Bucket, key: string): Promise<void> {
    await this.#call({ op: "remove", bucket, key }, CALL_LIMIT_MS);
  }
  async list(bucket: Bucket, prefix: string): Promise<DiscoveryRecord[]> {
    return (await this.#call({ op: "list", bucket, prefix }, CALL_LIMIT_MS)) as DiscoveryRecord[];
  }
  onLost(listener: (cause: string) => void): () => void {
    this.#listeners.add(listener);
    if (this.#lost !== null) listener(this.#lost);
    return () => void this.#listeners.delete(listener);
  }
  async renew(): Promise<bigint> {
    if (this.#closing !== null) throw new DiscoveryError("discovery is closed");
    if (this.#worker === null) {
      // Files of the dead thread stand until they expire.
      if (this.spec.kind === "file") this.spec = { ...this.spec, instanceId: newInstanceId() };
      await this.#start();
    } else await this.#call({ op: "renew" }, null);
    this.#lost = null;
    return this.#instanceId;
  }

  close(): Promise<void> {
    return (this.#closing ??= this.#close());
  }

  async #close(): Promise<void> {
    const worker = this.#worker;
    if (worker !== null) {
      await this.#call({ op: "close" }, CLOSE_LIMIT_MS).catch((error: unknown) => {
        log.warn("discovery did not close", { error });
        return worker.terminate();
      });
    }
    clearInterval(this.#heart);
    this.#worker = null;
    this.#rejectAll("discovery is closed");
  }

  async #start(): Promise<void> {
    const data: DiscoveryThreadData = { kind: "layerscale-discovery", spec: this.spec, log: this.filter, pulse: this.#pulse };
    const worker = (this.#worker = new Worker(this.entry, { workerData: data }));
    const opening = (this.#opening = Promise.withResolvers<void>());
    worker.on("message", (message: FromThread) => this.#receive(message));
    worker.on("error", (error: unknown) => this.#died(worker, `the discovery thread failed: ${(error as Error)?.message ?? String(error)}`));
    worker.on("exit", (code) => this.#died(worker, `the discovery thread ended with code ${code}`));
    await opening.promise;
  }

  #receive(message: FromThread): void {
    switch (message.kind) {
      case "opened":
        this.#instanceId = message.instanceId;
        return this.#opening?.resolve();
      case "failed":
        return this.#opening?.reject(new DiscoveryError(message.message));
      case "lost":
        return this.#tellLost(message.cause);
      case "done":
        // Known before whoever waits for a renewal asks.
        this.#instanceId = message.instanceId;
        return this.#calls.get(message.id)?.resolve(message.value);
      case "refused":
        return this.#calls.get(message.id)?.reject(new DiscoveryError(message.message));
    }
  }

  async #call(call: Call, limitMs: number | null): Promise<unknown> {
    const worker = this.#worker;
    if (worker === null) throw new DiscoveryError(this.#lost ?? "discovery is closed");
    const id = this.#next++;
    const answer = Promise.withResolvers<unknown>();
    this.#calls.set(id, answer);
    const timer = limitMs === null ? undefined : setTimeout(() => answer.reject(new DiscoveryError(`discovery: ${call.op} did not end within ${limitMs / 1000} s`)), limitMs);
    worker.postMessage({ ...call, id });
    try {
      return await answer.promise;
    } finally {
      clearTimeout(timer);
      this.#calls.delete(id);
    }
  }

  /** The records of a dead thread expire: a new one needs a new identity. */
  #died(worker: Worker, cause: string): void {
    if (this.#worker !== worker) return;
    this.#worker = null;
    this.#opening?.reject(new DiscoveryError(cause));
    this.#rejectAll(cause);
    if (this.#closing === null) this.#tellLost(cause);
  }

  #rejectAll(cause: string): void {
    for (const call of this.#calls.values()) call.reject(new DiscoveryError(cause));
  }

  #tellLost(cause: string): void {
    if (this.#lost !== null) return;
    this.#lost = cause;
    for (const listener of this.#listeners) listener(cause);
  }
}
