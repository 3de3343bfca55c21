import type { EngineError } from "./errors.ts";
import type { PackedOutput } from "./protocol.ts";
import type { FinishedRequest, GenerateRequest, Refusal, StepOutput } from "./types.ts";

interface RequestError {
  message: string;
  refusal: Refusal | null;
}


/**
 * One request on the main thread, between the engine's reports and its consumer. Outputs that were not taken yet (a slow consumer, or
 * several steps reported at once) are merged into one, so a request never queues more than its own tokens; the last output is
 * delivered exactly once.
 */
export class OpenRequest {
  readonly id: string;
  readonly internal: boolean;
  readonly #wantsLogprobs: boolean;
  readonly #promptTokens: number;
  /** Its one token shows that the prompt is computed; whoever fetches the copy samples it again. */
  readonly #stage: boolean;
  #completionTokens = 0;
  #cachedTokens = 0;
  #queuedMs: number | null = null;
  #firstTokenAt: number | null = null;
  #lastTokenAt: number | null = null;
  #pending: StepOutput | null = null;
  readonly #takers: PromiseWithResolvers<StepOutput | null>[] = [];
  /** Set by the engine's last output. */
  finished: FinishedRequest | null = null;
  cancelSent = false;
  /** A staged copy that no consumer has been told of. */
  copy: bigint | null = null;
  /** Nobody takes outputs any more. */
  discarded = false;

  constructor(
    readonly key: number,
    request: GenerateRequest,
    readonly submittedAt: number,
  ) {
    this.id = request.id;
    this.internal = request.internal ?? false;
    this.#wantsLogprobs = request.sampling.logprobs !== null;
    this.#promptTokens = request.promptTokenIds.length;
    this.#stage = request.stage ?? false;
  }

  /**
   * Takes one output of the engine in; release() hands it on. Returns the time since the token before it, in ms, where there was one.
   */
  receive(output: PackedOutput, error: RequestError | null, now: number, staged: bigint | null = null): number | null {
    if (this.finished !== null) return null;
    const { token, finishReason } = output;
    let interTokenMs: number | null = null;
    this.#cachedTokens = output.cachedTokens;
    this.#queuedMs ??= output.queuedMs;
    const pending = this.#open();
    if (token !== null) this.#firstTokenAt ??= now;
    if (token !== null && !this.#stage) {
      this.#completionTokens++;
      if (this.#lastTokenAt !== null) interTokenMs = now - this.#lastTokenAt;
      this.#lastTokenAt = now;
      pending.tokenIds.push(token);
      pending.logprobs?.push({ tokenId: token, logprob: output.logprob, top: output.top.map(([tokenId, logprob]) => ({ tokenId, logprob })) });
    }
    pending.usage.completionTokens = this.#completionTokens;
    pending.usage.cachedTokens = this.#cachedTokens;
    if (finishReason !== null) {
      if (finishReason === "stop") pending.stopTokenId = token;
      pending.refusal = error?.refusal ?? null;
      pending.staged = this.copy = staged;
      this.#finish(pending, finishReason, finishReason === "error" ? (error?.message ?? "the engine failed") : null, now);
    }
    return interTokenMs;
  }

  /** Ends the request because the engine is gone. */
  fail(error: EngineError, now: number): void {
    if (this.finished === null) this.#finish(this.#open(), "error", error.message, now);
    this.release();
  }

  /** Gives what was received to a consumer that waits for it. */
  release(): void {
    if (this.#pending !== null && this.#takers.length > 0) {
      this.#takers.shift()!.resolve(this.#hand());
    }
    if (this.finished !== null) for (const left of this.#takers.splice(0)) left.resolve(null);
  }

  /** The next output; null after the last. */
  take(): Promise<StepOutput | null> {
    if (this.#pending !== null) return Promise.resolve(this.#hand());
    if (this.finished !== null) return Promise.resolve(null);
    const taker = Promise.withResolvers<StepOutput | null>();
    this.#takers.push(taker);
    return taker.promise;
  }

  /** The consumer has gone: what is queued and what still comes is dropped. */
  discard(): void {
    this.discarded = true;
    this.#pending = null;
    for (const taker of this.#takers.splice(0)) taker.resolve(null);
  }

  #hand(): StepOutput | null {
    const output = this.#pending;
    this.#pending = this.copy = null;
    return output;
  }

  #open(): StepOutput {
    return (this.#pending ??= {
      tokenIds: [], logprobs: this.#wantsLogprobs ? [] : null, finishReason: null, stopTokenId: null,
      usage: { promptTokens: this.#promptTokens, completionTokens: this.#completionTokens, cachedTokens: this.#cachedTokens },
      error: null,
    });
  }

  #finish(output: StepOutput, finishReason: NonNullable<StepOutput["finishReason"]>, error: string | null, now: number): void {
    output.finishReason = finishReason;
    output.error = error;
    this.finished = {
      id: this.id,
      finishReason,
      usage: output.usage,
      internal: this.internal,
      queuedMs: this.#queuedMs,
      ttftMs: this.#firstTokenAt === null ? null : this.#firstTokenAt - this.submittedAt,
      durationMs: now - this.submittedAt,
    };
  }
}
