import { receiveMessageOnPort, workerData } from "node:worker_threads";
import { monotonicMs } from "../util/clock.ts";
import { EngineError } from "./errors.ts";
import { loadEngine, openTransfer, planPool } from "./loader.ts";
import { EngineLoop } from "./loop.ts";
import type { NativeBackend } from "./native/backend.ts";
import { FfiBackend } from "./native/ffi-backend.ts";
import type { Command, EngineWorkerData, Report } from "./protocol.ts";
import { maxBatchTokens } from "./step-budget.ts";
import { StepPlan } from "./step-plan.ts";
import type { EngineOptions } from "./types.ts";

/** After a failure the native engine stays until the main thread has let go of its address, or this long. */
const STOP_WAIT_MS = 10_000;

export type CreateBackend = (options: EngineOptions, batchTokens: number) => NativeBackend;

/** The engine Worker's whole life. Returns when the engine is destroyed; the Worker then ends by itself. */
export function runEngineWorker(createBackend: CreateBackend = (options, batchTokens) => new FfiBackend(options, batchTokens)): void {
  const data = workerData as EngineWorkerData;
  const { options, port } = data;
  const post = (report: Report): void => port.postMessage(report);
  let backend: NativeBackend | null = null;
  let loop: EngineLoop | null = null;
  try {
    const pool = planPool(options);
    const created = (backend = createBackend(options, maxBatchTokens(options)));
    const plan = new StepPlan(options.maxNumSeqs, maxBatchTokens(options));
    const loaded = loadEngine(created, options, pool, plan, (progress) => post({ kind: "progress", progress, handle: created.handle }));
    const transfer = openTransfer(created, options, loaded);
    const info = { ...loaded, transfer: transfer && { port: transfer.native.port, layout: transfer.native.layout(), capBytes: transfer.capBytes } };
    loop = new EngineLoop(created, plan, data, info.contextLength, monotonicMs, transfer);
    post({ kind: "ready", info, stats: loop.stats() });
    loop.run();
  } catch (error) {
    post(fatal(error, loop));
    awaitStop(data);
  }
  backend?.destroy();
  post({ kind: "stopped" });
  port.close();
}

function fatal(error: unknown, loop: EngineLoop | null): Report {
  const message = error instanceof Error ? error.message : String(error);
  const known = error instanceof EngineError ? error : new EngineError("engine", message);
  return { kind: "fatal", errorKind: known.kind, message, param: known.param, code: known.code, stats: loop?.stats() ?? null };
}

function awaitStop({ port, signal }: EngineWorkerData): void {
  const deadline = monotonicMs() + STOP_WAIT_MS;
  for (let left = STOP_WAIT_MS; left > 0; left = deadline - monotonicMs()) {
    const seen = Atomics.load(signal, 0);
    for (let received = receiveMessageOnPort(port); received !== undefined; received = receiveMessageOnPort(port)) {
      if ((received.message as Command).kind === "stop") return;
    }
    Atomics.wait(signal, 0, seen, left);
  }
}
