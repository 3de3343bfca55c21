/**
 * What disaggregation gives and costs, with real models on this machine.
 *
 *   bun bench/disagg.ts --python VENV/bin/python --model DIR [--reps 3] [--streams 4] [--prompts 2] [--length 1900] [--executable FILE] [--out FILE] [--only gap,staging]
 *
 * gap: running streams while long prompts come one after another: one aggregated worker on two cores against a prefill and a decode worker with
 * a core each, in turns in one run. Both behind the real frontend. staging: what copying a prompt's KV to host memory adds to its computation.
 */
import { mkdtempSync, writeFileSync } from "node:fs";
import { cpus, tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { parseArgs } from "node:util";
import { run, worstGap } from "./lib/disagg-stream.ts";
import { type StagingRow, staging } from "./lib/disagg-staging.ts";
import { tokenPrompt } from "./lib/measure.ts";
import { deploy, type Deployment, type WorkerSpec } from "./lib/plane-deploy.ts";
import { median } from "./lib/report.ts";
import { COMMUNITY_KEY, executable } from "../scripts/lib/paths.mjs";

const { values: options } = parseArgs({
  options: {
    python: { type: "string" }, model: { type: "string" },
    reps: { type: "string", default: "3" }, streams: { type: "string", default: "4" }, prompts: { type: "string", default: "2" }, length: { type: "string", default: "1900" },
    executable: { type: "string", default: executable }, out: { type: "string" }, only: { type: "string", default: "gap,staging" },
  },
});
if (!options.python || !options.model) {
  console.error("error: --python: expected the python of an environment with ai-dynamo; --model: expected a Hugging Face directory");
  process.exit(2);
}
const model = resolve(options.model);
const program = resolve(options.executable);
const [reps, streamCount, promptCount, length] = [options.reps, options.streams, options.prompts, options.length].map(Number) as [number, number, number, number];
const MAX_TOKENS = 1500;
const NAME = "bench";
const parts = options.only.split(",");
const logs = mkdtempSync(join(tmpdir(), "layerscale-disagg-logs-"));

/** One aggregated worker has cores 0 and 1, the two others one each. */
function worker(name: string, cores: string, args: string[] = []): WorkerSpec {
  const command = ["taskset", "-c", cores, program, "dynamo", "--model", model, "--served-model-name", NAME, "--device", "cpu", ...args];
  return { name, command, env: { LAYERSCALE_LICENSE_KEY: COMMUNITY_KEY }, model: NAME };
}

interface GapRow {
  deployment: string;
  /** Longest time between two tokens of a running stream: before any long prompt, and beside them. ms */
  quietMs: number;
  besideMs: number;
  /** Medians of the time between two tokens. ms */
  quietMedianMs: number;
  besideMedianMs: number;
  /** First token of each long prompt, ms. */
  firstMs: number[];
}

let seed = 0;
async function gaps(d: Deployment): Promise<GapRow> {
  const base = `http://127.0.0.1:${d.port}`;
  const stop = new AbortController();
  const streams = Array.from({ length: streamCount }, () => run(base, NAME, tokenPrompt(32, ++seed), MAX_TOKENS, stop.signal));
  await Promise.all(streams.map(({ begun }) => begun));
  const quietFrom = performance.now();
  const target = streams.map(({ arrivals }) => arrivals.length + 30);
  while (streams.some(({ arrivals }, i) => arrivals.length < target[i]!)) await Bun.sleep(10);
  const from = performance.now();
  const firstMs: number[] = [];
  for (let i = 0; i < promptCount; i++) {
    const sent = performance.now();
    const long = run(base, NAME, tokenPrompt(length, ++seed), 4, stop.signal);
    await long.done;
    firstMs.push(long.arrivals[0]! - sent);
  }
  const to = performance.now();
  if (streams.some(({ arrivals }) => arrivals.at(-1)! < to - 5_000)) throw new Error(`${d.name}: a stream ended or stood before the long prompts were answered`);
  stop.abort();
  await Promise.all(streams.map(({ done }) => done));
  const between = (begin: number, end: number) => median(streams.flatMap(({ arrivals }) => arrivals.flatMap((at, i) => (i > 0 && at >= begin && at <= end ? [at - arrivals[i - 1]!] : []))));
  return { deployment: d.name, quietMs: worstGap(streams, quietFrom, from), besideMs: worstGap(streams, from, to), quietMedianMs: between(quietFrom, from), besideMedianMs: between(from, to), firstMs };
}

const rows: GapRow[] = [];
let staged: StagingRow | null = null;
if (parts.includes("gap")) {
  const running: Deployment[] = [];
  try {
    running.push(await deploy(worker("aggregated", "0,1"), options.python, logs));
    running.push(await deploy(worker("disaggregated", "1", ["--disaggregation-mode", "decode"]), options.python, logs, [worker("prefill", "0", ["--disaggregation-mode", "prefill"])]));
    for (let round = 0; round < reps; round++) for (const d of round % 2 ? running.toReversed() : running) rows.push(await gaps(d));
  } finally {
    await Promise.all(running.map((d) => d.stop()));
  }
}
if (parts.includes("staging")) staged = await staging(model, length, reps);

const ms = (value: number) => value.toFixed(0);
console.log(`Machine: ${cpus()[0]?.model ?? ""}, ${cpus().length} cores, shared by client, frontend and workers; ${streamCount} streams, ${promptCount} prompts of ${length} tokens one after another, ${reps} rounds`);
for (const name of new Set(rows.map(({ deployment }) => deployment))) {
  const own = rows.filter(({ deployment }) => deployment === name);
  const middle = (read: (row: GapRow) => number) => ms(median(own.map(read)));
  console.log(`${name}: between two tokens, median ${middle((r) => r.quietMedianMs)} ms quiet, ${middle((r) => r.besideMedianMs)} beside long prompts; worst ${middle((r) => r.quietMs)} quiet, ${middle((r) => r.besideMs)} beside (${own.map((r) => ms(r.besideMs)).join(", ")}); first token of a long prompt ${ms(median(own.flatMap((r) => r.firstMs)))} ms`);
}
if (rows.length > 0) {
  const worst = (name: string) => median(rows.filter(({ deployment }) => deployment === name).map((row) => row.besideMs));
  console.log(`worst gap, disaggregated / aggregated: ${(worst("disaggregated") / worst("aggregated")).toFixed(3)}`);
}
if (staged) {
  const { plainMs, stagedMs, copyMs, megabytes, layers, early, waitMs } = staged;
  console.log(`staging ${megabytes.toFixed(0)} MB: prompt alone ${ms(plainMs)} ms, with staging ${ms(stagedMs)} ms; the copy alone takes ${copyMs.toFixed(1)} ms; ${early} of ${layers} layers were copied while later ones were computed; steps waited ${waitMs.toFixed(1)} ms for the rest`);
}
if (options.out) writeFileSync(options.out, JSON.stringify({ machine: { cpu: cpus()[0]?.model, cores: cpus().length }, settings: { reps, streams: streamCount, prompts: promptCount, length }, rows, staged }, null, 1));
