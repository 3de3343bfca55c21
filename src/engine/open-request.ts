import type { EngineError } from "./errors.ts";
import type { PackedOutput } from "./protocol.ts";
import type { FinishedRequest, GenerateRequest, StepOutput, TokenLogprob } from "./types.ts";

/**
 * One request on the main thread, between the engine's reports and its consumer. Outputs that a slow consumer has not taken yet are
 * merged into one, so a request never queues more than its own tokens; the last output is delivered exactly once.
 */
export class OpenRequest {
  readonly id: string;
  readonly internal: boolean;
  readonly #wantsLogprobs: boolean;
  readonly #promptTokens: number;
  #completionTokens = 0;
  #cachedTokens = 0;
  #queuedMs: number | null = null;
  #firstTokenAt: number | null = null;
  #lastTokenAt: number | null = null;
  #pending: StepOutput | null = null;
  #takers: PromiseWithResolvers<StepOutput | null>[] = [];
  /** Set by the engine's last output. */
  finished: FinishedRequest | null = null;
  cancelSent = false;

  constructor(
    readonly key: number,
    request: GenerateRequest,
    readonly submittedAt: number,
  ) {
    this.id = request.id;
    this.internal = request.internal ?? false;
    this.#wantsLogprobs = request.sampling.logprobs !== null;
    this.#promptTokens = request.promptTokenIds.length;
  }

  /** Takes one output of the engine in. Returns the time since the token before it, in ms, where there was one. */
  receive(output: PackedOutput, error: string | null, now: number): number | null {
    if (this.finished !== null) return null;
    const { token } = output;
    let interTokenMs: number | null = null;
    this.#cachedTokens = output.cachedTokens;
    this.#queuedMs ??= output.queuedMs;
    if (token !== null) {
      this.#completionTokens++;
      this.#firstTokenAt ??= now;
      if (this.#lastTokenAt !== null) interTokenMs = now - this.#lastTokenAt;
      this.#lastTokenAt = now;
    }
    const logprobs: TokenLogprob[] | null = !this.#wantsLogprobs ? null
      : token === null ? []
      : [{ tokenId: token, logprob: output.logprob, top: output.top.map(([tokenId, logprob]) => ({ tokenId, logprob })) }];
    this.#deliver({
      tokenIds: token === null ? [] : [token],
      logprobs,
      finishReason: output.finishReason,
      stopTokenId: output.finishReason === "stop" ? token : null,
      usage: this.#usage(),
      error: output.finishReason === "error" ? (error ?? "the engine failed") : null,
    }, now);
    return interTokenMs;
  }

  /** Ends the request because the engine is gone. */
  fail(error: EngineError, now: number): void {
    if (this.finished !== null) return;
    this.#deliver({ tokenIds: [], logprobs: this.#wantsLogprobs ? [] : null, finishReason: "error", stopTokenId: null, usage: this.#usage(), error: error.message }, now);
  }

  /** The next output; null after the last. */
  take(): Promise<StepOutput | null> {
    if (this.#pending !== null) {
      const output = this.#pending;
      this.#pending = null;
      return Promise.resolve(output);
    }
    if (this.finished !== null) return Promise.resolve(null);
    const taker = Promise.withResolvers<StepOutput | null>();
    this.#takers.push(taker);
    return taker.promise;
  }

  /** The consumer has gone: what is queued and what still comes is dropped. */
  discard(): void {
    this.#pending = null;
    for (const taker of this.#takers.splice(0)) taker.resolve(null);
  }

  #usage(): StepOutput["usage"] {
    return { promptTokens: this.#promptTokens, completionTokens: this.#completionTokens, cachedTokens: this.#cachedTokens };
  }

  #deliver(output: StepOutput, now: number): void {
    if (output.finishReason !== null) {
      this.finished = {
        id: this.id,
        finishReason: output.finishReason,
        usage: output.usage,
        internal: this.internal,
        queuedMs: this.#queuedMs,
        ttftMs: this.#firstTokenAt === null ? null : this.#firstTokenAt - this.submittedAt,
        durationMs: now - this.submittedAt,
      };
    }
    const taker = this.#takers.shift();
    if (taker !== undefined) taker.resolve(output);
    else this.#pending = this.#pending === null ? output : merge(this.#pending, output);
    if (this.finished !== null) for (const left of this.#takers.splice(0)) left.resolve(null);
  }
}

/** `later` follows `earlier`, which is ours to change. */
function merge(earlier: StepOutput, later: StepOutput): StepOutput {
  earlier.tokenIds.push(...later.tokenIds);
  if (later.logprobs !== null) earlier.logprobs?.push(...later.logprobs);
  return { ...later, tokenIds: earlier.tokenIds, logprobs: earlier.logprobs };
}
