import type { DynamoConfig, DynamoEnvironment } from "../config/engine-config.ts";
import { dynamoEnvironmentHelp, readDynamoEnvironment } from "../config/env.ts";
import { flags, helpText, parseFlags, UsageError } from "../config/flags.ts";
import { hubEnvironmentHelp } from "../config/hub-env.ts";
import { processEnvironmentHelp } from "../config/process-env.ts";
import type { License } from "../license/license.ts";
import { engineConfig, engineFlags } from "./engine-flags.ts";

/** Dynamo's own worker options: names, variables and defaults are Dynamo 1.5.0's. */
export const workerFlags = flags({
  disaggregationMode: { kind: "string", metavar: "MODE", default: "agg", env: "DYN_DISAGGREGATION_MODE", help: "Role of this worker: agg | prefill | decode; encode is refused, there is no separate encoder" },
  namespace: { kind: "string", metavar: "NS", default: "dynamo", env: "DYN_NAMESPACE", help: "Dynamo namespace" },
  component: { kind: "string", metavar: "NAME", default: "backend", env: "DYN_COMPONENT", help: "Component name within the namespace" },
  endpoint: { kind: "string", metavar: "NAME", default: "generate", env: "DYN_ENDPOINT", help: "Endpoint name" },
  endpointTypes: { kind: "list", of: ["chat", "completions"], default: ["chat", "completions"], env: "DYN_ENDPOINT_TYPES", help: "Frontend routes that serve this model" },
  customJinjaTemplate: { kind: "string", metavar: "PATH", default: null, env: "DYN_CUSTOM_JINJA_TEMPLATE", help: "Chat template to use instead of the model's" },
  dynToolCallParser: { kind: "string", metavar: "NAME", default: null, env: "DYN_TOOL_CALL_PARSER", help: "The frontend's tool-call parser for this model" },
  dynReasoningParser: { kind: "string", metavar: "NAME", default: null, env: "DYN_REASONING_PARSER", help: "The frontend's reasoning parser for this model" },
  excludeToolsWhenToolChoiceNone: { kind: "bool", default: true, env: "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", help: "Leave tools out of the template when tool_choice is none" },
  enableRl: { kind: "switch", env: "DYN_ENABLE_RL", help: "Dynamo's reinforcement-learning control endpoint" },
  apiKey: { kind: "switch", help: "Accepted without effect: the worker serves no HTTP API" },
});

/** Names that end up in discovery keys and request-plane paths. */
const NAME = /^[a-z0-9_-]{1,64}$/;

type Env = Record<string, string | undefined>;

/** @throws UsageError */
export function dynamoConfig(argv: readonly string[], env: Env, license: License, licenseKey: string): DynamoConfig {
  const values = parseFlags({ ...engineFlags, ...workerFlags }, argv, env);
  const mode = values.disaggregationMode.toLowerCase();
  if (mode === "encode")
    throw new UsageError('--disaggregation-mode / DYN_DISAGGREGATION_MODE: "encode" is refused, because LayerScale has no separate encoder; expected agg, prefill or decode');
  if (mode !== "agg" && mode !== "aggregated" && mode !== "prefill" && mode !== "decode")
    throw new UsageError(`--disaggregation-mode / DYN_DISAGGREGATION_MODE: expected agg, prefill or decode, got "${values.disaggregationMode}"`);
  for (const key of ["namespace", "component", "endpoint"] as const)
    if (!NAME.test(values[key])) throw new UsageError(`--${key} / DYN_${key.toUpperCase()}: expected up to 64 lower-case letters, digits, - and _, got "${values[key]}"`);
  const environment = readDynamoEnvironment(env);
  if (environment.namespaceSuffix !== null && !NAME.test(environment.namespaceSuffix))
    throw new UsageError(`DYN_NAMESPACE_WORKER_SUFFIX: expected up to 64 lower-case letters, digits, - and _, got "${environment.namespaceSuffix}"`);
  if (values.enableRl) checkRl(environment, values.endpoint);
  return Object.freeze({
    engine: engineConfig(values, env, license, licenseKey),
    worker: Object.freeze({
      disaggregationMode: mode === "aggregated" ? ("agg" as const) : mode,
      namespace: values.namespace,
      component: values.component,
      endpoint: values.endpoint,
      endpointTypes: values.endpointTypes,
      customJinjaTemplate: values.customJinjaTemplate,
      toolCallParser: values.dynToolCallParser,
      reasoningParser: values.dynReasoningParser,
      excludeToolsWhenToolChoiceNone: values.excludeToolsWhenToolChoiceNone,
      enableRl: values.enableRl,
    }),
    environment,
  });
}

/** @throws UsageError */
function checkRl({ rlEndpoint, systemPort }: DynamoEnvironment, endpoint: string): void {
  if (rlEndpoint === endpoint) throw new UsageError(`DYN_RL_ENDPOINT: "${rlEndpoint}" is the serving endpoint; expected another name`);
  if (systemPort === null) throw new UsageError("--enable-rl / DYN_ENABLE_RL: needs the system server; set DYN_SYSTEM_PORT to a port, or to 0 for any free one");
}

export const dynamoHelp = (): string => `layerscale dynamo: a worker of NVIDIA Dynamo 1.5

Usage: layerscale dynamo --model MODEL [options]

Engine options
${helpText(engineFlags)}

Worker options
${helpText(workerFlags)}

Environment
${dynamoEnvironmentHelp()}

Environment of models from the hub
${hubEnvironmentHelp()}

Environment of the process
${processEnvironmentHelp()}`;
