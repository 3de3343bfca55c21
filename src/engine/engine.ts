import { logger } from "../telemetry/log.ts";
import { monotonicMs } from "../util/clock.ts";
import { joinU64 } from "../util/words.ts";
import { within } from "../util/within.ts";
import { EngineError } from "./errors.ts";
import { EngineThread } from "./engine-thread.ts";
import { Listeners } from "./listeners.ts";
import { OpenRequest } from "./open-request.ts";
import { OutputStream } from "./output-stream.ts";
import type { TransferNote } from "./pulls.ts";
import { unpackEvents, unpackOutputs, type Command, type Report, type StepMessage } from "./protocol.ts";
import type {
  EngineInfo, EngineOptions, EngineStartOptions, EngineStats, FinishedRequest, GenerateRequest, KvEvent, KvSource, StepOutput, StepReport, TransferReport,
} from "./types.ts";
import { validateRequest } from "./validate-request.ts";

const log = logger("layerscale::engine");
/** A step in flight may be long; commands are taken between steps. */
const COMMAND_WAIT_MS = 60_000;

type EngineState = "loading" | "running" | "draining" | "stopped" | "failed";

/**
 * The engine as the rest of the program sees it. Requests go in by generate(); scheduling and device work happen in a Worker.
 * Every request ends exactly once: its last output carries a finishReason, whatever fails.
 */
export class Engine {
  #state: EngineState = "loading";
  #info: EngineInfo | null = null;
  #stats: EngineStats = { running: 0, waiting: 0, pagesTotal: 0, pagesFree: 0, pagesCached: 0, pagesHeld: 0, steps: 0, preemptions: 0, evictions: 0, stalls: 0, promptTokensComputed: 0, transfer: null };
  #failure: EngineError | null = null;
  #nextKey = 1;
  readonly #thread: EngineThread;
  readonly #open = new Map<number, OpenRequest>();
  readonly #started = Promise.withResolvers<void>();
  /** Commands that the Worker has not carried out yet. */
  readonly #asked = new Map<number, PromiseWithResolvers<void>>();
  #idle: PromiseWithResolvers<void> | null = null;
  readonly #onKvEvents = new Listeners<KvEvent[]>();
  readonly #onFailure = new Listeners<EngineError>();
  readonly #onFinish = new Listeners<FinishedRequest>();
  readonly #onStep = new Listeners<StepReport>();
  readonly #onTransfer = new Listeners<TransferReport>();
  /** Offered copies, and the requests they came from. */
  readonly #copies = new Map<bigint, string>();

  private constructor(private readonly options: EngineOptions, start: EngineStartOptions) {
    this.#thread = new EngineThread(options, start, (reports) => this.#receive(reports), (error) => this.#fail(error));
  }

  /** Loads weights, reserves the pool and warms up. Rejects with an EngineError that says what failed. */
  static async start(options: EngineOptions, start: EngineStartOptions = {}): Promise<Engine> {
    const engine = new Engine(options, start);
    await engine.#started.promise;
    return engine;
  }

  get info(): EngineInfo {
    if (this.#info === null) throw new EngineError("unavailable", "the engine is loading");
    return this.#info;
  }

  /** Accepts requests now. */
  get accepting(): boolean {
    return this.#state === "running";
  }

  /** After the last step. Requests that the Worker has not seen yet count as waiting. */
  stats(): EngineStats {
    let open = 0;
    for (const request of this.#open.values()) if (!request.internal) open++;
    return { ...this.#stats, waiting: Math.max(this.#stats.waiting, open - this.#stats.running) };
  }

  /**
   * Outputs of one request, one per step while the consumer keeps up (a slow one gets several steps merged). The first next() throws
   * EngineError "invalid" or "unavailable" when the request is refused. An abort ends it with finishReason "cancelled"; leaving the
   * loop, return() and throw() cancel it too. A failure of the engine ends it with finishReason "error".
   */
  generate(request: GenerateRequest, signal?: AbortSignal): AsyncGenerator<StepOutput, void, void> {
    return new OutputStream(() => this.#admit(request), (open) => this.#cancel(open), signal);
  }

  onKvEvents(listener: (events: KvEvent[]) => void): () => void {
    return this.#onKvEvents.add(listener);
  }
  /** Called once, when the engine is gone; at once when it has gone already. */
  onFailure(listener: (error: EngineError) => void): () => void {
    if (this.#failure !== null) listener(this.#failure);
    return this.#onFailure.add(listener);
  }
  onFinish(listener: (request: FinishedRequest) => void): () => void {
    return this.#onFinish.add(listener);
  }
  onStep(listener: (report: StepReport) => void): () => void {
    return this.#onStep.add(listener);
  }

  /** Once for each staged copy and each pull, when it has ended. */
  onTransfer(listener: (report: TransferReport) => void): () => void {
    return this.#onTransfer.add(listener);
  }

  /** Tells another engine that its copy will not be fetched: for a request that generate() never got. */
  dropCopy(source: KvSource): void {
    if (this.info.transfer !== null) this.#thread.send({ kind: "drop", source });
  }
  /** Frees a copy of this engine that nobody has been told of. */
  releaseCopy(copy: bigint): void {
    this.#thread.send({ kind: "release", copy });
  }

  /** Refuses new requests and waits for the open ones. Returns whether all ended in time. */
  async drain(timeoutMs: number): Promise<boolean> {
    if (this.#state === "running") this.#state = "draining";
    if (this.#open.size === 0) return true;
    this.#idle ??= Promise.withResolvers();
    await within(this.#idle.promise, timeoutMs);
    return this.#open.size === 0;
  }

  /** Ends open requests with "error", destroys the native engine, ends the Worker. Idempotent, bounded. */
  async stop(): Promise<void> {
    if (this.#state !== "failed") this.#state = "stopped";
    await this.#thread.stop();
    this.#endAll(new EngineError("unavailable", "the engine has stopped"));
  }

  /** Drops every cached page that no sequence holds. */
  async clearCache(): Promise<void> {
    await this.#ask("clear its cache", (id) => ({ kind: "clear", id }));
  }

  /** No step runs once this resolves, until resume(): sequences keep their pages, newcomers wait, cancels free theirs. Idempotent. */
  async pause(): Promise<void> {
    await this.#ask("pause", (id) => ({ kind: "pause", id, paused: true }));
  }

  /** Idempotent. */
  async resume(): Promise<void> {
    await this.#ask("resume", (id) => ({ kind: "pause", id, paused: false }));
  }

  /** Waits until the Worker has carried out a command. */
  async #ask(what: string, command: (id: number) => Command): Promise<void> {
    if (this.#state !== "running" && this.#state !== "draining") throw this.#refusal();
    const id = this.#nextKey++;
    const asked = Promise.withResolvers<void>();
    this.#asked.set(id, asked);
    this.#thread.send(command(id));
    const done = await within(asked.promise, COMMAND_WAIT_MS).finally(() => this.#asked.delete(id));
    if (!done) throw new EngineError("engine", `the engine did not ${what} within ${COMMAND_WAIT_MS} ms`);
    await asked.promise;
  }

  #admit(request: GenerateRequest): OpenRequest {
    if (this.#state !== "running") throw this.#refusal();
    const { contextLength, spec } = this.options;
    const prompt = validateRequest(request, { vocab: spec.vocab, contextLength, poolTokens: this.info.pages * this.info.pageTokens });
    if ((request.stage || request.pull) && this.info.transfer === null) throw new EngineError("invalid", "this engine does not exchange KV with others");
    const open = new OpenRequest(this.#nextKey++, request, monotonicMs());
    this.#open.set(open.key, open);
    this.#thread.send({
      kind: "add", key: open.key, prompt, sampling: { ...request.sampling, seed: request.sampling.seed ?? randomSeed() },
      eosTokenIds: [...request.eosTokenIds], stopTokenIds: [...request.stopTokenIds], priority: request.priority ?? 0,
      cacheDomain: request.cacheDomain ?? 0n, internal: open.internal, submittedAt: open.submittedAt,
      stage: request.stage ?? false, source: request.pull ?? null,
    });
    return open;
  }

  #cancel(open: OpenRequest): void {
    this.#releaseUntold(open);
    if (open.finished !== null || open.cancelSent) return;
    open.cancelSent = true;
    this.#thread.send({ kind: "cancel", key: open.key });
  }

  #releaseUntold(open: OpenRequest): void {
    if (open.copy === null) return;
    this.releaseCopy(open.copy);
    open.copy = null;
  }

  #refusal(): EngineError {
    if (this.#failure !== null) return new EngineError("engine", `the engine has failed: ${this.#failure.message}`);
    return new EngineError("unavailable", this.#state === "loading" ? "the engine is loading" : "the engine is stopping");
  }

  /** Outputs are handed on after the last report: what several steps made for a request then travels as one output. */
  #receive(reports: Report[]): void {
    const touched = new Set<OpenRequest>();
    const interTokenMs: number[] = [];
    let stepped = false;
    for (const report of reports) {
      switch (report.kind) {
        case "ready":
          this.#info = report.info;
          this.#stats = report.stats;
          if (this.#state === "loading") this.#state = "running";
          this.#started.resolve();
          break;
        case "step":
          stepped = true;
          this.#receiveStep(report, touched, interTokenMs);
          break;
        case "done":
          this.#asked.get(report.id)?.resolve();
          break;
        case "fatal":
          if (report.stats !== null) this.#stats = report.stats;
          this.#fail(new EngineError(report.errorKind, report.message, report.param, report.code));
          break;
        case "progress":
        case "stopped":
          break;
      }
    }
    for (const open of touched) open.release();
    if (stepped) this.#onStep.emit({ stats: this.stats(), interTokenMs });
  }

  #receiveStep({ stats, outputs, errors, staged, transfers, events }: StepMessage, touched: Set<OpenRequest>, interTokenMs: number[]): void {
    const now = monotonicMs();
    this.#stats = stats;
    // First, while the requests they belong to are known.
    for (const note of transfers) this.#onTransfer.emit(this.#transferReport(note));
    for (const output of unpackOutputs(outputs)) {
      const open = this.#open.get(output.key);
      if (open === undefined) continue;
      const error = errors.length === 0 ? null : (errors.find(([key]) => key === output.key) ?? null);
      const copy = staged.length === 0 ? null : (staged.find(([key]) => key === output.key)?.[1] ?? null);
      if (copy !== null) this.#copies.set(copy, open.id);
      const gap = open.receive(output, error && { message: error[1], refusal: error[2] }, now, copy);
      if (open.discarded) this.#releaseUntold(open);
      if (gap !== null && !open.internal) interTokenMs.push(gap);
      touched.add(open);
      if (open.finished !== null) this.#forget(open);
    }
    if (events !== null) this.#onKvEvents.emit(unpackEvents(events));
  }

  #transferReport({ key, id, outcome, bytes, micros, detail, fallback }: TransferNote): TransferReport {
    const requestId = (key === null ? this.#copies.get(id ?? -1n) : this.#open.get(key)?.id) ?? "";
    if (key === null && id !== null) this.#copies.delete(id);
    return { role: key === null ? "send" : "receive", requestId, transferId: id === null ? null : id.toString(), outcome, bytes, seconds: micros / 1e6, detail, fallback };
  }

  #forget(open: OpenRequest): void {
    this.#open.delete(open.key);
    if (open.finished !== null) this.#onFinish.emit(open.finished);
    if (this.#open.size === 0) {
      this.#idle?.resolve();
      this.#idle = null;
    }
  }

  #endAll(error: EngineError): void {
    for (const open of this.#open.values()) {
      open.fail(error, monotonicMs());
      this.#forget(open);
    }
    for (const asked of this.#asked.values()) asked.reject(error);
  }

  #fail(error: EngineError): void {
    if (this.#failure !== null) return;
    const loading = this.#state === "loading";
    this.#state = "failed";
    this.#failure = error;
    this.#stats = { ...this.#stats, running: 0, waiting: 0 };
    this.#endAll(error);
    void this.#thread.stop();
    if (loading) return this.#started.reject(error);
    log.error("the engine has failed", { error });
    this.#onFailure.emit(error);
  }
}

function randomSeed(): bigint {
  const words = crypto.getRandomValues(new Uint32Array(2));
  return joinU64(words[0]!, words[1]!);
}
