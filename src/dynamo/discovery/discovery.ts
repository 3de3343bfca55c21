import { randomBytes } from "node:crypto";

/** The four kinds of records of a Dynamo 1.5 system. */
export type Bucket = "v1/instances" | "v1/mdc" | "v1/event_channels" | "v1/event_sources";
export const BUCKETS: readonly Bucket[] = ["v1/instances", "v1/mdc", "v1/event_channels", "v1/event_sources"];

/** For stores that do not give identities themselves. */
export const newInstanceId = (): bigint => randomBytes(8).readBigUInt64BE() || 1n;

export interface DiscoveryRecord {
  bucket: Bucket;
  /** Unescaped, segments joined by "/". */
  key: string;
  /** 64-bit ids as bigint; they are written as bare numbers. */
  value: unknown;
}

/** Where workers and frontends find each other. Records live until they are removed, or expire when this process stops renewing them. */
export interface Discovery {
  /** Identity of this process; a new one after every start, since frontends do not follow an address that changes. renew() changes it. */
  readonly instanceId: bigint;
  /** @throws DiscoveryError when the key exists or the store cannot be reached within a bounded time */
  add(record: DiscoveryRecord): Promise<void>;
  /** Gives a record of this process another value. @throws DiscoveryError like add() */
  replace(record: DiscoveryRecord): Promise<void>;
  /** Removing what is not there is no error. @throws DiscoveryError when the store cannot be reached within a bounded time */
  remove(bucket: Bucket, key: string): Promise<void>;
  /** Live records below a key prefix, other processes' included. */
  list(bucket: Bucket, prefix: string): Promise<DiscoveryRecord[]>;
  /**
   * Tells when the store no longer knows this identity (a lost lease), which takes all its records along; at once when that has happened already.
   * @returns how to stop listening
   */
  onLost(listener: (cause: string) => void): () => void;
  /**
   * Takes a new identity, without records; what was registered must be added again. Where identities cannot be lost it answers the present one.
   * Retries until the store answers. @throws DiscoveryError when closed meanwhile
   */
  renew(): Promise<bigint>;
  /** What /metadata of the system server shows, as JSON; only where records are no entries of a store that can be looked into. */
  metadata?(): string;
  /** Removes what is left of this process and stops renewing; bounded, also when the store is gone. */
  close(): Promise<void>;
}

export class DiscoveryError extends Error {
  override name = "DiscoveryError";
}
