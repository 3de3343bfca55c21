/**
 * Side-by-side benchmark: LayerScale and the peers a user would pick instead, alternating within one run, results as ratios.
 *
 *   bun bench/compare.ts --models DIR [--classes bf16,q8_0,q4_1] [--reps 5] [--quick] [--out results.json]
 *     [--measures "1 stream,prefill"] [--bf16-only "prefill,16 streams"] [--llama-server FILE] [--vllm-venv DIR] [--openvino-venv DIR]
 *
 * DIR holds SmolLM2-135M-Instruct/ (bf16 Hugging Face directory) and smol-{bf16,q8_0,q4_1}.gguf, as `bun scripts/models/convert.ts` makes them.
 */
import { mkdirSync, mkdtempSync, statSync, writeFileSync } from "node:fs";
import { availableParallelism, cpus, tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { COMMUNITY_KEY, executable } from "../scripts/lib/paths.mjs";
import { besideBusyCores, cachedFirstToken, concurrent, decodeRate, prefillRate, type Measure } from "./lib/measure.ts";
import { machineLimits } from "./lib/limits.ts";
import { table, type Row } from "./lib/report.ts";
import { startServer, type RunningServer, type ServerSpec } from "./lib/server.ts";

const { values: options } = parseArgs({
  options: {
    models: { type: "string" },
    classes: { type: "string", default: "bf16,q8_0,q4_1" },
    reps: { type: "string", default: "5" },
    quick: { type: "boolean", default: false },
    out: { type: "string" },
    "llama-server": { type: "string" },
    "vllm-venv": { type: "string" },
    "openvino-venv": { type: "string" },
    measures: { type: "string", default: "" },
    "bf16-only": { type: "string", default: "" },
  },
});
if (!options.models) {
  console.error("error: --models: expected a folder with the benchmark models");
  process.exit(2);
}
const models = options.models;
const reps = Number(options.reps);
const logs = mkdtempSync(join(tmpdir(), "layerscale-bench-"));
mkdirSync(logs, { recursive: true });

function servers(kind: string): ServerSpec[] {
  const gguf = join(models, `smol-${kind}.gguf`);
  const weightBytes = statSync(gguf).size;
  const directory = join(models, "SmolLM2-135M-Instruct");
  const list: ServerSpec[] = [
    {
      name: "layerscale",
      command: [executable, "serve", "--model", kind === "bf16" ? directory : gguf, "--port", "{port}", "--served-model-name", "smol"],
      env: { LAYERSCALE_LICENSE_KEY: COMMUNITY_KEY },
      weightBytes,
      forceLength: { ignore_eos: true },
      tokenPrompts: true,
      model: "smol",
    },
  ];
  if (options["llama-server"])
    list.push({
      name: "llama.cpp",
      command: [options["llama-server"], "-m", gguf, "--alias", "smol", "--host", "127.0.0.1", "--port", "{port}", "-t", String(availableParallelism()), "-tb", String(availableParallelism()), "--no-ui", "-c", "24576", "-np", "16", "--kv-unified"],
      weightBytes,
      forceLength: { ignore_eos: true, cache_prompt: true },
      tokenPrompts: true,
      model: "smol",
    });
  if (options["vllm-venv"] && kind === "bf16")
    list.push({
      name: "vLLM",
      command: [join(options["vllm-venv"], "bin/vllm"), "serve", directory, "--served-model-name", "smol", "--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16", "--max-model-len", "8192", "--max-num-seqs", "128"],
      // Left alone it keeps one core for its scheduler, which on a small machine halves it.
      env: { LD_PRELOAD: join(options["vllm-venv"], "lib/libiomp5.so"), VLLM_CPU_KVCACHE_SPACE: "2", VLLM_CPU_OMP_THREADS_BIND: `0-${cpus().length - 1}`, VLLM_NO_USAGE_STATS: "1", HF_HUB_OFFLINE: "1" },
      weightBytes,
      forceLength: { ignore_eos: true },
      tokenPrompts: true,
      model: "smol",
    });
  // Its GGUF reader knows no bf16.
  if (options["openvino-venv"] && kind !== "bf16")
    list.push({
      name: "OpenVINO",
      command: [join(options["openvino-venv"], "bin/python3"), join(import.meta.dir, "peers/openvino_server.py"), gguf, "--port", "{port}", "--cache", join(logs, "ir")],
      weightBytes,
      forceLength: { ignore_eos: true },
      tokenPrompts: true,
      model: "smol",
    });
  return list;
}

const all: Measure[] = [
  decodeRate(options.quick ? 64 : 128),
  prefillRate(512),
  prefillRate(2048),
  cachedFirstToken(1500),
  concurrent(16, options.quick ? 16 : 32, 64, options.quick ? 64 : 128),
  besideBusyCores(1, 64),
  besideBusyCores(Math.max(2, cpus().length), 64),
];
const wanted = options.measures.split(",").filter(Boolean);
const measures = wanted.length ? all.filter((measure) => wanted.some((word) => measure.name.includes(word))) : all;
const bf16Only = options["bf16-only"].split(",").filter(Boolean);

const limits = await machineLimits();
const report: { machine: unknown; rows: Row[] } = { machine: { cpu: cpus()[0]?.model, cores: cpus().length, ...limits }, rows: [] };
let running: RunningServer[] = [];
/** After every measure: a long run that is stopped keeps what it has. */
const keep = () => options.out && writeFileSync(options.out, JSON.stringify(report, null, 1));
for (const signal of ["SIGINT", "SIGTERM"] as const)
  process.once(signal, async () => {
    console.error(`${signal}: stopping the servers; the rows so far are complete`);
    await Promise.all(running.map((server) => server.stop()));
    console.log(table(report.rows, limits));
    process.exit(130);
  });
for (const kind of options.classes.split(",")) {
  running = [];
  try {
    for (const spec of servers(kind)) {
      try {
        const server = await startServer(spec, join(logs, `${spec.name}-${kind}.log`));
        running.push(server);
        console.error(`${kind}: ${spec.name} ready after ${Math.round(server.readyMs)} ms`);
      } catch (error) {
        console.error(`${kind}: ${spec.name} left out: ${(error as Error).message}`);
      }
    }
    // One unmeasured round, so that no server pays for its first request.
    for (const server of running) await decodeRate(8).sample(server, 1).catch((error) => console.error(String(error)));
    for (const [index, measure] of measures.entries()) {
      if (kind !== "bf16" && bf16Only.some((word) => measure.name.includes(word))) continue;
      const samples = new Map(running.map((server) => [server.name, [] as number[]]));
      const rounds = measure.name.startsWith("decode beside") ? Math.min(3, reps) : reps;
      for (let round = 0; round < rounds; round++)
        for (const server of rotate(running, round)) {
          const value = await measure.sample(server, 7919 * (index + 1) + round * 31 + 1).catch((error) => (console.error(String(error)), NaN));
          if (Number.isFinite(value)) samples.get(server.name)!.push(value);
        }
      for (const server of running)
        report.rows.push({ kind, measure: measure.name, unit: measure.unit, better: measure.better, server: server.name, samples: samples.get(server.name)!, weightBytes: server.weightBytes });
      keep();
      console.error(`${kind}: ${measure.name}: ${running.map((server) => `${server.name} ${samples.get(server.name)!.map((value) => value.toPrecision(4)).join(" ")}`).join(" · ")}`);
    }
    for (const server of running) report.rows.push({ kind, measure: "exec to ready", unit: "ms", better: "less", server: server.name, samples: [server.readyMs], weightBytes: server.weightBytes });
  } finally {
    keep();
    await Promise.all(running.map((server) => server.stop()));
  }
}
console.log(table(report.rows, limits));

function rotate<T>(list: T[], by: number): T[] {
  return list.map((_, i) => list[(i + by) % list.length]!);
}
