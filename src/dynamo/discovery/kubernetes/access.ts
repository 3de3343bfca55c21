import { existsSync, readFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import type { DynamoEnvironment } from "../../../config/engine-config.ts";
import { DiscoveryError } from "../discovery.ts";
import { readKubeconfig } from "./kubeconfig.ts";

/** Where the kubelet mounts a pod's service account. */
const SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount";

/** What the environment says of the cluster. */
export type ClusterEnvironment = Pick<DynamoEnvironment, "kubeconfig" | "kubernetesHost" | "kubernetesPort">;

export interface Credentials {
  /** Value of the Authorization header; null when none is sent. */
  authorization: string | null;
  tls: { ca?: string; cert?: string; key?: string; serverName?: string; rejectUnauthorized?: boolean };
}

/** How to reach the API server. */
export interface ApiAccess {
  /** "https://host:port", without a slash at the end. */
  server: string;
  /** Where this comes from, for messages. */
  source: string;
  /** Proxy of kubeconfig; null = HTTPS_PROXY and NO_PROXY as the environment has them. */
  proxy: string | null;
  /** Read anew for every request: tokens and certificates are replaced under a running process. @throws DiscoveryError when a file was never readable */
  credentials(): Credentials;
}

/**
 * A file that is read for every use; while it cannot be read, or is empty as in the middle of a replacement, the last text holds.
 * @throws DiscoveryError when it was never readable
 */
export function watchedFile(path: string, what: string): () => string {
  let last = "";
  return () => {
    try {
      last = readFileSync(path, "utf8").trim() || last;
    } catch (error) {
      if (last === "") throw new DiscoveryError(`${what}: cannot read "${path}": ${(error as Error).message}`);
    }
    if (last === "") throw new DiscoveryError(`${what}: "${path}" is empty`);
    return last;
  };
}

/**
 * The cluster's address and credentials, in the order of other Dynamo processes: KUBECONFIG, ~/.kube/config, then the pod's service account.
 * @throws DiscoveryError naming the variable or file, and what was expected
 */
export function inferAccess({ kubeconfig, kubernetesHost: host, kubernetesPort: port }: ClusterEnvironment, serviceAccount = SERVICE_ACCOUNT, home = homedir()): ApiAccess {
  if (kubeconfig !== null) return readKubeconfig(kubeconfig.split(":").filter(Boolean), `KUBECONFIG "${kubeconfig}"`);
  const own = join(home, ".kube", "config");
  if (existsSync(own)) {
    try {
      return readKubeconfig([own], own);
    } catch (error) {
      if (host === null) throw error;
    }
  }
  if (host === null)
    throw new DiscoveryError("DYN_DISCOVERY_BACKEND=kubernetes finds no cluster: neither KUBECONFIG, nor ~/.kube/config, nor KUBERNETES_SERVICE_HOST (which every pod has) is there");
  const server = `https://${host.includes(":") && !host.startsWith("[") ? `[${host}]` : host}:${port}`;
  if (!URL.canParse(server)) throw new DiscoveryError(`KUBERNETES_SERVICE_HOST: expected a host, got "${host}"`);
  const token = watchedFile(join(serviceAccount, "token"), "service account token");
  const ca = watchedFile(join(serviceAccount, "ca.crt"), "service account CA");
  return { server, source: `service account in ${serviceAccount}`, proxy: null, credentials: () => ({ authorization: `Bearer ${token()}`, tls: { ca: ca() } }) };
}
