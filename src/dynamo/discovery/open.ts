import type { DynamoConfig } from "../../config/engine-config.ts";
import { type Discovery, newInstanceId } from "./discovery.ts";
import { etcdOptions } from "./etcd/options.ts";
import { openKubernetesDiscovery } from "./kubernetes/open.ts";
import { MemoryDiscovery } from "./memory.ts";
import { DiscoveryThread } from "./thread/discovery-thread.ts";

/**
 * Opens the store that DYN_DISCOVERY_BACKEND names.
 * @throws UsageError for a variable that cannot work; DiscoveryError when the store cannot be used, after a bounded time
 */
export async function openDiscovery({ environment }: Pick<DynamoConfig, "environment">): Promise<Discovery> {
  switch (environment.discoveryBackend) {
    case "file":
      return DiscoveryThread.open({ kind: "file", root: environment.fileKv, instanceId: newInstanceId() }, environment.log.filter);
    case "etcd":
      return DiscoveryThread.open({ kind: "etcd", options: etcdOptions(environment) }, environment.log.filter);
    case "mem":
      return new MemoryDiscovery(newInstanceId());
    case "kubernetes":
      return openKubernetesDiscovery(environment);
  }
}
