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

/** Where an instance can be called: "ip:port/path" of its listener, or its NATS subject. */
export type Transport = { tcp: string } | { nats_tcp: string };

/** Where a publisher of events can be heard. */
export type EventTransport = { kind: "Zmq"; config: { endpoint: string } } | { kind: "Nats"; config: { subject_prefix: string } };

export interface Instance {
  component: string;
  endpoint: string;
  namespace: string;
  instance_id: bigint;
  transport: Transport;
  device_type: "cpu" | "cuda";
  request_plane_codec: "json" | "msgpack";
}

export function instance(name: EndpointName, instanceId: bigint, transport: Transport, device: "cpu" | "cuda", codec: "json" | "msgpack"): Instance {
  return { component: name.component, endpoint: name.endpoint, namespace: name.namespace, instance_id: instanceId, transport, device_type: device, request_plane_codec: codec };
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
/** Segments of an endpoint in event subjects and keys, escaped. */
export const endpointSegments = (name: EndpointName): string[] => ["namespace", name.namespace, "component", name.component, "endpoint", name.endpoint].map(escapeSegment);
const eventKey = (name: EndpointName, topic: string, publisherId: bigint) =>
  [...endpointSegments(name), "topic", escapeSegment(topic), hexId(publisherId)].join("/");

/** Where a publisher of a topic can be heard. */
export const eventChannelRecord = (name: EndpointName, topic: string, publisherId: bigint, transport: EventTransport): DiscoveryRecord => ({
  bucket: "v1/event_channels",
  key: eventKey(name, topic, publisherId),
  value: { type: "EventChannel", scope: scope(name), topic, instance_id: publisherId, transport },
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
