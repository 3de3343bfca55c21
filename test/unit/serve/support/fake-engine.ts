import { EngineError } from "../../../../src/engine/errors.ts";
import type { EngineInfo, EngineStats, FinishReason, GenerateRequest, StepOutput, TokenLogprob, Usage } from "../../../../src/engine/types.ts";
import type { ServingEngine } from "../../../../src/serve/serving.ts";
import type { FinishedSample, MetricsSource, StepSample } from "../../../../src/telemetry/metrics.ts";

/** What the fake model says to a prompt: token ids, an eos among them ends the answer. */
export type Script = (request: GenerateRequest) => readonly number[];

const INFO: EngineInfo = {
  device: "fake", isa: "none", threads: 1, pageTokens: 16, pages: 64, contextLength: 512, maxNumSeqs: 8, maxBatchTokens: 512,
  kvCacheDtype: "f32", prefixCache: true, weightBytes: 0, pageBytes: 0, memoryRule: "", loadSeconds: 0, transfer: null,
};

/** Behaves as the engine's face does: one token per step, ends once, an abort ends with "cancelled", leaving the loop cancels. */
export class FakeEngine implements ServingEngine, MetricsSource {
  readonly info: EngineInfo;
  readonly requests: GenerateRequest[] = [];
  readonly endings: FinishReason[] = [];
  running = 0;
  steps = 0;
  /** Tokens per output; above 1 as for a slow consumer. */
  tokensPerOutput = 1;
  /** Fails the running sequences with this at the next token. */
  failure: string | null = null;
  /** Tokens of a request before `failure` strikes it. */
  failAfter = 0;
  /** Refuses the next request with this. */
  refusal: EngineError | null = null;
  /** Logprobs of the chosen token and of its alternatives. */
  logprob: (step: number, rank: number) => number = (step, rank) => -0.25 * (step + 1) - rank;
  private gate: PromiseWithResolvers<void> | null = null;
  private finishListeners = new Set<(request: FinishedSample) => void>();
  private stepListeners = new Set<(step: StepSample) => void>();

  constructor(private readonly script: Script, info: Partial<EngineInfo> = {}) {
    this.info = { ...INFO, ...info };
  }

  /** No token comes until resume(). */
  pause(): void {
    this.gate = Promise.withResolvers();
  }
  resume(): void {
    this.gate?.resolve();
    this.gate = null;
  }

  stats(): EngineStats {
    return {
      running: this.running, waiting: 0, pagesTotal: 64, pagesFree: 64 - this.running, pagesCached: 0, pagesHeld: this.running,
      steps: this.steps, preemptions: 0, evictions: 0, stalls: 0, promptTokensComputed: 0, transfer: null,
    };
  }
  onFinish(listener: (request: FinishedSample) => void): () => void {
    this.finishListeners.add(listener);
    return () => void this.finishListeners.delete(listener);
  }
  onStep(listener: (step: StepSample) => void): () => void {
    this.stepListeners.add(listener);
    return () => void this.stepListeners.delete(listener);
  }

  async *generate(request: GenerateRequest, signal?: AbortSignal): AsyncGenerator<StepOutput> {
    if (this.refusal) throw this.refusal;
    this.requests.push(request);
    this.running++;
    const startedAt = performance.now();
    const usage: Usage = { promptTokens: request.promptTokenIds.length, completionTokens: 0, cachedTokens: 16 * Math.floor((request.promptTokenIds.length - 1) / 16) };
    let reason: FinishReason = "cancelled";
    try {
      const ids = this.script(request);
      const limit = Math.min(request.sampling.maxTokens ?? Infinity, this.info.contextLength - request.promptTokenIds.length);
      let output: StepOutput = this.output(usage);
      for (let step = 0; ; step++) {
        await this.turn(signal);
        if (signal?.aborted) {
          yield { ...this.output(usage), finishReason: "cancelled" };
          return;
        }
        if (this.failure !== null && usage.completionTokens >= this.failAfter) {
          reason = "error";
          yield { ...this.output(usage), finishReason: "error", error: this.failure };
          return;
        }
        const id = ids[step % ids.length] as number;
        usage.completionTokens++;
        output.tokenIds.push(id);
        if (request.sampling.logprobs !== null) (output.logprobs ??= []).push(this.logprobOf(step, id, request.sampling.logprobs));
        output.usage = { ...usage };
        const stops = request.eosTokenIds.includes(id) && !request.sampling.ignoreEos;
        if (stops || usage.completionTokens === limit) {
          reason = stops ? "stop" : "length";
          yield { ...output, finishReason: reason, stopTokenId: stops ? id : null };
          return;
        }
        if (output.tokenIds.length < this.tokensPerOutput) continue;
        yield output;
        output = this.output(usage);
      }
    } finally {
      this.running--;
      this.endings.push(reason);
      for (const listener of this.finishListeners)
        listener({ finishReason: reason, usage, internal: false, queuedMs: 1, ttftMs: usage.completionTokens > 0 ? 2 : null, durationMs: performance.now() - startedAt });
    }
  }

  private output(usage: Usage): StepOutput {
    return { tokenIds: [], logprobs: null, finishReason: null, stopTokenId: null, usage: { ...usage }, error: null };
  }

  private logprobOf(step: number, tokenId: number, count: number): TokenLogprob {
    const top = Array.from({ length: count }, (_, rank) => ({ tokenId: (tokenId + rank) % 256, logprob: this.logprob(step, rank) }));
    return { tokenId, logprob: this.logprob(step, 0), top };
  }

  /** One step of the engine: other work runs in between. */
  private async turn(signal?: AbortSignal): Promise<void> {
    const aborted = Promise.withResolvers<void>();
    signal?.addEventListener("abort", () => aborted.resolve(), { once: true });
    if (this.gate && !signal?.aborted) await Promise.race([this.gate.promise, aborted.promise]);
    else await new Promise((resolve) => setImmediate(resolve));
    this.steps++;
    for (const listener of this.stepListeners) listener({ stats: this.stats(), interTokenMs: [1] });
  }
}
