import { receiveMessageOnPort } from "node:worker_threads";
import { int32Words } from "../util/words.ts";
import { EngineError } from "./errors.ts";
import { KvManager } from "./kv-manager.ts";
import { ls_status } from "./native/abi.gen.ts";
import { NativeError, type NativeBackend } from "./native/backend.ts";
import type { NativeTransfer } from "./native/transfer.ts";
import { noteOf, type TransferNote } from "./pulls.ts";
import { packOutputs, type Command, type EngineWorkerData, type Report } from "./protocol.ts";
import { Scheduler, type SequenceOutput } from "./scheduler.ts";
import { Sequence } from "./sequence.ts";
import { MAX_STEPS_SUBMITTED, StepPipeline } from "./step-pipeline.ts";
import type { StepPlan } from "./step-plan.ts";
import type { EngineStats, Refusal, TransferCounts } from "./types.ts";

/** Work queued and no step possible for this long is a failure, not silence. */
const STALL_MS = 5000;
/** Longest sleep: commands wake the Worker at once, this only bounds every wait. */
const SLEEP_MS = 1000;
const STALL_RETRY_MS = 20;
/** How soon the end of a pull is noticed by a thread that has nothing else to do, and that of a copy. */
const PULL_POLL_MS = 1;
const COPY_POLL_MS = 25;

/**
 * The engine thread: schedule, submit, wait, apply, report. A device that queues steps has the next one by the time the thread waits for
 * the one before. It never returns to an event loop: commands are taken from the port between steps, and the thread sleeps on the signal
 * word when there is nothing to do.
 */
export class EngineLoop {
  readonly scheduler: Scheduler;
  readonly #pipeline: StepPipeline;
  readonly #sequences = new Map<number, Sequence>();
  readonly #events = int32Words(16384);
  /** Not yet reported: from cancels and refusals between steps. */
  #outputs: SequenceOutput[] = [];
  #errors: [number, string, Refusal | null][] = [];
  #staged: [number, bigint][] = [];
  /** Ends of copies. */
  #notes: TransferNote[] = [];
  /** Published copies whose end has not been told. */
  #copies = 0;
  #counts: TransferCounts | null = null;
  /** Running sequences when stats were told last. */
  #toldRunning = 0;
  #stalls = 0;
  #stalledSince: number | null = null;
  #settled = true;
  #paused = false;
  #stopping = false;

  constructor(
    private readonly backend: NativeBackend,
    plan: StepPlan,
    private readonly data: EngineWorkerData,
    contextLength: number,
    private readonly clock: () => number,
    private readonly transfer: { native: NativeTransfer; capBytes: number } | null = null,
  ) {
    const { chunkedPrefillSize, maxNumSeqs, prefixCache } = data.options;
    const kv = new KvManager(backend, { prefixCache, strict: data.checkPages }, transfer?.native ?? null);
    this.#counts = transfer?.native.stats() ?? null;
    this.scheduler = new Scheduler(kv, { chunkedPrefillSize, maxNumSeqs, contextLength });
    const depth = data.stepsSubmitted ?? (backend.device.queues ? MAX_STEPS_SUBMITTED : 1);
    this.#pipeline = new StepPipeline(backend, plan, this.scheduler, { depth, strict: data.checkPages }, clock);
  }

  /** Until a stop command. Throws when the device fails or the scheduler stalls. */
  run(): void {
    for (;;) {
      const seen = Atomics.load(this.data.signal, 0);
      this.#takeCommands();
      this.#takeTransfers();
      if (this.#stopping) break;
      const rows = this.#paused ? [] : this.scheduler.schedule();
      for (const { sequence, refusal, message } of this.scheduler.refused.splice(0)) {
        this.#errors.push([sequence.key, message, refusal]);
        this.#emit({ sequence, token: null, logprob: 0, top: [], finishReason: "error" });
      }
      if (rows.length > 0) {
        this.#stalledSince = null;
        this.#settled = false;
      }
      const submitted = rows.length > 0 && this.#pipeline.submit(rows);
      if (submitted ? this.#pipeline.full : this.#pipeline.busy) this.#complete();
      else if (rows.length === 0) this.#rest(seen);
    }
    for (const sequence of this.#sequences.values()) this.#end(sequence, "error", "the engine is stopping");
    this.#publish();
  }

  /** Takes the result of the oldest submitted step in. */
  #complete(): void {
    for (const output of this.#pipeline.complete()) this.#emit(output);
    this.#publish();
  }

  /** Nothing to run: report what is pending, then sleep until the next command. */
  #rest(seen: number): void {
    // A sequence that is pulled holds pages before any step.
    if (this.#outputs.length + this.scheduler.pulls.notes.length + this.#notes.length > 0 || this.scheduler.running.length !== this.#toldRunning) this.#publish();
    const { pulling } = this.scheduler;
    const sleepMs = pulling ? PULL_POLL_MS : this.#copies > 0 ? COPY_POLL_MS : SLEEP_MS;
    if (this.#paused || pulling) {
      this.#stalledSince = null;
      Atomics.wait(this.data.signal, 0, seen, sleepMs);
      return;
    }
    if (this.scheduler.hasWork) {
      const now = this.clock();
      this.#stalledSince ??= now;
      if (now - this.#stalledSince >= STALL_MS) {
        this.#stalls++;
        const { available, total } = this.scheduler.kv;
        throw new EngineError("engine", `no step possible for ${STALL_MS} ms: ${this.scheduler.running.length} running, ${this.scheduler.waiting.length} waiting, ${available} of ${total} pages free`);
      }
      Atomics.wait(this.data.signal, 0, seen, STALL_RETRY_MS);
      return;
    }
    if (!this.#settled) this.#checkIdle();
    Atomics.wait(this.data.signal, 0, seen, sleepMs);
  }

  /** Ends of pulls and copies. Asked for only while there can be some. */
  #takeTransfers(): void {
    if (this.transfer === null || (this.#copies === 0 && !this.scheduler.pulling)) return;
    for (const event of this.transfer.native.events()) {
      if (event.slot >= 0) {
        this.#settled = false;
        this.scheduler.pullEnded(event);
        continue;
      }
      this.#copies--;
      this.#notes.push(noteOf(event, null, false));
    }
  }

  /** Once per return to idle: nothing may hold a page. */
  #checkIdle(): void {
    this.#settled = true;
    if (!this.data.checkPages) return;
    this.backend.checkPool();
    const { free, cached, held, total, openSeqs } = this.backend.poolStats();
    if (held !== 0 || openSeqs !== 0 || free + cached !== total) {
      throw new EngineError("engine", `idle, but ${openSeqs} sequences are open: free ${free}, cached ${cached}, held ${held} of ${total} pages`);
    }
  }

  #takeCommands(): void {
    for (let received = receiveMessageOnPort(this.data.port); received !== undefined; received = receiveMessageOnPort(this.data.port)) {
      const command = received.message as Command;
      switch (command.kind) {
        case "add":
          this.#add(command);
          break;
        case "cancel": {
          const sequence = this.#sequences.get(command.key);
          if (sequence !== undefined) this.#end(sequence, "cancelled");
          break;
        }
        case "clear":
          this.backend.clearCache();
          this.scheduler.kv.sync();
          this.#publish();
          this.#post({ kind: "done", id: command.id });
          break;
        case "pause":
          this.#paused = command.paused;
          while (this.#paused && this.#pipeline.busy) this.#complete();
          this.#post({ kind: "done", id: command.id });
          break;
        case "drop":
          this.scheduler.kv.drop(command.source);
          break;
        case "release":
          this.#release(command.copy);
          break;
        case "stop":
          this.#stopping = true;
          break;
      }
    }
  }

  #add(command: Command & { kind: "add" }): void {
    const sequence = new Sequence(command);
    this.#sequences.set(sequence.key, sequence);
    try {
      const full = sequence.stage ? this.#fullStaging() : null;
      if (full !== null) {
        this.#errors.push([sequence.key, full, "overloaded"]);
        return this.#emit({ sequence, token: null, logprob: 0, top: [], finishReason: "error" });
      }
      this.scheduler.add(sequence);
    } catch (error) {
      if (!(error instanceof EngineError) || error.kind !== "invalid") throw error;
      if (sequence.source !== null) this.scheduler.kv.drop(sequence.source);
      this.#errors.push([sequence.key, error.message, null]);
      this.#emit({ sequence, token: null, logprob: 0, top: [], finishReason: "error" });
    }
  }

  /** Why no prompt is taken for staging now. Copies of prompts that are queued or being computed do not count. */
  #fullStaging(): string | null {
    if (this.transfer === null) return null;
    const { native, capBytes } = this.transfer;
    const { staged, stagedBytes } = native.stats();
    return stagedBytes < capBytes ? null : `${staged} copies of KV wait for decode workers to fetch them, ${stagedBytes} bytes of at most ${capBytes}`;
  }

  /** A copy that is gone already has been told of. */
  #release(copy: bigint): void {
    try {
      this.transfer?.native.release(copy);
    } catch (error) {
      if (!(error instanceof NativeError) || error.status !== ls_status.LS_INVALID) throw error;
    }
  }

  #end(sequence: Sequence, finishReason: "cancelled" | "error", message?: string): void {
    const output = this.scheduler.abort(sequence, finishReason);
    if (output === null) return;
    if (message !== undefined) this.#errors.push([sequence.key, message, null]);
    this.#settled = false;
    this.#emit(output);
  }

  #emit(output: SequenceOutput): void {
    const { sequence } = output;
    if (output.finishReason !== null) this.#sequences.delete(sequence.key);
    if (sequence.copyId !== null) {
      this.#copies++;
      this.#staged.push([sequence.key, sequence.copyId]);
    }
    this.#outputs.push(output);
  }

  /** One message with everything since the last one. */
  #publish(): void {
    const counts = this.transfer?.native.stats() ?? null;
    // The network thread lets go of a cancelled pull a moment later, when nothing else may be told for long: what counts is who waits here.
    this.#counts = counts && { ...counts, pulls: this.scheduler.running.filter(({ pulling }) => pulling).length };
    this.#toldRunning = this.scheduler.running.length;
    const transfers = [...this.#notes, ...this.scheduler.pulls.notes.splice(0)];
    const report: Report = { kind: "step", stats: this.stats(), outputs: packOutputs(this.#outputs), errors: this.#errors, staged: this.#staged, transfers, events: this.#takeEvents() };
    this.#outputs = [];
    this.#errors = [];
    this.#staged = [];
    this.#notes = [];
    this.#post(report);
  }

  #takeEvents(): Int32Array | null {
    if (!this.data.options.prefixCache) return null;
    let events: Int32Array | null = null;
    for (let words = this.backend.drainEvents(this.#events); words > 0; words = this.backend.drainEvents(this.#events)) {
      const joined: Int32Array = new Int32Array((events?.length ?? 0) + words);
      if (events !== null) joined.set(events);
      joined.set(this.#events.subarray(0, words), joined.length - words);
      events = joined;
    }
    return events;
  }

  /** Internal requests are not counted as running or waiting. */
  stats(): EngineStats {
    const { running, waiting, kv, preemptions, promptTokensComputed } = this.scheduler;
    const { total, free, cached, held, evictions } = kv.counts;
    const external = (list: Sequence[]): number => list.reduce((sum, sequence) => sum + (sequence.internal ? 0 : 1), 0);
    return {
      running: external(running), waiting: external(waiting), pagesTotal: total, pagesFree: free, pagesCached: cached, pagesHeld: held,
      steps: this.#pipeline.steps, preemptions, evictions, stalls: this.#stalls, promptTokensComputed, transfer: this.#counts,
    };
  }

  #post(report: Report): void {
    this.data.port.postMessage(report);
  }
}
