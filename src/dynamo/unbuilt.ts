import { isIP } from "node:net";
import type { DynamoConfig } from "../config/engine-config.ts";
import { UsageError } from "../config/flags.ts";

/**
 * Choices that are valid in Dynamo but not served by this build, and values that cannot work: refused before anything starts.
 * @throws UsageError naming the flag or variable, its value and what can be chosen instead
 */
export function refuseUnbuilt({ environment, worker }: DynamoConfig): void {
  const refuse = (name: string, value: string, instead: string): never => {
    throw new UsageError(`${name} = "${value}" is not available in this version: ${instead}`);
  };
  if (environment.discoveryBackend === "etcd" || environment.discoveryBackend === "kubernetes")
    refuse("DYN_DISCOVERY_BACKEND", environment.discoveryBackend, "set DYN_DISCOVERY_BACKEND=file and DYN_FILE_KV to a directory shared with the frontend");
  if (environment.requestPlane !== "tcp") refuse("DYN_REQUEST_PLANE", environment.requestPlane, "use tcp");
  if (environment.eventPlane !== "zmq") refuse("DYN_EVENT_PLANE", environment.eventPlane, "use zmq");
  if (worker.disaggregationMode !== "agg") refuse("--disaggregation-mode / DYN_DISAGGREGATION_MODE", worker.disaggregationMode, "use agg");
  if (worker.enableRl) refuse("--enable-rl / DYN_ENABLE_RL", "true", "leave it off");
  if (environment.tcpRpcHost !== null && isIP(environment.tcpRpcHost.replace(/^\[(.*)\]$/, "$1")) === 0)
    throw new UsageError(`DYN_TCP_RPC_HOST: expected an IP address, got "${environment.tcpRpcHost}"; frontends do not resolve names`);
}
