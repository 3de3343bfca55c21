import { type ClusterEnvironment, inferAccess } from "./access.ts";
import { ApiClient } from "./client.ts";
import { type PodEnvironment, podIdentity } from "./identity.ts";
import { KubernetesDiscovery } from "./kubernetes.ts";

/** Joins the cluster that this pod runs in. @throws DiscoveryError naming the variable, file or right that is missing */
export async function openKubernetesDiscovery(environment: PodEnvironment & ClusterEnvironment): Promise<KubernetesDiscovery> {
  const identity = podIdentity(environment);
  return KubernetesDiscovery.open(new ApiClient(inferAccess(environment)), identity);
}
