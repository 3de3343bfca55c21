import { isIP } from "node:net";
import type { ServeConfig } from "../config/engine-config.ts";
import { flags, helpText, parseFlags, UsageError } from "../config/flags.ts";
import { hubEnvironmentHelp } from "../config/hub-env.ts";
import { processEnvironmentHelp } from "../config/process-env.ts";
import type { License } from "../license/license.ts";
import { engineConfig, engineFlags } from "./engine-flags.ts";

export const serverFlags = flags({
  host: { kind: "string", metavar: "ADDRESS", default: "127.0.0.1", env: "LAYERSCALE_HOST", help: "Address to listen on" },
  port: { kind: "int", default: 8080, min: 0, max: 65_535, env: "LAYERSCALE_PORT", help: "Port to listen on; 0 = any free port" },
  apiKey: { kind: "switch", help: "Ask clients for the licence key as bearer token or x-api-key" },
});

type Env = Record<string, string | undefined>;

/** A host name as resolvers take it; digits and dots alone are an address, or nothing. */
const HOST_NAME = /^(?![0-9.]+$)[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\.?$/;

function checkHost(host: string): string {
  const bare = host.replace(/^\[(.*)\]$/, "$1");
  if (isIP(bare) === 0 && !HOST_NAME.test(host)) throw new UsageError(`--host / LAYERSCALE_HOST: expected an IP address or a name of this machine, got "${host}"`);
  return bare;
}

/** @throws UsageError */
export function serveConfig(argv: readonly string[], env: Env, license: License, licenseKey: string): ServeConfig {
  const values = parseFlags({ ...engineFlags, ...serverFlags }, argv, env);
  return Object.freeze({ engine: engineConfig(values, env, license, licenseKey), host: checkHost(values.host), port: values.port, apiKey: values.apiKey });
}

export const serveHelp = (): string => `layerscale serve: an HTTP server with OpenAI's API over one model

Usage: layerscale [serve] --model MODEL [options]

Engine options
${helpText(engineFlags)}

Server options
${helpText(serverFlags)}

Environment of models from the hub
${hubEnvironmentHelp()}

Environment of the process
${processEnvironmentHelp()}

Routes: /health /healthz /metrics /v1/models /v1/chat/completions /v1/completions`;
