/** Engine options as flags give them, shared by both subcommands. Frozen after parsing. */
export interface EngineConfig {
  /** Directory or .gguf file. */
  model: string;
  /** null = the model's own limit. */
  ctx: number | null;
  maxNumSeqs: number;
  /** (0, 1]; null = the device's default (0.9 on a GPU, 0.5 on the CPU). */
  gpuMemoryUtilization: number | null;
  /** KV pool in tokens; null = from memory. */
  maxTotalTokens: number | null;
  /** Token budget of a step; null = by the speed of the device. */
  chunkedPrefillSize: number | null;
  kvCacheDtype: "auto" | "f32" | "bf16";
  device: "cpu";
  tp: number;
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
  natsServer: string | null;
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
  gracePeriodSeconds: number;
  selfHostMetadata: boolean;
  podIp: string | null;
  namespaceSuffix: string | null;
}

export interface DynamoConfig {
  engine: EngineConfig;
  worker: WorkerOptions;
  environment: DynamoEnvironment;
}
