import { createServer, isIP } from "node:net";
import { networkInterfaces } from "node:os";
import type { DynamoEnvironment, WorkerOptions } from "../config/engine-config.ts";
import { defaultRouteAddress } from "../dynamo/disaggregation/address.ts";
import { NatsLink } from "../dynamo/nats/link.ts";
import { natsOptions } from "../dynamo/nats/options.ts";
import { localAddress } from "../dynamo/request-plane/local-address.ts";
import { tcpTls } from "../dynamo/request-plane/tls.ts";
import { fail, type Findings, skip, warn } from "./findings.ts";

const CONNECT_MS = 3_000;
const bare = (address: string): string => address.replace(/^\[(.*)\]$/, "$1");

/** @throws Error with the code of listen(2) when an address cannot be listened on */
async function tryListen(host: string, port: number): Promise<void> {
  const server = createServer();
  await new Promise<void>((resolve, reject) => {
    server.once("error", reject);
    server.listen({ host, port, exclusive: true }, resolve);
  });
  await new Promise<void>((resolve) => server.close(() => resolve()));
}

/** @param source the flags or variables that make the address */
async function listens(source: string, host: string, port: number): Promise<string> {
  try {
    await tryListen(bare(host), port);
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException;
    if (code === "EADDRINUSE") throw fail(`${source}: port ${port} on ${host} is in use`, "stop the program that holds it, or choose another port");
    if (code === "EACCES") throw fail(`${source}: this user may not listen on port ${port}`, "choose a port above 1023");
    if (code === "EADDRNOTAVAIL") throw fail(`${source}: ${host} is no address of this machine`, "give an address that one of its interfaces has");
    throw fail(`${source}: cannot listen on ${host} port ${port}: ${message}`);
  }
  return port === 0 ? `${host}, any free port` : `${host} port ${port} is free`;
}

export async function serveChecks(findings: Findings, { host, port }: { host: string; port: number }): Promise<void> {
  await findings.check("http-port", () => listens("--host, --port", host, port));
}

export async function workerNetworkChecks(findings: Findings, environment: DynamoEnvironment, worker: WorkerOptions): Promise<void> {
  const addressed = await findings.check("pod-ip", () => addresses(environment, worker));
  const host = environment.tcpRpcHost ?? environment.podIp ?? localAddress();
  if (addressed) await findings.check("request-port", () => listens(`${environment.tcpRpcHost === null && environment.podIp !== null ? "POD_IP" : "DYN_TCP_RPC_HOST"}, DYN_TCP_RPC_PORT`, host, environment.tcpRpcPort));
  else findings.skip("its address is not one of this machine", "request-port");
  await findings.check("request-tls", () => {
    const { listener, dial } = tcpTls(environment);
    if (listener === null && dial === null) throw skip("no DYN_TCP_TLS_* variable is set");
    return `requests ${listener === null ? "in the clear" : "over TLS"}, answers ${dial === null ? "in the clear" : "over TLS"}`;
  });
  await findings.check("system-port", () => systemPort(environment));
  await findings.check("nats", () => nats(environment));
}

function addresses({ podIp, tcpRpcHost, discoveryBackend }: DynamoEnvironment, { disaggregationMode }: WorkerOptions): string {
  const own = Object.values(networkInterfaces()).flatMap((list) => list ?? []);
  const parts: string[] = [];
  for (const [name, value] of [["POD_IP", podIp], ["DYN_TCP_RPC_HOST", tcpRpcHost]] as const) {
    if (value === null) continue;
    const address = bare(value);
    if (isIP(address) === 0) throw fail(`${name}: expected an IP address, got "${value}"; other processes do not resolve names`, "in Kubernetes take it from the pod's status: fieldRef status.podIP");
    const wildcard = address === "0.0.0.0" || address === "::";
    if (wildcard && name === "POD_IP") throw fail(`POD_IP: "${value}" is no address that another process can reach`, "give the address of this pod");
    if (!wildcard && !own.some((item) => item.address === address) && !address.startsWith("127."))
      throw fail(`${name}: no interface of this machine has ${address}; it has ${[...new Set(own.filter((item) => !item.internal).map((item) => item.address))].join(", ") || "none but loopback"}`, "in Kubernetes take it from the pod's status: fieldRef status.podIP");
    parts.push(`${name} ${address}`);
  }
  const told = podIp ?? (disaggregationMode === "prefill" ? defaultRouteAddress() : (tcpRpcHost ?? localAddress()));
  if (/^(127\.|::1$)/.test(bare(told)) && (discoveryBackend === "etcd" || discoveryBackend === "kubernetes"))
    throw warn(`other processes are told ${told}, which they reach on this machine alone`, "set POD_IP to an address that they can reach");
  return parts.length > 0 ? parts.join(", ") : `neither is set; other processes are told ${told}`;
}

function systemPort({ systemPort: port, systemHost: host, tcpRpcPort, discoveryBackend }: DynamoEnvironment): Promise<string> {
  if (port === null) {
    if (discoveryBackend === "kubernetes") throw warn("DYN_SYSTEM_PORT is not set: there is no /health and no /metrics, and probes of the pod fail", "set DYN_SYSTEM_PORT=9090, as Dynamo's operator does");
    throw skip("DYN_SYSTEM_PORT is not set: no /health and no /metrics");
  }
  if (port !== 0 && port === tcpRpcPort) throw fail(`DYN_SYSTEM_PORT and DYN_TCP_RPC_PORT are both ${port}`, "choose another port for one of them");
  return listens("DYN_SYSTEM_HOST, DYN_SYSTEM_PORT", host, port);
}

async function nats(environment: DynamoEnvironment): Promise<string> {
  const planes = [...(environment.requestPlane === "nats" ? ["requests"] : []), ...(environment.eventPlane === "nats" ? ["events"] : [])];
  if (planes.length === 0) throw skip("neither DYN_REQUEST_PLANE nor DYN_EVENT_PLANE is nats");
  const options = natsOptions(environment);
  const link = await NatsLink.open(options, CONNECT_MS);
  const { maxPayload } = link;
  await link.close();
  return `${options.server} answers (${planes.join(" and ")}), payloads up to ${maxPayload} bytes`;
}
