/**
 * Cost of the Dynamo plane: a worker whose device computes nothing, behind the real frontend, in turn with Dynamo's own mock worker.
 *
 *   bun bench/plane.ts --python VENV/bin/python --model DIR [--reps 3] [--tokens 256] [--streams 1,16,64] [--executable FILE] [--out FILE] [--threads]
 *
 * The device of one worker makes tokens at once, so that events hold what several steps made; that of another one takes --pace
 * microseconds a step, as a fast GPU would.
 * DIR is a Hugging Face directory. The mock worker listens on all addresses, so everything runs in a network namespace of its own.
 */
import { mkdtempSync, writeFileSync } from "node:fs";
import { cpus, tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { parseArgs } from "node:util";
import { addedLatency, type LatencyRow } from "./lib/plane-latency.ts";
import { executable } from "../scripts/lib/paths.mjs";
import { load, promptOf, stream } from "./lib/plane-client.ts";
import { cpuSeconds, deploy, type Deployment, mocker, nullDevice, nullWorker, threadSeconds } from "./lib/plane-deploy.ts";
import { planeTable, type PlaneRow } from "./lib/plane-report.ts";

const { values: options } = parseArgs({
  options: {
    python: { type: "string" },
    model: { type: "string" },
    reps: { type: "string", default: "3" },
    tokens: { type: "string", default: "256" },
    streams: { type: "string", default: "1,16,64" },
    speedup: { type: "string", default: "1000" },
    /** Microseconds; 0 leaves that worker out. */
    pace: { type: "string", default: "1400" },
    executable: { type: "string", default: executable },
    /** A null device built before. */
    library: { type: "string" },
    out: { type: "string" },
    threads: { type: "boolean", default: false },
    "no-mocker": { type: "boolean", default: false },
    "no-latency": { type: "boolean", default: false },
  },
});
if (!options.python || !options.model) {
  console.error("error: --python: expected the python of an environment with ai-dynamo; --model: expected a Hugging Face directory");
  process.exit(2);
}
if (!process.env.LAYERSCALE_PLANE_ISOLATED) {
  const user = process.getuid?.() === 0 ? [] : ["-r"];
  const inside = Bun.spawn(["unshare", ...user, "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", process.execPath, ...process.argv.slice(1)], {
    env: { ...process.env, LAYERSCALE_PLANE_ISOLATED: "1" }, stdio: ["ignore", "inherit", "inherit"],
  });
  process.exit(await inside.exited);
}

const python = resolve(options.python);
const model = resolve(options.model);
const reps = Number(options.reps);
const tokens = Number(options.tokens);
const streamCounts = options.streams.split(",").map(Number);
const PROMPT_TOKENS = 32;
/** A device that makes 64 tokens each step: what the plane carries while most events hold one token. */
const PACED = `layerscale, ${options.pace} µs a step`;
const logs = mkdtempSync(join(tmpdir(), "layerscale-plane-logs-"));
const program = resolve(options.executable);
const library = options.library ?? (await nullDevice());
let requests = 0;

/** A fixed number of requests for each stream, so that every stream starts and ends inside the sample. */
async function sample(d: Deployment, streams: number, maxTokens: number, perStream: number): Promise<PlaneRow> {
  const first = requests;
  requests += streams * perStream;
  const before = { frontend: cpuSeconds(d.frontendPid), worker: cpuSeconds(d.workerPid), client: process.cpuUsage(), threads: threadSeconds(d.workerPid) };
  const { results, seconds } = await load(streams, streams * perStream, (i) => stream(d.port, d.model, promptOf(first + i, PROMPT_TOKENS), maxTokens));
  const made = results.reduce((sum, result) => sum + result.tokens, 0);
  const events = results.reduce((sum, result) => sum + result.eventsAt.length, 0);
  if (results.some((result) => result.tokens !== maxTokens)) throw new Error(`${d.name}: a stream has another count of tokens than ${maxTokens}`);
  const client = process.cpuUsage(before.client);
  const threads = [...threadSeconds(d.workerPid)].map(([name, value]) => [name, value - (before.threads.get(name) ?? 0)] as const).filter(([, value]) => value > 0);
  return {
    worker: d.name, streams, tokens: made, events, seconds, tokensPerSecond: made / seconds,
    firstMs: results.map((result) => result.eventsAt[0]! - result.sentAt),
    frontendMicros: ((cpuSeconds(d.frontendPid) - before.frontend) * 1e6) / made,
    workerMicros: ((cpuSeconds(d.workerPid) - before.worker) * 1e6) / made,
    clientMicros: (client.user + client.system) / made,
    threads: Object.fromEntries(threads.map(([name, value]) => [name, (value * 1e6) / made])),
  };
}

const running: Deployment[] = [];
const rows: PlaneRow[] = [];
let latency: LatencyRow[] = [];
try {
  running.push(await deploy(nullWorker(program, library, model), python, logs));
  if (options.pace !== "0") running.push(await deploy({ ...nullWorker(program, library, model, { LAYERSCALE_NULL_STEP_US: options.pace }), name: PACED }, python, logs));
  if (!options["no-mocker"]) running.push(await deploy(mocker(python, model, options.speedup), python, logs));
  for (const d of running) await sample(d, 8, 32, 2);
  for (let round = 0; round < reps; round++)
    for (const streams of streamCounts)
      for (const d of round % 2 ? running.toReversed() : running) {
        if (d.name === PACED && streams < Math.max(...streamCounts)) continue;
        const row = await sample(d, streams, tokens, Math.max(1, Math.ceil(192 / streams / (streams === 1 ? 8 : 1))));
        rows.push(row);
        if (options.threads) console.error(JSON.stringify({ ...row, firstMs: undefined }));
      }
} finally {
  await Promise.all(running.map((d) => d.stop()));
}
if (!options["no-latency"]) latency = await addedLatency({ program, library, model, python, logs, streamCounts });
console.log(planeTable(rows, latency, cpus()[0]?.model ?? "", cpus().length));
if (options.out) writeFileSync(options.out, JSON.stringify({ machine: { cpu: cpus()[0]?.model, cores: cpus().length }, rows, latency }, null, 1));
