import type { LogFilter } from "../util/log-filter.ts";

/** How models come from the hub; variables of huggingface_hub. */
export interface HubEnvironment {
  /** Of downloaded models; absolute. */
  cacheDir: string;
  /** null = as the token file says, if there is one. */
  token: string | null;
  tokenPath: string;
  /** Without a slash at its end. */
  endpoint: string;
  offline: boolean;
  metadataSeconds: number;
  stallSeconds: number;
  noBar: boolean;
}

/** Elements of the KV cache: the first two on the CPU, all but the first on a GPU. */
export type KvCacheDtype = "f32" | "bf16" | "fp8_e4m3" | "fp8_e5m2";

/** What --device asks for. auto = GPUs where any is visible, else the CPU; index null = from the first GPU on. */
export type DeviceRequest = { kind: "auto" } | { kind: "cpu" } | { kind: "cuda"; index: number | null };

/** Engine options as flags give them, shared by both subcommands. Frozen after parsing. */
export interface EngineConfig {
  /** Directory, .gguf file, or a repo of the hub: `org/name[@revision][:file.gguf]`. */
  model: string;
  hub: HubEnvironment;
  /** null = the model's own limit. */
  ctx: number | null;
  maxNumSeqs: number;
  /** (0, 1]; null = the device's default (0.9 on a GPU, 0.5 on the CPU). */
  gpuMemoryUtilization: number | null;
  /** KV pool in tokens; null = from memory. */
  maxTotalTokens: number | null;
  /** Token budget of a step; null = by the speed of the device. */
  chunkedPrefillSize: number | null;
  kvCacheDtype: "auto" | KvCacheDtype;
  device: DeviceRequest;
  /** Tensor-parallel ranks; null = all visible GPUs, or 1 where --device names one or is the CPU. */
  tp: number | null;
  prefixCache: boolean;
  /** Name clients send; null = the model's own. */
  servedModelName: string | null;
  licenseKey: string;
  /** Ceiling of the context length that the licence carries; null = none. */
  licenseMaxCtx: number | null;
}

export interface ServeConfig {
  engine: EngineConfig;
  host: string;
  port: number;
  /** Clients must send the licence key as a bearer token. */
  apiKey: boolean;
}

/** Which log lines are written. */
export interface LogSettings {
  filter: LogFilter;
  /** Directives that choose among spans, of which there are none. */
  ignored: readonly string[];
}

export type DisaggregationMode = "agg" | "prefill" | "decode";

/** Dynamo's own worker options (flags with DYN_* variables). */
export interface WorkerOptions {
  disaggregationMode: DisaggregationMode;
  namespace: string;
  component: string;
  endpoint: string;
  endpointTypes: string[];
  customJinjaTemplate: string | null;
  toolCallParser: string | null;
  reasoningParser: string | null;
  excludeToolsWhenToolChoiceNone: boolean;
  enableRl: boolean;
}

/** Read from the environment only, as Dynamo's runtime does. */
export interface DynamoEnvironment {
  discoveryBackend: "etcd" | "kubernetes" | "file" | "mem";
  /** DYN_FILE_KV, default <tmp>/dynamo_store_kv. */
  fileKv: string;
  etcdEndpoints: string[];
  etcdLeaseTtlSeconds: number;
  etcdUsername: string | null;
  etcdPassword: string | null;
  /** PEM files, or the PEM texts themselves. */
  etcdCa: string | null;
  etcdClientCert: string | null;
  etcdClientKey: string | null;
  natsServer: string | null;
  natsUsername: string | null;
  natsPassword: string | null;
  natsToken: string | null;
  natsNkey: string | null;
  natsCredentialsFile: string | null;
  /** NATS_TLS_*: PEM files. */
  natsTlsCa: string | null;
  natsTlsCert: string | null;
  natsTlsKey: string | null;
  natsTlsInsecure: boolean;
  /** Kubernetes discovery: who this pod is, and how to reach the API server. */
  kubeDiscoveryMode: "pod" | "container";
  podName: string | null;
  podUid: string | null;
  podNamespace: string | null;
  containerName: string | null;
  /** KUBECONFIG as given: paths joined by ":". */
  kubeconfig: string | null;
  kubernetesHost: string | null;
  kubernetesPort: number;
  requestPlane: "tcp" | "nats";
  requestPlaneCodec: "json" | "msgpack";
  eventPlane: "zmq" | "nats";
  /** null = off, 0 = any free port. */
  systemPort: number | null;
  systemHost: string;
  systemHealthPath: string;
  systemLivePath: string;
  /** DYN_TCP_RPC_HOST / _PORT: null = first routable address / any port. */
  tcpRpcHost: string | null;
  tcpRpcPort: number;
  tcpMaxMessageSize: number;
  /** DYN_TCP_TLS_*: PEM files. Listener: certificate, key, and who may sign its clients. */
  tcpTlsCert: string | null;
  tcpTlsKey: string | null;
  tcpTlsClientCa: string | null;
  /** Dialled answers: who may sign the frontend, the name it must bear, and what this side shows. */
  tcpTlsCa: string | null;
  tcpTlsInsecure: boolean;
  tcpTlsServerName: string | null;
  tcpTlsClientCert: string | null;
  tcpTlsClientKey: string | null;
  tcpTlsHandshakeSeconds: number;
  gracePeriodSeconds: number;
  selfHostMetadata: boolean;
  /** The canary of DYN_HEALTH_CHECK_ENABLED. */
  healthCheckEnabled: boolean;
  canaryWaitSeconds: number;
  healthCheckTimeoutSeconds: number;
  /** What the canary asks instead of one token behind the model's first. */
  healthCheckPayload: Readonly<Record<string, unknown>> | null;
  startingHealthStatus: "ready" | "notready";
  /** Endpoints that must be ready for /health to say so; none = all. */
  endpointHealth: readonly string[];
  rlEndpoint: string;
  /** Requests that run at once; null = no limit of Dynamo's own. */
  engineRequestLimit: number | null;
  /** Requests that may wait beside engineRequestLimit running ones. */
  requestQueueLimit: number;
  stableRoutingId: string | null;
  routeToEncoder: boolean;
  loraEnabled: boolean;
  otelExport: boolean;
  log: LogSettings;
  podIp: string | null;
  /** How long a prefill worker keeps a copy of KV that nobody fetches. */
  kvHoldSeconds: number;
  /** Secret of prefill and decode workers; null = transfers are neither authenticated nor encrypted. */
  kvKey: string | null;
  namespaceSuffix: string | null;
}

export interface DynamoConfig {
  engine: EngineConfig;
  worker: WorkerOptions;
  environment: DynamoEnvironment;
}
