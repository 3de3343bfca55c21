import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { DynamoEnvironment } from "../../../config/engine-config.ts";
import { DiscoveryError } from "../discovery.ts";
import { sipHash13 } from "./siphash.ts";

/** What the environment says of this pod. */
export type PodEnvironment = Pick<DynamoEnvironment, "kubeDiscoveryMode" | "podName" | "podUid" | "podNamespace" | "containerName">;

/** Where a downward-API volume puts the pod's fields. */
const PODINFO = "/etc/podinfo";
/** Ids stay exact in JSON numbers. */
const ID_MASK = 0x1f_ffff_ffff_ffffn;
/** The container whose record is the pod's, so that pod-mode and container-mode processes see each other. */
const MAIN_CONTAINER = "main";
/** A name that the API server takes for an object: DNS-1123 labels joined by dots. */
const OBJECT_NAME = /^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$/;

/** `pod`: one identity per pod. `container`: one per container of a pod. */
export type KubeMode = PodEnvironment["kubeDiscoveryMode"];

/** Who this process is in the cluster. */
export interface Identity {
  mode: KubeMode;
  podName: string;
  podNamespace: string;
  /** Owner of the record: the cluster's garbage collection removes it with the pod. */
  podUid: string;
  /** Name of this process's DynamoWorkerMetadata object. */
  objectName: string;
  /** 53 bits. */
  instanceId: bigint;
}

/** The pod's name, or "<pod>-<container>" for other containers than "main". */
export const objectName = (podName: string, containerName: string | null): string =>
  containerName === null || containerName === MAIN_CONTAINER ? podName : `${podName}-${containerName}`;

/** Every process derives another's id from the name of its object: the hash of the UTF-8 bytes and a final 0xff, as Rust hashes a string. */
export const instanceIdOf = (name: string): bigint => sipHash13(new Uint8Array([...new TextEncoder().encode(name), 0xff])) & ID_MASK;

/**
 * Reads the pod's fields from a downward-API volume, else from POD_NAME, POD_UID, POD_NAMESPACE ("default").
 * @throws DiscoveryError naming the variable that is missing or wrong
 */
export function podIdentity(environment: PodEnvironment, podinfo = PODINFO): Identity {
  const field = (file: string, fallback: string | null): string | null => {
    let text = "";
    try {
      text = readFileSync(join(podinfo, file), "utf8").trim();
    } catch {
      // No such volume: the variable says it.
    }
    return text || fallback;
  };
  const needed = (variable: string, value: string | null, how: string): string => {
    if (value === null) throw new DiscoveryError(`${variable} is not set: DYN_DISCOVERY_BACKEND=kubernetes needs it (${how})`);
    return value;
  };
  const named = (variable: string, value: string): string => {
    if (!OBJECT_NAME.test(value) || value.length > 253) throw new DiscoveryError(`${variable}: expected a Kubernetes object name of at most 253 characters (lower-case letters, digits, "-" and "."), got "${value}"`);
    return value;
  };
  const podName = named("POD_NAME", needed("POD_NAME", field("pod_name", environment.podName), "metadata.name by the downward API"));
  const podUid = needed("POD_UID", field("pod_uid", environment.podUid), "metadata.uid by the downward API");
  const podNamespace = named("POD_NAMESPACE", field("pod_namespace", environment.podNamespace) ?? "default");
  const mode = environment.kubeDiscoveryMode;
  const container = mode === "container" ? named("CONTAINER_NAME", needed("CONTAINER_NAME", environment.containerName, "the name of this container, with DYN_KUBE_DISCOVERY_MODE=container")) : null;
  const name = objectName(podName, container);
  if (name.length > 253) throw new DiscoveryError(`POD_NAME and CONTAINER_NAME: expected at most 252 characters together, got "${name}"`);
  return { mode, podName, podNamespace, podUid, objectName: name, instanceId: instanceIdOf(name) };
}
