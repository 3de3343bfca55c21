import { flagName, UsageError } from "../config/flags.ts";
import { examine, type DoctorInput } from "../doctor/doctor.ts";
import { CHECKS } from "../doctor/findings.ts";
import { reportJson, reportText } from "../doctor/report.ts";
import { checkLicense, type License, LicenseError } from "../license/license.ts";
import { dynamoConfig, workerFlags } from "./dynamo.ts";
import { engineFlags } from "./engine-flags.ts";
import { licenseKey } from "./license-key.ts";
import { serveConfig } from "./serve.ts";

type Env = Record<string, string | undefined>;
type Command = "serve" | "dynamo";

/** Stands in for a licence that is refused, so that everything else can still be looked at. */
const NO_LICENSE: License = { id: "", tier: "", maxSessions: null, maxCtx: null, issued: "", expires: null };
/** Exit codes: all is well, or only warnings · a check failed · the command line or environment cannot be read. */
const OK = 0;
const FAILED = 1;
const USAGE = 2;

/** `layerscale doctor [serve|dynamo] [their flags] [--json]`. Runs without a licence. @returns the exit code */
export async function runDoctor(argv: readonly string[], env: Env): Promise<number> {
  const json = argv.includes("--json");
  let rest = argv.filter((word) => word !== "--json");
  const valued = rest.find((word) => word.startsWith("--json="));
  if (valued !== undefined) {
    console.error(`error: ${valued.slice(0, 40)}: --json takes no value`);
    return USAGE;
  }
  if (rest.includes("--help") || rest.includes("-h") || rest[0] === "help") {
    console.log(doctorHelp());
    return OK;
  }
  const named = rest[0] === "serve" || rest[0] === "dynamo" ? (rest[0] as Command) : null;
  if (named !== null) rest = rest.slice(1);
  const command = named ?? guess(rest, env);
  let input: DoctorInput;
  try {
    input = readInput(command, rest, env);
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    if (json) console.log(reportJson(command, [{ id: "config", status: "failed", detail: error.message, fix: null }]));
    console.error(`error: ${error.message}`);
    return USAGE;
  }
  const findings = await silently(() => examine(input));
  console.log(json ? reportJson(command, findings.list) : reportText(command, findings));
  return findings.count("failed") > 0 ? FAILED : OK;
}

/** Standard output is the report's: a client of nats-server that meets an odd one writes there too. */
async function silently<T>(work: () => Promise<T>): Promise<T> {
  const { log } = console;
  console.log = () => {};
  try {
    return await work();
  } finally {
    console.log = log;
  }
}

/** A worker's, when a flag or variable that only a worker reads is there. */
function guess(argv: readonly string[], env: Env): Command {
  const worker = new Set(Object.keys(workerFlags).filter((key) => key !== "apiKey").map((key) => `--${flagName(key)}`));
  return argv.some((word) => worker.has(word.replace(/=.*/s, ""))) || Object.keys(env).some((name) => name.startsWith("DYN_") && env[name]) ? "dynamo" : "serve";
}

/** @throws UsageError */
function readInput(command: Command, argv: readonly string[], env: Env): DoctorInput {
  const { key, source } = licenseKey(argv, env);
  let license: License | LicenseError;
  try {
    license = checkLicense(key, source);
  } catch (error) {
    if (!(error instanceof LicenseError)) throw error;
    license = error;
  }
  const modelGiven = argv.some((word) => word === "--model" || word.startsWith("--model="));
  // The last of repeated flags wins: the first stands for a model that is not given.
  const words = ["--model=none", ...argv];
  const granted = license instanceof LicenseError ? NO_LICENSE : license;
  const config = command === "dynamo" ? { dynamo: dynamoConfig(words, env, granted, key ?? "") } : { serve: serveConfig(words, env, granted, key ?? "") };
  return { license, config, modelGiven };
}

export const doctorHelp = (): string => `layerscale doctor: says what would keep a start from working, before anything is loaded

Usage: layerscale doctor [serve|dynamo] [options of that command] [--json]

Without a command it is dynamo's when a worker's flag or a DYN_ variable is there, else serve's. It runs without a licence key, changes nothing,
and downloads nothing.

  --json        one JSON object for machines instead of text

Checks
${Object.entries(CHECKS).map(([id, text]) => `  ${id.padEnd(20)}${text}`).join("\n")}

Exit codes: 0 no check failed (warnings may be there), 1 a check failed, 2 flags or variables cannot be read`;
