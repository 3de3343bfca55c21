import type { LogFilter } from "../../../util/log-filter.ts";
import type { Bucket, Discovery, DiscoveryRecord } from "../discovery.ts";
import { EtcdDiscovery } from "../etcd/etcd.ts";
import type { EtcdOptions } from "../etcd/options.ts";
import { FileDiscovery } from "../file.ts";

/** A store whose records expire unless they are renewed. */
export type StoreSpec = { kind: "file"; root: string; instanceId: bigint } | { kind: "etcd"; options: EtcdOptions };

/** What the thread is started with. */
export interface DiscoveryThreadData {
  kind: "layerscale-discovery";
  spec: StoreSpec;
  log: LogFilter;
  /** Element 0 is raised by the main thread as long as it is well. */
  pulse: Int32Array;
}

export type Call =
  | { op: "add" | "replace"; record: DiscoveryRecord }
  | { op: "remove"; bucket: Bucket; key: string }
  | { op: "list"; bucket: Bucket; prefix: string }
  | { op: "renew" | "close" };

export type ToThread = Call & { id: number };
/** `name` is the error's class. */
export type FromThread =
  | { kind: "opened"; instanceId: bigint }
  | { kind: "failed"; name: string; message: string }
  | { kind: "done"; id: number; value: unknown; instanceId: bigint }
  | { kind: "refused"; id: number; message: string }
  | { kind: "lost"; cause: string };

/** @throws DiscoveryError when the store cannot be used */
export async function openStore(spec: StoreSpec, alive: () => boolean): Promise<Discovery> {
  return spec.kind === "file" ? new FileDiscovery(spec.root, spec.instanceId, { alive }) : EtcdDiscovery.open(spec.options, alive);
}

export async function perform(store: Discovery, call: Call): Promise<unknown> {
  switch (call.op) {
    case "add":
      return store.add(call.record);
    case "replace":
      return store.replace(call.record);
    case "remove":
      return store.remove(call.bucket, call.key);
    case "list":
      return store.list(call.bucket, call.prefix);
    case "renew":
      return store.renew();
    case "close":
      return store.close();
  }
}
