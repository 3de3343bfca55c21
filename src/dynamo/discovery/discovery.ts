/** The four kinds of records of a Dynamo 1.5 system. */
export type Bucket = "v1/instances" | "v1/mdc" | "v1/event_channels" | "v1/event_sources";
export const BUCKETS: readonly Bucket[] = ["v1/instances", "v1/mdc", "v1/event_channels", "v1/event_sources"];

export interface DiscoveryRecord {
  bucket: Bucket;
  /** Unescaped, segments joined by "/". */
  key: string;
  /** 64-bit ids as bigint; they are written as bare numbers. */
  value: unknown;
}

/** Where workers and frontends find each other. Records live until they are removed, or expire when this process stops renewing them. */
export interface Discovery {
  /** Identity of this process; a new one after every start, since frontends do not follow an address that changes. */
  readonly instanceId: bigint;
  /** @throws DiscoveryError when the key exists or the store cannot be reached */
  add(record: DiscoveryRecord): Promise<void>;
  /** Removing what is not there is no error. */
  remove(bucket: Bucket, key: string): Promise<void>;
  /** Live records below a key prefix, other processes' included. */
  list(bucket: Bucket, prefix: string): Promise<DiscoveryRecord[]>;
  /** Removes what is left of this process and stops renewing. */
  close(): Promise<void>;
}

export class DiscoveryError extends Error {
  override name = "DiscoveryError";
}
