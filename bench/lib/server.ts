/** Servers under measurement: started with their own command, timed from exec to /health 200, stopped by pid. */
import { createServer } from "node:net";
import { openSync } from "node:fs";

export interface ServerSpec {
  name: string;
  /** Words of the command; {port} is replaced. */
  command: string[];
  env?: Record<string, string>;
  /** Weight bytes read per decoded token, for the share of memory bandwidth. */
  weightBytes: number;
  /** Body fields that make this server produce exactly max_tokens tokens. */
  forceLength: Record<string, unknown>;
  /** Prompts go as token ids; false: as text of about that many tokens. */
  tokenPrompts: boolean;
  /** Name for the `model` field. */
  model: string;
}

export interface RunningServer extends ServerSpec {
  base: string;
  pid: number;
  /** Milliseconds from exec to the first 200 of /health. */
  readyMs: number;
  stop(): Promise<void>;
}

export async function freePort(): Promise<number> {
  const { promise, resolve, reject } = Promise.withResolvers<number>();
  const probe = createServer();
  probe.once("error", reject);
  probe.listen(0, "127.0.0.1", () => {
    const { port } = probe.address() as { port: number };
    probe.close(() => resolve(port));
  });
  return promise;
}

const START_LIMIT_MS = 600_000;
const STOP_LIMIT_MS = 15_000;

export async function startServer(spec: ServerSpec, logFile: string): Promise<RunningServer> {
  const port = await freePort();
  const log = openSync(logFile, "a");
  const begun = performance.now();
  const child = Bun.spawn(spec.command.map((word) => word.replaceAll("{port}", String(port))), {
    env: { ...process.env, ...spec.env },
    stdio: ["ignore", log, log],
  });
  const base = `http://127.0.0.1:${port}`;
  const stop = async () => {
    child.kill("SIGTERM");
    const ended = await Promise.race([child.exited.then(() => true), Bun.sleep(STOP_LIMIT_MS).then(() => false)]);
    if (!ended) child.kill("SIGKILL");
    await child.exited;
  };
  while (performance.now() - begun < START_LIMIT_MS) {
    if (child.exitCode !== null) throw new Error(`${spec.name} ended with exit code ${child.exitCode} while starting; see ${logFile}`);
    const ok = await fetch(`${base}/health`, { signal: AbortSignal.timeout(2000) }).then((r) => r.status === 200, () => false);
    if (ok) return { ...spec, base, pid: child.pid, readyMs: performance.now() - begun, stop };
    await Bun.sleep(10);
  }
  await stop();
  throw new Error(`${spec.name} was not ready after ${START_LIMIT_MS / 1000} s; see ${logFile}`);
}
