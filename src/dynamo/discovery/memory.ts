import { type Bucket, type Discovery, DiscoveryError, type DiscoveryRecord } from "./discovery.ts";

/** Records inside one process: the worker runs alone, no frontend of another process sees it. */
export class MemoryDiscovery implements Discovery {
  readonly records = new Map<string, DiscoveryRecord>();
  constructor(readonly instanceId: bigint) {}

  async add(record: DiscoveryRecord): Promise<void> {
    const key = `${record.bucket}/${record.key}`;
    if (this.records.has(key)) throw new DiscoveryError(`record ${key} exists`);
    this.records.set(key, record);
  }
  async replace(record: DiscoveryRecord): Promise<void> {
    this.records.set(`${record.bucket}/${record.key}`, record);
  }
  async remove(bucket: Bucket, key: string): Promise<void> {
    this.records.delete(`${bucket}/${key}`);
  }
  async list(bucket: Bucket, prefix: string): Promise<DiscoveryRecord[]> {
    return [...this.records.values()].filter((record) => record.bucket === bucket && record.key.startsWith(prefix));
  }
  onLost(): () => void {
    return () => {};
  }
  async renew(): Promise<bigint> {
    return this.instanceId;
  }
  async close(): Promise<void> {
    this.records.clear();
  }
}
