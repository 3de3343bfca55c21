/**
 * Writes docs/reference-flags.md from the flag and variable tables, and docs/reference-metrics.md from the registries that /metrics prints.
 * `--check` compares instead: a page that does not match the tables is an error.
 */
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import type { Registry } from "prom-client";
import { workerFlags } from "../src/cli/dynamo.ts";
import { engineFlags } from "../src/cli/engine-flags.ts";
import { serverFlags } from "../src/cli/serve.ts";
import { DYNAMO_VARIABLES } from "../src/config/env.ts";
import { type Flag, flagName, type FlagTable } from "../src/config/flags.ts";
import { HUB_VARIABLES } from "../src/config/hub-env.ts";
import { PROCESS_VARIABLES } from "../src/config/process-env.ts";
import { CHECKS } from "../src/doctor/findings.ts";
import { DynamoMetrics } from "../src/dynamo/system-server/metrics.ts";
import { type FinishedSample, EngineMetrics, type MetricsSource } from "../src/telemetry/metrics.ts";

const root = join(import.meta.dir, "..");
const NOTICE = "<!-- Made by scripts/docs-gen.ts from the program's own tables; change those, then run `bun scripts/docs-gen.ts`. -->";

const cell = (text: string) => text.replaceAll("|", "\\|").replaceAll("<", "&lt;").replaceAll("\n", " ");
const code = (text: string) => (text === "" ? "" : `\`${text.replaceAll("|", "\\|")}\``);
const table = (head: string[], rows: string[][]): string => [head, head.map(() => "---"), ...rows].map((row) => `| ${row.join(" | ")} |`).join("\n");
/** What a flag takes, as far as its kind says it. */
function values(flag: Flag): string {
  switch (flag.kind) {
    case "int":
      return `${flag.min} to ${flag.max}`;
    case "float":
      return `above ${flag.above ?? 0}, up to ${flag.max}`;
    case "enum":
      return flag.of.map(code).join(", ");
    case "list":
      return `list of ${flag.of.map(code).join(", ")}`;
    case "bool":
      return "`true`, `false`";
    case "switch":
      return flag.env === undefined ? "no value" : "no value; its variable: `true`, `false`";
    case "string":
      return flag.metavar ?? "text";
  }
}

function defaultOf(flag: Flag): string {
  if (flag.kind === "switch") return "off";
  return flag.default === null ? "–" : code(Array.isArray(flag.default) ? flag.default.join(",") : String(flag.default));
}

const flagRows = (flags: FlagTable) => Object.entries(flags).map(([key, flag]) => [code(`--${flagName(key)}`), flag.env === undefined ? "" : code(flag.env), values(flag), defaultOf(flag), cell(flag.help)]);
const FLAG_HEAD = ["Flag", "Variable", "Values", "Default", "Meaning"];
const variableRows = (variables: readonly { name: string; shown: string; help: string }[]) => variables.map(({ name, shown, help }) => [name.split(", ").map(code).join(", "), cell(shown), cell(help)]);
const VARIABLE_HEAD = ["Variable", "Default", "Meaning"];

function flagsPage(): string {
  return `${NOTICE}
# Flags and variables

A flag beats its variable, and an empty variable counts as unset. What is unknown or cannot be read ends the start with exit code 2 and a line that names the flag or variable, its value and what was expected.

\`layerscale [serve]\` takes engine and server options, \`layerscale dynamo\` engine and worker options, \`layerscale doctor [serve|dynamo]\` the options of either and \`--json\`. \`--help\` prints those of a command, \`--version\` the version.

## Engine options
${table(FLAG_HEAD, flagRows(engineFlags))}

## Server options (serve)
${table(FLAG_HEAD, flagRows(serverFlags))}

## Worker options (dynamo)
${table(FLAG_HEAD, flagRows(workerFlags))}

## Variables of Dynamo's runtime (dynamo)
${table(VARIABLE_HEAD, variableRows(Object.values(DYNAMO_VARIABLES)))}

## Variables of models from the hub
${table(VARIABLE_HEAD, variableRows(Object.values(HUB_VARIABLES)))}

## Variables of the process
${table(VARIABLE_HEAD, variableRows(PROCESS_VARIABLES))}

## Checks of doctor
${table(["Id", "Looks at"], Object.entries(CHECKS).map(([id, text]) => [code(id), cell(text)]))}
`;
}

/** An engine that does nothing, whose one request has everything that makes a family appear. */
function stillEngine(): { source: MetricsSource; finish: () => void } {
  const listeners: ((request: FinishedSample) => void)[] = [];
  const none = new Proxy({}, { get: (_, name) => (name === "transfer" ? null : 0) });
  return {
    source: { stats: () => none as ReturnType<MetricsSource["stats"]>, onFinish: (listener) => (listeners.push(listener), () => {}), onStep: () => () => {} },
    finish: () => {
      for (const listener of listeners)
        listener({ finishReason: "stop", usage: { promptTokens: 1, completionTokens: 1, cachedTokens: 0 } as FinishedSample["usage"], internal: false, queuedMs: 0, ttftMs: 0, durationMs: 0 });
    },
  };
}

/** Families in the order in which /metrics prints them; names of labels from their declarations. */
async function metricRows(registry: Registry): Promise<string[][]> {
  const text = await registry.metrics();
  const types = new Map([...text.matchAll(/^# TYPE (\S+) (\S+)$/gm)].map(([, name, type]) => [name!, type!]));
  return [...text.matchAll(/^# HELP (\S+) (.*)$/gm)].map(([, name, help]) => {
    const { labelNames = [] } = registry.getSingleMetric(name!) as unknown as { labelNames?: readonly string[] };
    return [code(name!), types.get(name!) ?? "", labelNames.filter((label) => label !== "le").map(code).join(", "), cell(help!)];
  });
}

async function metricsPage(): Promise<string> {
  const engine = stillEngine();
  const dynamo = new DynamoMetrics({ namespace: "dynamo", component: "backend", endpoint: "generate" }, 1n);
  dynamo.attach(engine.source, { model: "", modelName: "" }, { slots: 1, capacity: 1, loadSeconds: 0, prefixCache: true });
  // Families of errors and hits appear with the first one.
  dynamo.endpoint("generate").failed("response_stream");
  engine.finish();
  const head = ["Family", "Type", "Labels", "Meaning"];
  return `${NOTICE}
# Metrics

\`layerscale serve\` prints the first table under \`/metrics\`. \`layerscale dynamo\` prints, on \`DYN_SYSTEM_PORT\`, the second and then the first, names and labels equal. A histogram has the samples \`_bucket\` (label \`le\`), \`_sum\` and \`_count\`.
Some families of Dynamo appear with their first sample: errors with the first error, the hit rate with the first prompt. Where their meaning differs from that in Dynamo's own workers, [dynamo-operations.md](dynamo-operations.md#metrics) says how.

## Engine
${table(head, await metricRows(new EngineMetrics({ version: "" }).registry))}

## Dynamo
${table(head, await metricRows(dynamo.registry))}
`;
}

const pages: Record<string, string> = { "docs/reference-flags.md": flagsPage(), "docs/reference-metrics.md": await metricsPage() };
let stale = 0;
for (const [name, text] of Object.entries(pages)) {
  const path = join(root, name);
  const current = existsSync(path) ? readFileSync(path, "utf8") : "";
  if (current === text) continue;
  stale++;
  if (process.argv.includes("--check")) console.error(`${name} does not match the program: run \`bun scripts/docs-gen.ts\``);
  else writeFileSync(path, text);
}
if (process.argv.includes("--check") && stale > 0) process.exit(1);
process.exit(0);
