import { tmpdir } from "node:os";
import { join } from "node:path";
import type { DynamoEnvironment, LogSettings } from "./engine-config.ts";
import { DEFAULT_FILTER, parseLogFilter } from "../util/log-filter.ts";
import { UsageError } from "./flags.ts";
import { readPayload } from "./health-payload.ts";
import { boolean, choice, type Env, integer, json, path, readVariables, text, variable, type Variable, variablesHelp } from "./variable.ts";

const GIB = 1 << 30;

/** What Dynamo's runtime reads directly; the table is parsing, help and documentation at once. */
export const DYNAMO_VARIABLES = {
  discoveryBackend: choice("DYN_DISCOVERY_BACKEND", "where workers and frontend find each other", ["etcd", "kubernetes", "file", "mem"] as const, "etcd"),
  fileKv: variable<string>("DYN_FILE_KV", "<tmp>/dynamo_store_kv", "directory of file discovery", "", (value) => value),
  etcdEndpoints: variable<string[]>("ETCD_ENDPOINTS", "http://localhost:2379", "comma-separated etcd addresses", ["http://localhost:2379"], (value, fail) => {
    const items = value.split(",").map((item) => item.trim()).filter(Boolean);
    if (items.length === 0) throw fail("a comma-separated list of http://host:port or https://host:port");
    return items;
  }),
  etcdLeaseTtlSeconds: integer("ETCD_LEASE_TTL", "10", "seconds after which etcd forgets a worker that died", 10, 1, 86400),
  etcdUsername: text("ETCD_AUTH_USERNAME", "none", "etcd user, together with ETCD_AUTH_PASSWORD", null),
  etcdPassword: text("ETCD_AUTH_PASSWORD", "none", "its password", null),
  etcdCa: text("ETCD_AUTH_CA", "the system's", "PEM file of who may sign etcd's certificate", null),
  etcdClientCert: text("ETCD_AUTH_CLIENT_CERT", "none", "PEM file of the certificate shown to etcd", null),
  etcdClientKey: text("ETCD_AUTH_CLIENT_KEY", "none", "PEM file of its key", null),
  natsServer: text("NATS_SERVER", "nats://localhost:4222", "address of nats-server, when a plane uses it; tls:// requires TLS", null),
  natsUsername: text("NATS_AUTH_USERNAME", "user", "with NATS_AUTH_PASSWORD: log in by name", null),
  natsPassword: text("NATS_AUTH_PASSWORD", "user", "password for NATS_AUTH_USERNAME", null),
  natsToken: text("NATS_AUTH_TOKEN", "none", "log in with a token", null),
  natsNkey: text("NATS_AUTH_NKEY", "none", "log in with an nkey seed", null),
  natsCredentialsFile: text("NATS_AUTH_CREDENTIALS_FILE", "none", "log in with a credentials file", null),
  natsTlsCa: text("NATS_TLS_CA_CERT_PATH", "system roots", "PEM file of who may sign nats-server's certificate", null),
  natsTlsCert: text("NATS_TLS_CLIENT_CERT_PATH", "none", "PEM certificate shown to nats-server", null),
  natsTlsKey: text("NATS_TLS_CLIENT_KEY_PATH", "none", "PEM key of that certificate", null),
  natsTlsInsecure: boolean("NATS_TLS_INSECURE", "do not verify nats-server's certificate", false),
  kubeDiscoveryMode: choice("DYN_KUBE_DISCOVERY_MODE", "with kubernetes discovery: one identity per pod, or one per container", ["pod", "container"] as const, "pod"),
  podName: text("POD_NAME", "/etc/podinfo/pod_name", "metadata.name of this pod, for kubernetes discovery", null),
  podUid: text("POD_UID", "/etc/podinfo/pod_uid", "metadata.uid of this pod, for kubernetes discovery", null),
  podNamespace: text("POD_NAMESPACE", "/etc/podinfo/pod_namespace, else default", "metadata.namespace of this pod, for kubernetes discovery", null),
  containerName: text("CONTAINER_NAME", "none", "name of this container, with DYN_KUBE_DISCOVERY_MODE=container", null),
  kubeconfig: text("KUBECONFIG", "~/.kube/config, else the service account", "files that say how to reach the API server, separated by colons", null),
  kubernetesHost: text("KUBERNETES_SERVICE_HOST", "set in every pod", "address of the API server, without a kubeconfig", null),
  kubernetesPort: integer("KUBERNETES_SERVICE_PORT", "443", "its port", 443, 1, 65535),
  requestPlane: choice("DYN_REQUEST_PLANE", "how requests travel", ["tcp", "nats"] as const, "tcp"),
  requestPlaneCodec: choice("DYN_REQUEST_PLANE_CODEC", "encoding of requests and answers", ["json", "msgpack"] as const, "json"),
  eventPlane: choice("DYN_EVENT_PLANE", "how KV events travel", ["zmq", "nats"] as const, "zmq"),
  systemPort: integer("DYN_SYSTEM_PORT", "off", "port of /live, /health and /metrics; 0 = any free port, -1 = off", null, -1, 65535),
  systemHost: text("DYN_SYSTEM_HOST", "0.0.0.0", "address the system port binds", "0.0.0.0"),
  systemHealthPath: path("DYN_SYSTEM_HEALTH_PATH", "path of the health route", "/health"),
  systemLivePath: path("DYN_SYSTEM_LIVE_PATH", "path of the liveness route", "/live"),
  startingHealthStatus: choice("DYN_SYSTEM_STARTING_HEALTH_STATUS", "accepted without effect: /health answers 503 until the model is loaded", ["ready", "notready"] as const, "notready"),
  endpointHealth: variable<readonly string[]>("DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS", "[]", "JSON list of endpoints that must be ready for /health to say so; empty = all", [], (value, fail) => {
    const list = json(value);
    if (!Array.isArray(list) || list.some((item) => typeof item !== "string")) throw fail('a JSON list of endpoint names such as ["generate"]');
    return list as string[];
  }),
  healthCheckEnabled: boolean("DYN_HEALTH_CHECK_ENABLED", "canary: an idle worker asks itself for a token, and /health tells whether it came", false),
  canaryWaitSeconds: integer("DYN_CANARY_WAIT_TIME", "10", "seconds without an answer before the canary asks", 10, 1, 86_400),
  healthCheckTimeoutSeconds: integer("DYN_HEALTH_CHECK_REQUEST_TIMEOUT", "3", "seconds the canary waits for its token", 3, 1, 3600),
  healthCheckPayload: variable("DYN_HEALTH_CHECK_PAYLOAD", "one token", "what the canary asks: a JSON object, or @FILE with one", null, readPayload),
  tcpRpcHost: text("DYN_TCP_RPC_HOST", "POD_IP, else first routable address", "address the request plane binds and advertises", null),
  tcpRpcPort: integer("DYN_TCP_RPC_PORT", "any", "port of the request plane", 0, 0, 65535),
  tcpMaxMessageSize: integer("DYN_TCP_MAX_MESSAGE_SIZE", "33554432", "largest request frame in bytes", 33554432, 1024, GIB),
  tcpTlsCert: text("DYN_TCP_TLS_CERT_PATH", "none", "PEM certificate of the request plane's listener; with DYN_TCP_TLS_KEY_PATH it speaks TLS", null),
  tcpTlsKey: text("DYN_TCP_TLS_KEY_PATH", "none", "PEM key of that certificate", null),
  tcpTlsClientCa: text("DYN_TCP_TLS_CLIENT_CA_CERT_PATH", "none", "PEM file of who may sign frontends' certificates, which are required then", null),
  tcpTlsCa: text("DYN_TCP_TLS_CA_CERT_PATH", "none", "PEM file of who may sign the frontend's certificate; answers travel over TLS then", null),
  tcpTlsInsecure: boolean("DYN_TCP_TLS_INSECURE", "answers travel over TLS without verifying the frontend's certificate", false),
  tcpTlsServerName: text("DYN_TCP_TLS_SERVER_NAME", "its address", "name that the frontend's certificate must bear", null),
  tcpTlsClientCert: text("DYN_TCP_TLS_CLIENT_CERT_PATH", "none", "PEM certificate shown to frontends", null),
  tcpTlsClientKey: text("DYN_TCP_TLS_CLIENT_KEY_PATH", "none", "PEM key of that certificate", null),
  tcpTlsHandshakeSeconds: integer("DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS", "3", "seconds a TLS handshake may take", 3, 1, 3600),
  gracePeriodSeconds: integer("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "5", "seconds between leaving discovery and draining", 5, -1, 3600),
  engineRequestLimit: integer("DYN_ENGINE_REQUEST_LIMIT", "none", "requests that may run at once; beyond it and the queue limit requests are refused as overloaded", null, 1, 1_000_000),
  requestQueueLimit: integer("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", "16", "requests that may wait beside DYN_ENGINE_REQUEST_LIMIT running ones", 16, 1, 1_000_000),
  rlEndpoint: variable<string>("DYN_RL_ENDPOINT", "rl", "endpoint of --enable-rl", "rl", (value, fail) => {
    if (!/^[A-Za-z0-9_-]{1,64}$/.test(value.trim())) throw fail("up to 64 letters, digits, - and _");
    return value.trim();
  }),
  stableRoutingId: variable<string | null>("DYN_STABLE_ROUTING_ID", "none", "identity that routers keep over restarts of this worker", null, (value) => value.trim() || null),
  routeToEncoder: boolean("DYN_ROUTE_TO_ENCODER", "refused when true: there is no separate encoder", false),
  loraEnabled: boolean("DYN_LORA_ENABLED", "refused when true: there are no LoRA adapters", false),
  otelExport: boolean("OTEL_EXPORT_ENABLED", "has no effect: traces are not exported, but trace ids are in the log lines", false),
  log: variable<LogSettings>("DYN_LOG", "info", "log lines written: LEVEL, TARGET=LEVEL, separated by commas", { filter: DEFAULT_FILTER, ignored: [] }, (value, fail) => {
    const parsed = parseLogFilter(value);
    if ("bad" in parsed) throw fail(`off, error, warn, info, debug, trace or TARGET=LEVEL, separated by commas (not "${parsed.bad}")`);
    return parsed;
  }),
  selfHostMetadata: boolean("DYN_SELF_HOST_METADATA", "serve tokenizer and config files on the system port", true),
  podIp: text("POD_IP", "default route's address", "address a prefill worker gives decode workers; listeners bind it where DYN_TCP_RPC_HOST is not set", null),
  kvHoldSeconds: variable<number>("LAYERSCALE_KV_HOLD_SECONDS", "60", "seconds a prefill worker keeps KV that no decode worker fetches; for tests", 60, (value, fail) => {
    const seconds = value.trim() === "" ? NaN : Number(value);
    if (!(seconds >= 0.1 && seconds <= 3600)) throw fail("a number from 0.1 to 3600");
    return seconds;
  }),
  kvKey: variable<string | null>("LAYERSCALE_KV_KEY", "none", "secret of prefill and decode workers, 16 to 64 bytes: KV travels authenticated and encrypted", null, (value) => {
    const bytes = Buffer.byteLength(value);
    // The value is a secret, so the message does not show it.
    if (bytes < 16 || bytes > 64) throw new UsageError(`LAYERSCALE_KV_KEY: expected 16 to 64 bytes, got ${bytes}`);
    return value;
  }),
  namespaceSuffix: text("DYN_NAMESPACE_WORKER_SUFFIX", "none", "appended to the namespace as -SUFFIX", null),
} satisfies Record<keyof DynamoEnvironment, Variable<unknown>>;

/** @throws UsageError naming the variable, its value and what was expected */
export function readDynamoEnvironment(env: Env): DynamoEnvironment {
  const read = readVariables<DynamoEnvironment>(DYNAMO_VARIABLES, env);
  return Object.freeze({
    ...read,
    fileKv: read.fileKv || join(tmpdir(), "dynamo_store_kv"),
    systemPort: read.systemPort === -1 ? null : read.systemPort,
    gracePeriodSeconds: Math.max(0, read.gracePeriodSeconds),
  });
}

export const dynamoEnvironmentHelp = (): string => variablesHelp(DYNAMO_VARIABLES);
