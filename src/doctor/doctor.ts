import type { DynamoConfig, EngineConfig, ServeConfig } from "../config/engine-config.ts";
import { refuseUnbuilt } from "../dynamo/unbuilt.ts";
import { type License, LicenseError } from "../license/license.ts";
import { setLogFilter } from "../telemetry/log.ts";
import { discoveryChecks } from "./discovery.ts";
import { Findings, warn } from "./findings.ts";
import { machineChecks } from "./machine.ts";
import { modelChecks } from "./model.ts";
import { serveChecks, workerNetworkChecks } from "./network.ts";
import { parserChecks } from "./parsers.ts";

export interface DoctorInput {
  license: License | LicenseError;
  config: { serve: ServeConfig } | { dynamo: DynamoConfig };
  /** --model was given. */
  modelGiven: boolean;
}

/** Days before the end of a licence in which it is worth a word. */
const NOTICE_DAYS = 14;
const DAY_MS = 86_400_000;

/** Looks at everything that a start with this configuration needs, before anything is loaded. Changes nothing. */
export async function examine({ license, config, modelGiven }: DoctorInput, now = new Date()): Promise<Findings> {
  // What the parts log while they are asked is said by the findings.
  setLogFilter({ fallback: "off", targets: new Map() });
  const findings = new Findings();
  await findings.check("config", () => {
    // Addresses have a check of their own.
    if ("dynamo" in config) refuseUnbuilt({ ...config.dynamo, environment: { ...config.dynamo.environment, podIp: null, tcpRpcHost: null } });
    return "flags and variables can be read";
  });
  await findings.check("license", () => licensed(license, now));
  const dynamo = "dynamo" in config ? config.dynamo : null;
  const engine: EngineConfig = "dynamo" in config ? config.dynamo.engine : config.serve.engine;
  const machine = await machineChecks(findings, engine);
  await modelChecks(findings, { given: modelGiven, engine, worker: dynamo?.worker ?? null }, machine);
  if ("serve" in config) {
    await serveChecks(findings, config.serve);
    return findings.inOrder();
  }
  const { worker, environment } = config.dynamo;
  await parserChecks(findings, worker);
  await workerNetworkChecks(findings, environment, worker);
  await discoveryChecks(findings, environment);
  return findings.inOrder();
}

function licensed(license: License | LicenseError, now: Date): string {
  if (license instanceof LicenseError) throw license;
  const { id, tier, expires, maxCtx } = license;
  const text = `${id} (${tier})${maxCtx === null ? "" : `, contexts up to ${maxCtx}`}`;
  if (expires === null) return `${text}, without a last day`;
  const days = Math.floor((Date.parse(`${expires}T00:00:00Z`) - now.getTime()) / DAY_MS) + 1;
  if (days <= NOTICE_DAYS) throw warn(`${text}, ends on ${expires}: ${days} days left`, "renew it");
  return `${text}, until ${expires}`;
}
