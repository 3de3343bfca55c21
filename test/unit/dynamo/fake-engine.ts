import { EngineError } from "../../../src/engine/errors.ts";
import type { EngineInfo, EngineStats, FinishReason, GenerateRequest, KvEvent, KvSource, StepOutput, TokenLogprob, TransferReport } from "../../../src/engine/types.ts";
import type { FinishedSample, StepSample } from "../../../src/telemetry/metrics.ts";

export interface FakeOptions {
  vocab: number;
  contextLength: number;
  pages: number;
  maxNumSeqs: number;
  prefixCache: boolean;
  /** Pause before each token, in ms. */
  stepMs: number;
  /** The token after a context; default: a mix of seed, position and the last token. */
  next?: (request: GenerateRequest, context: readonly number[]) => number;
}

const PAGE = 16;

/** An engine of the real one's shape whose tokens are a hash of the context: fast, and the same every time. */
export class FakeEngine {
  readonly options: FakeOptions;
  readonly info: EngineInfo;
  readonly requests: GenerateRequest[] = [];
  readonly #finish = new Set<(r: FinishedSample) => void>();
  readonly #step = new Set<(s: StepSample) => void>();
  readonly #failure = new Set<(e: EngineError) => void>();
  readonly #transfer = new Set<(report: TransferReport) => void>();
  readonly #kv = new Set<(e: KvEvent[]) => void>();
  #running = 0;
  #held = 0;
  #steps = 0;
  #failed: EngineError | null = null;
  stopped = false;

  constructor(options: Partial<FakeOptions> = {}) {
    this.options = { vocab: 49152, contextLength: 2048, pages: 1000, maxNumSeqs: 64, prefixCache: false, stepMs: 0, ...options };
    const { contextLength, pages, maxNumSeqs, prefixCache } = this.options;
    this.info = {
      device: "cpu", isa: "fake", threads: 1, pageTokens: PAGE, pages, contextLength, maxNumSeqs, maxBatchTokens: 512, kvCacheDtype: "f32", prefixCache,
      weightBytes: 0, pageBytes: 0, memoryRule: "none", loadSeconds: 0, transfer: null,
    };
  }

  stats(): EngineStats {
    return {
      running: this.#running, waiting: 0, pagesTotal: this.options.pages, pagesFree: this.options.pages - this.#held, pagesCached: 0, pagesHeld: this.#held,
      steps: this.#steps, preemptions: 0, evictions: 0, stalls: 0, promptTokensComputed: 0, transfer: null,
    };
  }
  onFinish = (fn: (r: FinishedSample) => void) => this.#add(this.#finish, fn);
  onStep = (fn: (s: StepSample) => void) => this.#add(this.#step, fn);
  onFailure = (fn: (e: EngineError) => void) => this.#add(this.#failure, fn);
  onTransfer = (fn: (report: TransferReport) => void) => this.#add(this.#transfer, fn);
  readonly dropped: KvSource[] = [];
  readonly released: bigint[] = [];
  dropCopy(source: KvSource): void {
    this.dropped.push(source);
  }
  releaseCopy(copy: bigint): void {
    this.released.push(copy);
  }
  onKvEvents = (fn: (e: KvEvent[]) => void) => this.#add(this.#kv, fn);
  #add<T>(set: Set<T>, fn: T): () => void {
    set.add(fn);
    return () => void set.delete(fn);
  }

  emitKv(events: KvEvent[]): void {
    for (const fn of this.#kv) fn(events);
  }
  fail(message: string): void {
    this.#failed = new EngineError("engine", message);
    for (const fn of this.#failure) fn(this.#failed);
  }

  async *generate(request: GenerateRequest, signal?: AbortSignal): AsyncGenerator<StepOutput> {
    this.requests.push(request);
    const { vocab, contextLength, stepMs } = this.options;
    const prompt = Array.from(request.promptTokenIds);
    const bad = prompt.find((id) => id >= vocab);
    if (bad !== undefined) throw new EngineError("invalid", `token id ${bad} is outside the vocabulary of ${vocab}`, null, "vocabulary");
    if (prompt.length >= contextLength) throw new EngineError("invalid", `prompt of ${prompt.length} tokens does not fit the context length of ${contextLength}`, null, "context_length_exceeded");
    const room = contextLength - prompt.length;
    const limit = Math.min(request.sampling.maxTokens ?? room, room);
    const pages = Math.ceil((prompt.length + limit) / PAGE);
    const startedAt = performance.now();
    this.#running += 1;
    this.#held += pages;
    const usage = { promptTokens: prompt.length, completionTokens: 0, cachedTokens: 0 };
    let reason: FinishReason = "cancelled";
    const context = [...prompt];
    try {
      for (;;) {
        await new Promise<void>((resolve) => (stepMs === 0 ? setImmediate(resolve) : setTimeout(resolve, stepMs)));
        if (this.#failed) {
          reason = "error";
          yield { tokenIds: [], logprobs: null, finishReason: "error", stopTokenId: null, usage: { ...usage }, error: this.#failed.message };
          return;
        }
        if (signal?.aborted) {
          yield { tokenIds: [], logprobs: null, finishReason: "cancelled", stopTokenId: null, usage: { ...usage }, error: null };
          return;
        }
        const id = this.options.next?.(request, context) ?? this.#hash(request, context);
        context.push(id);
        usage.completionTokens += 1;
        this.#steps += 1;
        const stops = request.stopTokenIds.includes(id) || (!request.sampling.ignoreEos && request.eosTokenIds.includes(id));
        const end: FinishReason | null = stops ? "stop" : usage.completionTokens >= limit ? "length" : null;
        if (end) reason = end;
        for (const fn of this.#step) fn({ stats: this.stats(), interTokenMs: [] });
        yield {
          tokenIds: [id], logprobs: request.sampling.logprobs === null ? null : [this.#logprob(id, request.sampling.logprobs)],
          finishReason: end, stopTokenId: stops ? id : null, usage: { ...usage }, error: null,
        };
        if (end) return;
      }
    } finally {
      this.#running -= 1;
      this.#held -= pages;
      const durationMs = performance.now() - startedAt;
      for (const fn of this.#finish) fn({ finishReason: reason, usage, internal: request.internal ?? false, queuedMs: 0, ttftMs: 1, durationMs });
    }
  }
  #hash(request: GenerateRequest, context: readonly number[]): number {
    const seed = request.sampling.temperature === 0 ? 0n : (request.sampling.seed ?? BigInt(Math.floor(Math.random() * 1e9)));
    const mixed = Bun.hash.wyhash(new Uint8Array(Uint32Array.from(context).buffer), BigInt.asUintN(64, seed));
    return 100 + Number(mixed % BigInt(Math.max(1, this.options.vocab - 100)));
  }
  #logprob(tokenId: number, top: number): TokenLogprob {
    return { tokenId, logprob: -0.1, top: Array.from({ length: top }, (_, i) => ({ tokenId: i === 0 ? tokenId : 200 + i, logprob: i === 0 ? -0.1 : -3 - i })) };
  }

  async drain(): Promise<boolean> {
    return this.#running === 0;
  }
  async stop(): Promise<void> {
    this.stopped = true;
  }
}
