import "./util/catch-stop.ts";
import { isMainThread, workerData } from "node:worker_threads";
import { dynamoConfig, dynamoHelp } from "./cli/dynamo.ts";
import { licenseKey } from "./cli/license-key.ts";
import { serveConfig, serveHelp } from "./cli/serve.ts";
import { versionText } from "./cli/version.ts";
import type { EngineConfig } from "./config/engine-config.ts";
import { UsageError } from "./config/flags.ts";
import { checkLicense, LICENSE_EXIT_CODE, LicenseError } from "./license/license.ts";
import { releaseStopSignals } from "./util/signals.ts";

/** Exit codes: 0 clean stop · 1 failure · 2 usage (flag or variable) · 78 licence. */
const EXIT_FAILURE = 1;
const EXIT_USAGE = 2;

/** The licence gate comes before everything but --version and doctor: before help, before any flag is judged. */
async function main(argv: readonly string[], env: Record<string, string | undefined>): Promise<number> {
  if (argv[0] === "--version" || argv[0] === "-v" || argv[0] === "version") {
    releaseStopSignals();
    console.log(await versionText());
    return 0;
  }
  if (argv[0] === "doctor") {
    releaseStopSignals();
    return (await import("./cli/doctor.ts")).runDoctor(argv.slice(1), env);
  }
  const { key, source } = licenseKey(argv, env);
  const license = checkLicense(key, source);
  const dynamo = argv[0] === "dynamo";
  const rest = dynamo || argv[0] === "serve" ? argv.slice(1) : argv;
  if (rest.includes("--help") || rest.includes("-h") || rest[0] === "help") {
    releaseStopSignals();
    console.log(dynamo ? dynamoHelp() : argv[0] === "serve" ? serveHelp() : `${serveHelp()}\n\nOther commands: layerscale dynamo (a Dynamo worker; see layerscale dynamo --help), layerscale doctor (says what would keep a start from working; see layerscale doctor --help), layerscale --version`);
    return 0;
  }
  if (dynamo) {
    const config = dynamoConfig(rest, env, license, key as string);
    await checkDevice(config.engine);
    return (await import("./dynamo/worker.ts")).runDynamo(config);
  }
  const config = serveConfig(rest, env, license, key as string);
  await checkDevice(config.engine);
  return (await import("./serve/serve.ts")).runServe(config);
}

/** A device that is not there, or that flags do not fit, is told before anything is opened. */
async function checkDevice(config: EngineConfig): Promise<void> {
  await (await import("./runtime/select-device.ts")).selectDevice(config);
}

/** One line for people; a stack only for what nobody foresaw. */
function report(error: unknown): number {
  if (error instanceof LicenseError) {
    console.error(error.message);
    return LICENSE_EXIT_CODE;
  }
  if (error instanceof UsageError) {
    console.error(`error: ${error.message}`);
    return EXIT_USAGE;
  }
  const foreseen = error instanceof Error && ["ModelError", "HubError", "EngineError", "NativeError"].includes(error.name);
  console.error(foreseen ? `error: ${(error as Error).message}` : error);
  return EXIT_FAILURE;
}

if (isMainThread) {
  const code = await main(process.argv.slice(2), process.env).catch(report);
  process.exit(code);
} else if ((workerData as { kind?: unknown } | null)?.kind === "layerscale-discovery") {
  await (await import("./dynamo/discovery/thread/run.ts")).runDiscoveryThread();
} else {
  (await import("./engine/worker.ts")).runEngineWorker();
}
