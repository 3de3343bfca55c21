import { stringifyJson } from "../../protocol/bigint-json.ts";
import { type Bucket, BUCKETS, DiscoveryError, type DiscoveryRecord } from "../discovery.ts";
import type { ApiObject } from "./client.ts";
import type { Identity, KubeMode } from "./identity.ts";
import { objectName } from "./identity.ts";

const GROUP_VERSION = "nvidia.com/v1alpha1";
const KIND = "DynamoWorkerMetadata";
/** Owner of the fields in server-side apply; the same for every Dynamo process. */
export const FIELD_MANAGER = "dynamo-worker";
/** Pods and slices that take part in discovery carry this label. */
export const READINESS_LABEL = "nvidia.com/dynamo-discovery-enabled=true";

/** Where each bucket is in spec.data. */
const FIELDS: Record<Bucket, string> = { "v1/instances": "endpoints", "v1/mdc": "model_cards", "v1/event_channels": "event_channels", "v1/event_sources": "event_sources" };

export const collectionPath = (namespace: string): string => `/apis/${GROUP_VERSION}/namespaces/${namespace}/dynamoworkermetadatas`;
export const readinessPath = (namespace: string, mode: KubeMode): string =>
  mode === "pod" ? `/apis/discovery.k8s.io/v1/namespaces/${namespace}/endpointslices` : `/api/v1/namespaces/${namespace}/pods`;

const isObject = (value: unknown): value is Record<string, unknown> => typeof value === "object" && value !== null && !Array.isArray(value);

/** Records of one process, as its object holds them. */
export class Records {
  readonly #values = new Map<Bucket, Map<string, unknown>>(BUCKETS.map((bucket) => [bucket, new Map()]));

  get(bucket: Bucket, key: string): unknown {
    return this.#values.get(bucket)!.get(key);
  }
  set({ bucket, key, value }: DiscoveryRecord): void {
    if (bucket === "v1/event_channels" || bucket === "v1/event_sources") refuseLongId(value);
    this.#values.get(bucket)!.set(key, value);
  }
  delete(bucket: Bucket, key: string): boolean {
    return this.#values.get(bucket)!.delete(key);
  }

  /** The records by field and key, as JSON. */
  metadata(): string {
    return stringifyJson(this.#data((_, value) => value));
  }

  #data(change: (bucket: Bucket, value: unknown) => unknown): Record<string, Record<string, unknown>> {
    return Object.fromEntries(BUCKETS.map((bucket) => [FIELDS[bucket], Object.fromEntries([...this.#values.get(bucket)!].map(([key, value]) => [key, change(bucket, value)]))]));
  }

  /** Body of the server-side apply: all of the object that this process owns. What is absent is removed. */
  body({ objectName: name, podName, podUid }: Identity): string {
    const data = this.#data((bucket, value) => (bucket === "v1/event_channels" ? withPlace(value) : value));
    // Of several objects of one pod only the one with its name is controlled by it.
    const owner = { apiVersion: "v1", kind: "Pod", name: podName, uid: podUid, controller: name === podName, blockOwnerDeletion: false };
    return stringifyJson({ apiVersion: GROUP_VERSION, kind: KIND, metadata: { name, ownerReferences: [owner] }, spec: { data } });
  }
}

/** Readers of older versions look for namespace and component beside the scope. */
function withPlace(value: unknown): unknown {
  const endpoint = isObject(value) && isObject(value.scope) ? value.scope.endpoint : undefined;
  return isObject(value) && isObject(endpoint) ? { ...value, namespace: endpoint.namespace, component: endpoint.component } : value;
}

/** Ids of publishers pass through readers that keep 53 bits. */
function refuseLongId(value: unknown): void {
  const id = isObject(value) ? (value.publisher_id ?? value.instance_id) : undefined;
  if ((typeof id === "bigint" || typeof id === "number") && id > Number.MAX_SAFE_INTEGER) throw new DiscoveryError(`publisher id ${id}: Kubernetes discovery takes ids below 2^53`);
}

/** Names of the objects whose process is ready, as every reader judges it: a ready endpoint of a slice, or a ready container of a pod. */
export function readyNames(items: readonly ApiObject[], mode: KubeMode): Set<string> {
  const names = new Set<string>();
  for (const item of items) {
    if (mode === "pod") {
      const endpoints = (item.endpoints ?? []) as { conditions?: { ready?: unknown }; targetRef?: { name?: unknown } }[];
      for (const { conditions, targetRef } of endpoints) if (conditions?.ready === true && typeof targetRef?.name === "string" && targetRef.name) names.add(targetRef.name);
    } else {
      const statuses = ((item.status as { containerStatuses?: unknown } | undefined)?.containerStatuses ?? []) as { name?: unknown; ready?: unknown }[];
      for (const { name, ready } of statuses) if (ready === true && typeof name === "string" && item.metadata?.name) names.add(objectName(item.metadata.name, name));
    }
  }
  return names;
}

/** Records below a prefix in the objects of ready processes. An object that cannot be read has none. */
export function recordsOf(objects: readonly ApiObject[], ready: ReadonlySet<string>, bucket: Bucket, prefix: string): DiscoveryRecord[] {
  const out: DiscoveryRecord[] = [];
  for (const object of objects) {
    const spec = object.spec;
    const data = isObject(spec) && isObject(spec.data) ? spec.data[FIELDS[bucket]] : undefined;
    if (!object.metadata?.name || !ready.has(object.metadata.name) || !isObject(data)) continue;
    for (const [key, value] of Object.entries(data)) if (key.startsWith(prefix)) out.push({ bucket, key, value });
  }
  return out;
}

/** Uid of the pod that owns an object; null when none does. */
export const ownerUid = (object: ApiObject): string | null => object.metadata?.ownerReferences?.find((owner) => owner.kind === "Pod")?.uid ?? null;

