import type { DiscoveryRecord } from "./discovery.ts";
import { escapeSegment } from "./escape.ts";

/** Where an endpoint lives; names match [a-z0-9_-]+. */
export interface EndpointName {
  namespace: string;
  component: string;
  endpoint: string;
}

/** Key spelling of an id: lower-case hex without padding. */
export const hexId = (id: bigint): string => id.toString(16);

export const endpointKey = (name: EndpointName, instanceId: bigint): string => `${name.namespace}/${name.component}/${name.endpoint}/${hexId(instanceId)}`;

/** Routing key of an endpoint on the request plane: "<id hex>/<endpoint>". */
export const endpointPath = (name: EndpointName, instanceId: bigint): string => `${hexId(instanceId)}/${name.endpoint}`;

export interface Instance {
  component: string;
  endpoint: string;
  namespace: string;
  instance_id: bigint;
  transport: { tcp: string };
  device_type: "cpu" | "cuda";
  request_plane_codec: "json" | "msgpack";
}

/** @param address "ip:port/path" */
export function instance(name: EndpointName, instanceId: bigint, address: string, device: "cpu" | "cuda", codec: "json" | "msgpack"): Instance {
  return { component: name.component, endpoint: name.endpoint, namespace: name.namespace, instance_id: instanceId, transport: { tcp: address }, device_type: device, request_plane_codec: codec };
}

export const instanceRecord = (name: EndpointName, value: Instance): DiscoveryRecord => ({
  bucket: "v1/instances",
  key: endpointKey(name, value.instance_id),
  value: { type: "Endpoint", ...value },
});

export const modelRecord = (name: EndpointName, instanceId: bigint, card: unknown): DiscoveryRecord => ({
  bucket: "v1/mdc",
  key: endpointKey(name, instanceId),
  value: { type: "Model", namespace: name.namespace, component: name.component, endpoint: name.endpoint, instance_id: instanceId, card_json: card },
});

const scope = (name: EndpointName) => ({ kind: "endpoint", endpoint: { namespace: name.namespace, component: name.component, name: name.endpoint } });
const eventKey = (name: EndpointName, topic: string, publisherId: bigint) =>
  [
    ...["namespace", name.namespace, "component", name.component, "endpoint", name.endpoint, "topic", topic].map(escapeSegment),
    hexId(publisherId),
  ].join("/");

/** Where a publisher of a topic can be heard. @param endpoint "tcp://ip:port" */
export const eventChannelRecord = (name: EndpointName, topic: string, publisherId: bigint, endpoint: string): DiscoveryRecord => ({
  bucket: "v1/event_channels",
  key: eventKey(name, topic, publisherId),
  value: { type: "EventChannel", scope: scope(name), topic, instance_id: publisherId, transport: { kind: "Zmq", config: { endpoint } } },
});

/** Binds a publisher of KV events to its worker and to the endpoint that tells the whole state. */
export const eventSourceRecord = (name: EndpointName, topic: string, publisherId: bigint, workerId: bigint, recovery: Instance): DiscoveryRecord => ({
  bucket: "v1/event_sources",
  key: eventKey(name, topic, publisherId),
  value: {
    type: "EventSource",
    scope: scope(name),
    topic,
    publisher_id: publisherId,
    metadata: { kv_state_endpoint: scope(name).endpoint, worker: { worker_id: workerId, dp_rank: 0 }, publisher_id: publisherId, recovery_target: recovery },
  },
});
