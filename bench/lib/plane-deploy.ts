/** Deployments of the plane benchmark: a frontend and one worker on a discovery directory of their own, everything on loopback. */
import { $ } from "bun";
import { existsSync, mkdirSync, mkdtempSync, openSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { cacheDir, COMMUNITY_KEY, contentHash, root } from "../../scripts/lib/paths.mjs";
import { freePort } from "./server.ts";

const START_LIMIT_MS = 120_000;
const STOP_LIMIT_MS = 10_000;

/** The null device as a library; built once per content. */
export async function nullDevice(): Promise<string> {
  const source = join(root, "bench", "native");
  const folder = join(cacheDir, "bench", `null-${contentHash([join(source, "null_device.cpp"), join(source, "CMakeLists.txt"), join(root, "native")])}`);
  const library = join(folder, "liblayerscale_null.so");
  if (existsSync(library)) return library;
  mkdirSync(folder, { recursive: true });
  await $`cmake -S ${source} -B ${folder}`.quiet();
  await $`cmake --build ${folder}`.quiet();
  return library;
}

export interface WorkerSpec {
  name: string;
  command: string[];
  env: Record<string, string>;
  /** Name that clients send. */
  model: string;
}

export const nullWorker = (program: string, library: string, model: string, env: Record<string, string> = {}): WorkerSpec => ({
  name: "layerscale",
  // As many blocks and tokens a step as the mocker's defaults.
  command: [program, "dynamo", "--model", model, "--served-model-name", "plane", "--chunked-prefill-size", "8192", "--max-total-tokens", "262144", "--gpu-memory-utilization", "1"],
  env: { LAYERSCALE_LICENSE_KEY: COMMUNITY_KEY, LAYERSCALE_NATIVE_LIB: library, ...env },
  model: "plane",
});

/** Dynamo's own mock worker. Its model name must be its path, else the frontend looks for the model on a hub. */
export const mocker = (python: string, directory: string, speedup: string): WorkerSpec => ({
  name: "mocker",
  command: [python, "-m", "dynamo.mocker", "--model-path", directory, "--block-size", "16", "--num-gpu-blocks-override", "16384", "--max-num-seqs", "256", "--speedup-ratio", speedup],
  env: {},
  model: directory,
});

export interface Deployment extends WorkerSpec {
  port: number;
  /** The discovery directory. */
  kv: string;
  frontendPid: number;
  workerPid: number;
  stop(): Promise<void>;
}

/** Starts a frontend, the worker and others that it needs, and waits until one request passes. */
export async function deploy(spec: WorkerSpec, python: string, logs: string, others: WorkerSpec[] = []): Promise<Deployment> {
  const home = mkdtempSync(join(tmpdir(), "layerscale-plane-"));
  const port = await freePort();
  const env = {
    PATH: process.env.PATH ?? "", HOME: home, TMPDIR: tmpdir(), HF_HUB_OFFLINE: "1", PYTHONUNBUFFERED: "1",
    DYN_DISCOVERY_BACKEND: "file", DYN_FILE_KV: join(home, "kv"), DYN_REQUEST_PLANE: "tcp", DYN_EVENT_PLANE: "zmq",
    DYN_TCP_RPC_HOST: "127.0.0.1", DYN_TCP_RESPONSE_STREAM_HOST: "lo", DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS: "0", POD_IP: "127.0.0.1",
  };
  const spawn = (name: string, command: string[], more: Record<string, string>) => {
    const log = openSync(join(logs, `${spec.name}-${name}.log`), "a");
    return Bun.spawn(command, { env: { ...env, ...more }, stdio: ["ignore", log, log] });
  };
  const frontend = spawn("frontend", [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", String(port), "--router-mode", "round-robin"], {});
  const worker = spawn("worker", spec.command, spec.env);
  const children = [["frontend", frontend], ["worker", worker], ...others.map((other) => [other.name, spawn(other.name, other.command, other.env)] as const)] as const;
  const stop = async () => {
    for (const [, child] of children) child.kill("SIGTERM");
    const hurry = setTimeout(() => children.forEach(([, child]) => child.kill("SIGKILL")), STOP_LIMIT_MS);
    await Promise.all(children.map(([, child]) => child.exited));
    clearTimeout(hurry);
    rmSync(home, { recursive: true, force: true });
  };
  const deadline = performance.now() + START_LIMIT_MS;
  while (performance.now() < deadline) {
    for (const [name, child] of children)
      if (child.exitCode !== null || child.signalCode !== null) {
        await stop();
        throw new Error(`${spec.name}: the ${name} ended while starting; see ${logs}`);
      }
    const body = JSON.stringify({ model: spec.model, prompt: [1000, 1001], max_tokens: 1 });
    const ok = await fetch(`http://127.0.0.1:${port}/v1/completions`, { method: "POST", body, headers: { "content-type": "application/json" }, signal: AbortSignal.timeout(5000) }).then((response) => response.status === 200, () => false);
    if (ok) return { ...spec, port, kv: env.DYN_FILE_KV, frontendPid: frontend.pid, workerPid: worker.pid, stop };
    await Bun.sleep(100);
  }
  await stop();
  throw new Error(`${spec.name}: not served within ${START_LIMIT_MS / 1000} s; see ${logs}`);
}

/** Seconds of processor time of a process since its start; by thread name with `threads`. */
export function cpuSeconds(pid: number): number {
  return jiffies(`/proc/${pid}/stat`) / 100;
}
export function threadSeconds(pid: number): Map<string, number> {
  const seconds = new Map<string, number>();
  for (const task of readdirSync(`/proc/${pid}/task`)) {
    const name = `${readFileSync(`/proc/${pid}/task/${task}/comm`, "utf8").trim()}${task === String(pid) ? " (main)" : ""}`;
    seconds.set(name, (seconds.get(name) ?? 0) + jiffies(`/proc/${pid}/task/${task}/stat`) / 100);
  }
  return seconds;
}
function jiffies(path: string): number {
  // Fields 14 and 15, counted behind the command in parentheses.
  const fields = readFileSync(path, "utf8").split(") ").pop()!.split(" ");
  return Number(fields[11]) + Number(fields[12]);
}
