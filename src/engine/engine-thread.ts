import { dlopen, type Pointer } from "bun:ffi";
import { MessageChannel, receiveMessageOnPort, Worker, type MessagePort } from "node:worker_threads";
import { within } from "../util/within.ts";
import { EngineError } from "./errors.ts";
import { symbols } from "./native/abi.gen.ts";
import type { Command, EngineWorkerData, Report } from "./protocol.ts";
import type { EngineOptions, EngineStartOptions, LoadProgress } from "./types.ts";

const REPACK_POLL_MS = 100;
/** Reports taken in one turn of the event loop. Enough to catch up with any engine, and other work still gets its turn. */
const MAX_REPORTS = 64;
/** A step in flight may be long; after this the Worker is ended from outside. */
const STOP_WAIT_MS = 15_000;

/** The engine Worker seen from the main thread: commands out, reports in. */
export class EngineThread {
  readonly #worker: Worker;
  readonly #port: MessagePort;
  readonly #signal = new Int32Array(new SharedArrayBuffer(4));
  readonly #exited = Promise.withResolvers<void>();
  readonly #libraryPath: string;
  #poll: ReturnType<typeof setInterval> | null = null;
  #stopping: Promise<void> | null = null;
  #gone = false;

  constructor(
    options: EngineOptions,
    start: EngineStartOptions,
    /** In order; all that had come when this thread got to it, so that a busy thread catches up instead of falling further behind. */
    private readonly onReports: (reports: Report[]) => void,
    /** The Worker ended without having been told to. */
    private readonly onDeath: (error: EngineError) => void,
  ) {
    this.#libraryPath = options.libraryPath;
    const { port1, port2 } = new MessageChannel();
    this.#port = port1;
    port1.on("message", (first: Report) => {
      const reports = [first];
      while (reports.length < MAX_REPORTS) {
        const more = receiveMessageOnPort(port1);
        if (more === undefined) break;
        reports.push(more.message as Report);
      }
      this.#receive(reports, start.onProgress);
    });
    const workerData: EngineWorkerData = { kind: "layerscale-engine", options, checkPages: start.checkPages ?? false, stepsSubmitted: start.stepsSubmitted ?? null, port: port2, signal: this.#signal };
    // The program's own entry: one name that holds in development and in the compiled executable.
    this.#worker = new Worker(start.workerEntry ?? Bun.main, { workerData, transferList: [port2] });
    this.#worker.on("error", (error: unknown) => this.#died(`the engine thread failed: ${error instanceof Error ? error.message : String(error)}`));
    this.#worker.on("exit", (code) => {
      this.#died(`the engine thread ended with code ${code}`);
      this.#exited.resolve();
    });
  }

  /** Never blocks; the Worker sees it before its next step, or at once when it sleeps. */
  send(command: Command): void {
    if (this.#gone) return;
    this.#port.postMessage(command);
    Atomics.add(this.#signal, 0, 1);
    Atomics.notify(this.#signal, 0);
  }

  /** Ends the Worker after it has destroyed the native engine. Idempotent, bounded. */
  stop(): Promise<void> {
    return (this.#stopping ??= this.#stop());
  }

  async #stop(): Promise<void> {
    this.#stopPolling();
    this.send({ kind: "stop" });
    if (!(await within(this.#exited.promise, STOP_WAIT_MS))) await this.#worker.terminate();
    this.#gone = true;
    this.#port.close();
  }

  #receive(reports: Report[], onProgress: EngineStartOptions["onProgress"]): void {
    for (const report of reports) {
      this.#stopPolling();
      if (report.kind !== "progress") continue;
      const { progress, handle } = report;
      onProgress?.(progress);
      if (progress.phase === "repack" && progress.percent === 0 && handle !== null && onProgress !== undefined) this.#pollRepack(handle, progress, onProgress);
    }
    this.onReports(reports);
  }

  /** The Worker blocks while weights are repacked; ls_load_progress may be asked from here. It keeps the engine until told to stop. */
  #pollRepack(handle: number, progress: LoadProgress, onProgress: (progress: LoadProgress) => void): void {
    const { ls_load_progress } = symbols;
    const library = dlopen(this.#libraryPath, { ls_load_progress });
    this.#poll = setInterval(() => {
      const permille = library.symbols.ls_load_progress(handle as Pointer);
      if (permille > 0) onProgress({ ...progress, percent: permille / 10 });
    }, REPACK_POLL_MS);
  }

  #stopPolling(): void {
    if (this.#poll !== null) clearInterval(this.#poll);
    this.#poll = null;
  }

  #died(message: string): void {
    if (this.#gone) return;
    this.#gone = true;
    this.#stopPolling();
    if (this.#stopping === null) this.onDeath(new EngineError("engine", message));
  }
}
