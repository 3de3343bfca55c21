import { isIP } from "node:net";
import type { DynamoConfig } from "../config/engine-config.ts";
import { UsageError } from "../config/flags.ts";
import { isGroupAddress } from "./request-plane/local-address.ts";
import { parseRequest } from "./protocol/preprocessed-request.ts";

/**
 * Choices that are valid in Dynamo but not served by this build, and values that cannot work: refused before anything starts.
 * @throws UsageError naming the flag or variable, its value and what can be chosen instead
 */
export function refuseUnbuilt({ environment }: DynamoConfig): void {
  const refuse = (name: string, value: string, instead: string): never => {
    throw new UsageError(`${name} = "${value}" is not available in this version: ${instead}`);
  };
  if (environment.routeToEncoder) refuse("DYN_ROUTE_TO_ENCODER", "true", "LayerScale has no separate encoder; leave it off");
  if (environment.loraEnabled) refuse("DYN_LORA_ENABLED", "true", "there are no LoRA adapters; leave it off");
  if (environment.healthCheckPayload !== null) checkPayload(environment.healthCheckPayload);
  for (const [variable, address] of [["DYN_TCP_RPC_HOST", environment.tcpRpcHost], ["POD_IP", environment.podIp]] as const) {
    const bare = address?.replace(/^\[(.*)\]$/, "$1") ?? null;
    if (bare === null) continue;
    if (isIP(bare) === 0) throw new UsageError(`${variable}: expected an IP address, got "${address}"; frontends do not resolve names`);
    if (isGroupAddress(bare)) throw new UsageError(`${variable}: expected the address of one host, got "${address}", which names a group`);
  }
}

/** A canary that is always refused would keep the worker out of service for ever. */
function checkPayload(payload: Readonly<Record<string, unknown>>): void {
  try {
    parseRequest(payload);
  } catch (error) {
    throw new UsageError(`DYN_HEALTH_CHECK_PAYLOAD: not a request that this worker takes: ${(error as Error).message}`);
  }
}
