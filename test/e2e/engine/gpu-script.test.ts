/**
 * bench/gpu.sh as it will run where a GPU is: a copy of the tree as it travels (what version control holds, and the kit), no network, nothing on PATH but python3 and
 * a shell, no home, the simulator in place of the device's library. What fails must cost its own step alone, and the report must be there whenever the run is cut off.
 */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eventually, Launched } from "../../support/launch.ts";

const root = join(import.meta.dir, "../../..");
/** Built by `bun build.ts cuda-tests`; npm test does so first. */
const built = ["dist/layerscale", "dist/gpu-sim/checks", "dist/liblayerscale_cuda_sim.so"].every((path) => existsSync(join(root, path))) && Bun.which("python3") !== null;
/** A network of its own needs privileges that not every place has. */
const alone = process.getuid?.() === 0 && Bun.spawnSync(["unshare", "--net", "true"], { stderr: "ignore" }).exitCode === 0 && Bun.which("ip") !== null;
const LIMIT_MS = 300_000;
const STEPS = ["prepare", "parity", "benchmark", "golden", "conformance", "serve", "disaggregated", "sanitizer"];

interface Step {
  ok: boolean;
  error?: string;
  seconds: number;
  [field: string]: unknown;
}
interface Report {
  result: string;
  simulated: boolean;
  failed: string[];
  machine: Record<string, unknown>;
  steps: Record<string, Step>;
  targets: Record<string, { ratio: number | null; target: number; met: boolean | null }>;
  total_seconds: number;
}

let work: string;
let tree: string;
let kit: string;

/** Whole output of a command that must succeed. */
const output = (command: string[], cwd = root): string => {
  const { stdout, stderr, exitCode } = Bun.spawnSync(command, { cwd });
  if (exitCode !== 0) throw new Error(`${command[0]} ended with ${exitCode}: ${stderr.toString().slice(-1000)}`);
  return stdout.toString();
};

beforeAll(() => {
  if (!built) return;
  work = mkdtempSync(join(tmpdir(), "layerscale-gpu-script-"));
  tree = join(work, "tree");
  mkdirSync(tree);
  output(["sh", "-c", 'git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- --ignore-failed-read -cf - | tar -xf - -C "$1"', "sh", tree]);
  kit = join(tree, "dist/gpu-kit/kit.tar");
  output(["sh", "bench/gpu.sh", "pack", "--simulate", "--stored", "--kit", kit]);
  const bin = join(work, "bin");
  mkdirSync(bin);
  for (const name of ["sh", "dirname"]) symlinkSync(Bun.which(name)!, join(bin, name));
  symlinkSync(output(["python3", "-c", "import sys; print(sys.executable)"]).trim(), join(bin, "python3"));
}, LIMIT_MS);
afterAll(() => work && rmSync(work, { recursive: true, force: true }));

/** The script's words on the machine of the rehearsal. */
function command(...words: string[]): { command: string[]; env: Record<string, string> } {
  const bare = ["env", "-i", `PATH=${join(work, "bin")}`, `HOME=${join(work, "no-home")}`, `TMPDIR=${work}`, "sh", "bench/gpu.sh", ...words];
  const network = alone ? ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"] : [];
  return { command: [...network, ...bare], env: { PATH: process.env.PATH! } };
}

async function rehearse(...words: string[]): Promise<{ code: number; report: Report; errors: string }> {
  const { command: line, env } = command("--simulate", "--report", join(work, "report.json"), ...words);
  const run = Bun.spawn(line, { cwd: tree, env, stdout: "pipe", stderr: "pipe" });
  const [out, errors, code] = await Promise.all([new Response(run.stdout).text(), new Response(run.stderr).text(), run.exited]);
  expect(out.trim().split("\n").length).toBe(1);
  const report = JSON.parse(out) as Report;
  expect(JSON.parse(readFileSync(join(work, "report.json"), "utf8"))).toEqual(report);
  return { code, report, errors };
}

test.skipIf(!built)("every step runs and says what it found; numbers of a rehearsal have no ratios", async () => {
  const { code, report, errors } = await rehearse();
  expect([code, report.result, report.failed, errors]).toEqual([0, "ok", [], expect.any(String)]);
  expect(Object.keys(report.steps)).toEqual(STEPS);
  const { prepare, parity, benchmark, golden, conformance, serve, disaggregated, sanitizer } = report.steps;
  expect(prepare).toMatchObject({ kit: { simulated: true, made_of_these_sources: true }, library: { devices: [{ name: "simulated device", multiprocessors: 2 }] } });
  expect(parity).toMatchObject({ failed: [], out_of_time: [] });
  expect(parity!.passed).toBeGreaterThanOrEqual(9);
  expect(golden).toMatchObject({ suites: { "device-golden": { failed: [] } } });
  expect(conformance).toMatchObject({ suites: { "device-cache": { failed: [] } } });
  expect(serve).toMatchObject({ same_first_tokens: "3 of 3" });
  expect(disaggregated).toMatchObject({ aggregated: { tokens: 4 }, disaggregated: { tokens: 4, prompt_tokens_taken: 39 } });
  expect(sanitizer).toMatchObject({ passed: 2 });
  // 0.8, 0.7, 0.6 and 0.8 of the limits are wanted.
  expect(report.targets).toEqual({
    decode_1: { ratio: null, target: 0.8, met: null }, decode_64: { ratio: null, target: 0.7, met: null }, prefill: { ratio: null, target: 0.6, met: null },
    kv_pull: { ratio: null, target: 0.8, met: null }, kv_transfer: { ratio: null, target: 0.8, met: null },
  });
  expect(benchmark!.note).toContain("simulated");
  const measured = benchmark!.measured as Record<string, { bytes?: number; flops?: number; seconds: number }>;
  // By hand for the tiny shape: 2 layers, hidden 64, 4 heads and 2 kv heads of 16, 128 wide, 512 tokens; 39.5 keys on average (32, 5 of warming up, the middle of 1 to 4).
  const layer = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 128 * 64;
  const norms = 64 + 2 * (2 * 64 + 2 * 16);
  const kvToken = 2 * 2 * 2 * 16 * 2;
  expect(measured.decode_1!.bytes).toBe(Math.round(2 * (2 * layer + 512 * 64 + norms) + kvToken * 39.5));
  expect(measured.decode_64!.bytes).toBe(Math.round(2 * (2 * layer + 512 * 64 + norms) + 4 * kvToken * 39.5));
  expect(measured.prefill!.flops).toBe(2 * 2 * layer * 64 + 2 * 512 * 64 + (4 * 2 * 4 * 16 * 64 * 65) / 2);
  expect(measured.kv_transfer!.bytes).toBe(measured.tcp_copy!.bytes!);
}, LIMIT_MS);

test.skipIf(!built)("a library that cannot be loaded is told, and what does not need it still runs", async () => {
  const broken = join(work, "broken");
  mkdirSync(broken);
  output(["tar", "-xf", kit, "-C", broken]);
  writeFileSync(join(broken, "liblayerscale_cuda.so"), "no library".repeat(100));
  output(["tar", "-cf", join(work, "broken.tar"), "manifest.json", "layerscale", "liblayerscale_cpu.so", "liblayerscale_cuda.so", "checks", "step_bench"], broken);
  const { code, report } = await rehearse("--kit", join(work, "broken.tar"), "--only", "parity,conformance,serve,sanitizer");
  expect([code, report.result]).toEqual([1, "failed"]);
  expect(report.failed).toEqual(["prepare", "conformance", "serve"]);
  expect(report.steps.prepare!.error).toMatch(/liblayerscale_cuda\.so: invalid ELF header/);
  expect(report.steps.serve!.error).toContain("liblayerscale_cuda.so");
  expect(report.steps.conformance!.suites).toMatchObject({ "device-cache": { code: 1, output: expect.stringContaining("liblayerscale_cuda.so") } });
  expect([report.steps.parity!.ok, report.steps.sanitizer!.ok]).toEqual([true, true]);
}, LIMIT_MS);

test.skipIf(!built)("a program that hangs and ignores SIGTERM is ended at the limit; what it had told is kept", async () => {
  const hanging = join(work, "hanging");
  mkdirSync(hanging);
  output(["tar", "-xf", kit, "-C", hanging]);
  writeFileSync(join(hanging, "step_bench"), `#!/bin/sh\ntrap "" TERM\necho '{"name":"decode_1","seconds":0.5,"bytes":7}'\nwhile :; do :; done\n`);
  output(["tar", "-cf", join(work, "hanging.tar"), "manifest.json", "layerscale", "liblayerscale_cpu.so", "liblayerscale_cuda.so", "checks", "step_bench"], hanging);
  const { code, report } = await rehearse("--kit", join(work, "hanging.tar"), "--only", "benchmark,sanitizer", "--limit", "20");
  expect([code, report.result, report.failed]).toEqual([1, "failed", ["benchmark", "sanitizer"]]);
  expect(report.steps.benchmark).toMatchObject({ error: expect.stringContaining("ran out of time after decode_1"), measured: { decode_1: { bytes: 7, seconds: 0.5 } } });
  expect(report.steps.sanitizer!.error).toContain("no time is left");
}, LIMIT_MS);

test.skipIf(!built)("no kit, a kit for a GPU, unknown steps: said at once", async () => {
  const { report } = await rehearse("--kit", join(work, "none.tar"), "--only", "parity");
  expect(report.steps.prepare!.error).toContain("no kit at");
  expect(report.steps.parity!.error).toContain("neither carried in a kit nor built here");
  const { command: line, env } = command("--simulate", "--only", "parity,speed");
  const refused = Bun.spawnSync(line, { cwd: tree, env });
  expect([refused.exitCode, refused.stderr.toString()]).toEqual([2, expect.stringMatching(/^error: --only: expected some of .*, got "speed"\n$/)]);
});

test.skipIf(!built)("a run that is cut off leaves a whole report: at its limit, and by a signal", async () => {
  const { code, report } = await rehearse("--limit", "1");
  expect([code, report.result]).toEqual([1, "failed"]);
  // Whatever a second was enough for, each later step says that there was no time.
  expect(report.failed.length).toBeGreaterThan(0);
  expect(report.steps.sanitizer).toMatchObject({ ok: false, error: expect.stringMatching(/no time is left|out of time/) });

  const path = join(work, "cut.json");
  const { command: line, env } = command("--simulate", "--report", path);
  await using run = Launched.command(line, { env, cwd: tree });
  const steps = () => (existsSync(path) ? Object.keys((JSON.parse(readFileSync(path, "utf8")) as Report).steps) : []);
  await eventually(() => steps().includes("prepare"), "the first step is in the report", 60_000);
  run.signal("SIGTERM");
  expect(await run.exit()).toBe(1);
  const cut = JSON.parse(readFileSync(path, "utf8")) as Report;
  expect([cut.result, cut.steps.prepare!.ok]).toEqual(["cut off", true]);
  expect(cut.failed.length).toBe(1);
  expect(cut.steps[cut.failed[0]!]!.error).toContain("cut off while it ran");
}, LIMIT_MS);

test.skipIf(existsSync("/dev/nvidia0") || Bun.which("nvidia-smi") !== null || Bun.which("python3") === null)("without a GPU it says so", () => {
  const run = Bun.spawnSync(["sh", "bench/gpu.sh"], { cwd: root });
  expect([run.exitCode, run.stdout.toString(), run.stderr.toString()]).toEqual([0, '{"result": "no GPU"}\n', "no GPU\n"]);
});
