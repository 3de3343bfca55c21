import { EngineError } from "../../engine/errors.ts";
import type { EngineInfo, EngineStats, GenerateRequest, KvEvent, KvSource, StepOutput, TransferReport } from "../../engine/types.ts";
import type { FinishedSample, StepSample } from "../../telemetry/metrics.ts";
import type { ControlledEngine } from "../worker-engine.ts";

type Counters = Pick<EngineStats, "steps" | "preemptions" | "evictions" | "stalls" | "promptTokensComputed">;

/**
 * An engine whose weights can be exchanged. Listeners, counters and limits outlive an exchange; while it lasts, requests wait. Weights
 * never change under a sequence: an exchange needs that none is open.
 */
export class ReloadableEngine implements ControlledEngine {
  #inner: ControlledEngine;
  readonly #finish = new Set<(request: FinishedSample) => void>();
  readonly #step = new Set<(step: StepSample) => void>();
  readonly #kv = new Set<(events: KvEvent[]) => void>();
  readonly #transfer = new Set<(report: TransferReport) => void>();
  readonly #failure = new Set<(error: EngineError) => void>();
  #failed: EngineError | null = null;
  #undo: (() => void)[] = [];
  /** Of the engines before this one. */
  #past: Counters = { steps: 0, preemptions: 0, evictions: 0, stalls: 0, promptTokensComputed: 0 };
  #exchange: Promise<void> | null = null;
  #stopped = false;

  constructor(inner: ControlledEngine) {
    this.#inner = inner;
    this.#attach();
  }

  get info(): EngineInfo {
    return this.#inner.info;
  }
  stats(): EngineStats {
    const now = this.#inner.stats();
    const sum = Object.fromEntries(Object.entries(this.#past).map(([key, value]) => [key, value + now[key as keyof Counters]]));
    return { ...now, ...sum };
  }
  onFinish = (listener: (request: FinishedSample) => void) => add(this.#finish, listener);
  onStep = (listener: (step: StepSample) => void) => add(this.#step, listener);
  onKvEvents = (listener: (events: KvEvent[]) => void) => add(this.#kv, listener);
  onTransfer = (listener: (report: TransferReport) => void) => add(this.#transfer, listener);
  onFailure = (listener: (error: EngineError) => void) => {
    if (this.#failed !== null) listener(this.#failed);
    return add(this.#failure, listener);
  };

  generate(request: GenerateRequest, signal?: AbortSignal): AsyncGenerator<StepOutput> {
    return this.#exchange === null ? this.#inner.generate(request, signal) : this.#later(this.#exchange, request, signal);
  }
  pause(): Promise<void> {
    return this.#inner.pause();
  }
  resume(): Promise<void> {
    return this.#inner.resume();
  }
  clearCache(): Promise<void> {
    return this.#inner.clearCache();
  }
  dropCopy(source: KvSource): void {
    this.#inner.dropCopy(source);
  }
  releaseCopy(copy: bigint): void {
    this.#inner.releaseCopy(copy);
  }
  drain(timeoutMs: number): Promise<boolean> {
    return this.#inner.drain(timeoutMs);
  }
  async stop(): Promise<void> {
    this.#stopped = true;
    await this.#exchange;
    await this.#inner.stop();
  }

  /**
   * Ends the present engine and takes the one that `load` starts, paused; when that fails, the one that `restore` starts. Both at once
   * would need the memory of two.
   * @throws Error of `load`, with the restored engine in place; when `restore` fails too the engine has failed
   */
  async exchange(load: () => Promise<ControlledEngine>, restore: () => Promise<ControlledEngine>): Promise<void> {
    const done = Promise.withResolvers<void>();
    this.#exchange = done.promise;
    try {
      for (const undo of this.#undo.splice(0)) undo();
      await this.#inner.stop();
      const { steps, preemptions, evictions, stalls, promptTokensComputed } = this.stats();
      this.#past = { steps, preemptions, evictions, stalls, promptTokensComputed };
      let problem: unknown = null;
      const next = await load().catch((error: unknown) => {
        problem = error;
        return restore();
      });
      await next.pause();
      this.#inner = next;
      this.#attach();
      // The pages of the engine before are gone.
      for (const listener of this.#kv) listener([{ kind: "cleared" }]);
      if (problem !== null) throw problem;
    } catch (error) {
      if (this.#undo.length === 0) this.#fail(new EngineError("engine", `no engine after a reload of weights: ${(error as Error).message}`));
      throw error;
    } finally {
      this.#exchange = null;
      done.resolve();
      if (this.#stopped) await this.#inner.stop();
    }
  }

  async *#later(ready: Promise<void>, request: GenerateRequest, signal?: AbortSignal): AsyncGenerator<StepOutput> {
    const left = Promise.withResolvers<void>();
    const leave = () => left.resolve();
    signal?.addEventListener("abort", leave, { once: true });
    await Promise.race([ready, left.promise]);
    signal?.removeEventListener("abort", leave);
    if (signal?.aborted) throw new EngineError("unavailable", "the request was cancelled while weights were exchanged");
    yield* this.#inner.generate(request, signal);
  }

  #attach(): void {
    const inner = this.#inner;
    this.#undo = [
      inner.onFinish((request) => this.#finish.forEach((listener) => listener(request))),
      inner.onStep((step) => this.#step.forEach((listener) => listener({ ...step, stats: this.stats() }))),
      inner.onKvEvents((events) => this.#kv.forEach((listener) => listener(events))),
      inner.onTransfer((report) => this.#transfer.forEach((listener) => listener(report))),
      inner.onFailure((error) => this.#fail(error)),
    ];
  }
  #fail(error: EngineError): void {
    if (this.#failed !== null) return;
    this.#failed = error;
    this.#failure.forEach((listener) => listener(error));
  }
}

function add<T>(set: Set<T>, listener: T): () => void {
  set.add(listener);
  return () => void set.delete(listener);
}
