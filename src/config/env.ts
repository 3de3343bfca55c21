import { tmpdir } from "node:os";
import { join } from "node:path";
import type { DynamoEnvironment } from "./engine-config.ts";
import { parseBoolean, UsageError } from "./flags.ts";

type Env = Record<string, string | undefined>;

/** One variable: how to read it and what help says. An empty value counts as unset; a bad one is an error that names the variable. */
interface Variable<T> {
  name: string;
  help: string;
  shown: string;
  read(text: string | undefined): T;
}

function variable<T>(name: string, shown: string, help: string, fallback: T, parse: (text: string, fail: (expected: string) => UsageError) => T): Variable<T> {
  return {
    name,
    help,
    shown,
    read: (text) => (text === undefined || text === "" ? fallback : parse(text, (expected) => new UsageError(`${name}: expected ${expected}, got "${text}"`))),
  };
}
const text = <T extends string | null>(name: string, shown: string, help: string, fallback: T) => variable<string | T>(name, shown, help, fallback, (value) => value);
const choice = <T extends string>(name: string, help: string, of: readonly T[], fallback: T) =>
  variable<T>(name, fallback, `${of.join(" | ")}; ${help}`, fallback, (value, fail) => {
    const found = of.find((item) => item === value.toLowerCase());
    if (!found) throw fail(`one of ${of.join(", ")}`);
    return found;
  });
const integer = <T extends number | null>(name: string, shown: string, help: string, fallback: T, min: number, max: number) =>
  variable<number | T>(name, shown, help, fallback, (value, fail) => {
    const n = /^-?\d+$/.test(value.trim()) ? Number(value) : NaN;
    if (!(n >= min && n <= max)) throw fail(`an integer from ${min} to ${max}`);
    return n;
  });
const boolean = (name: string, help: string, fallback: boolean) =>
  variable<boolean>(name, String(fallback), help, fallback, (value, fail) => {
    const b = parseBoolean(value);
    if (b === null) throw fail("true or false");
    return b;
  });

const GIB = 1 << 30;

/** What Dynamo's runtime reads directly; the table is parsing, help and documentation at once. */
const DYNAMO_VARIABLES = {
  discoveryBackend: choice("DYN_DISCOVERY_BACKEND", "where workers and frontend find each other", ["etcd", "kubernetes", "file", "mem"] as const, "etcd"),
  fileKv: variable<string>("DYN_FILE_KV", "<tmp>/dynamo_store_kv", "directory of file discovery", "", (value) => value),
  etcdEndpoints: variable<string[]>("ETCD_ENDPOINTS", "http://localhost:2379", "comma-separated etcd addresses", ["http://localhost:2379"], (value, fail) => {
    const items = value.split(",").map((item) => item.trim()).filter(Boolean);
    if (items.length === 0 || items.some((item) => !URL.canParse(item))) throw fail("a comma-separated list of URLs");
    return items;
  }),
  natsServer: text("NATS_SERVER", "none", "address of nats-server, when used", null),
  requestPlane: choice("DYN_REQUEST_PLANE", "how requests travel", ["tcp", "nats"] as const, "tcp"),
  requestPlaneCodec: choice("DYN_REQUEST_PLANE_CODEC", "encoding of requests and answers", ["json", "msgpack"] as const, "json"),
  eventPlane: choice("DYN_EVENT_PLANE", "how KV events travel", ["zmq", "nats"] as const, "zmq"),
  systemPort: integer("DYN_SYSTEM_PORT", "off", "port of /live, /health and /metrics; 0 = any free port, -1 = off", null, -1, 65535),
  systemHost: text("DYN_SYSTEM_HOST", "0.0.0.0", "address the system port binds", "0.0.0.0"),
  systemHealthPath: text("DYN_SYSTEM_HEALTH_PATH", "/health", "path of the health route", "/health"),
  systemLivePath: text("DYN_SYSTEM_LIVE_PATH", "/live", "path of the liveness route", "/live"),
  tcpRpcHost: text("DYN_TCP_RPC_HOST", "first routable address", "address the request plane binds and advertises", null),
  tcpRpcPort: integer("DYN_TCP_RPC_PORT", "any", "port of the request plane", 0, 0, 65535),
  tcpMaxMessageSize: integer("DYN_TCP_MAX_MESSAGE_SIZE", "33554432", "largest request frame in bytes", 33554432, 1024, GIB),
  gracePeriodSeconds: integer("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "5", "seconds between leaving discovery and draining", 5, -1, 3600),
  selfHostMetadata: boolean("DYN_SELF_HOST_METADATA", "serve tokenizer and config files on the system port", true),
  podIp: text("POD_IP", "default route's address", "address a prefill worker gives decode workers", null),
  namespaceSuffix: text("DYN_NAMESPACE_WORKER_SUFFIX", "none", "appended to the namespace as -SUFFIX", null),
} satisfies Record<keyof DynamoEnvironment, Variable<unknown>>;

/** @throws UsageError naming the variable, its value and what was expected */
export function readDynamoEnvironment(env: Env): DynamoEnvironment {
  const read = Object.fromEntries(Object.entries(DYNAMO_VARIABLES).map(([key, variable]) => [key, variable.read(env[variable.name])])) as unknown as DynamoEnvironment;
  return Object.freeze({
    ...read,
    fileKv: read.fileKv || join(tmpdir(), "dynamo_store_kv"),
    systemPort: read.systemPort === -1 ? null : read.systemPort,
    gracePeriodSeconds: Math.max(0, read.gracePeriodSeconds),
  });
}

export function dynamoEnvironmentHelp(): string {
  const width = Math.max(...Object.values(DYNAMO_VARIABLES).map((v) => v.name.length)) + 4;
  return Object.values(DYNAMO_VARIABLES).map((v) => `  ${v.name.padEnd(width - 2)}${v.help} [default ${v.shown}]`).join("\n");
}
