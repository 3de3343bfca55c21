import type { OpenRequest } from "./open-request.ts";
import type { StepOutput } from "./types.ts";

/**
 * The generator that Engine.generate returns. An `async function*` would not do: its return() waits for the pending next(), so a
 * client that leaves while its request is queued would be noticed only at the first token. Here return() cancels at once.
 */
export class OutputStream implements AsyncGenerator<StepOutput, void, void> {
  #open: OpenRequest | null = null;
  #closed = false;

  constructor(
    /** Called by the first next(); what it throws rejects that next(). */
    private readonly admit: () => OpenRequest,
    private readonly cancel: (open: OpenRequest) => void,
    private readonly signal: AbortSignal | undefined,
  ) {}

  async next(): Promise<IteratorResult<StepOutput, void>> {
    if (this.#closed) return { done: true, value: undefined };
    const output = await this.#opened().take();
    if (output === null || this.#closed) {
      this.#close();
      return { done: true, value: undefined };
    }
    if (output.finishReason !== null) this.#close();
    return { done: false, value: output };
  }

  async return(): Promise<IteratorResult<StepOutput, void>> {
    this.#close();
    return { done: true, value: undefined };
  }

  async throw(error: unknown): Promise<IteratorResult<StepOutput, void>> {
    this.#close();
    throw error;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#close();
  }

  #opened(): OpenRequest {
    if (this.#open !== null) return this.#open;
    try {
      this.#open = this.admit();
    } catch (error) {
      this.#closed = true;
      throw error;
    }
    if (this.signal?.aborted) this.#onAbort();
    else this.signal?.addEventListener("abort", this.#onAbort, { once: true });
    return this.#open;
  }

  /** The engine answers a cancel with a last output, so a consumer that stays sees finishReason "cancelled". */
  readonly #onAbort = (): void => {
    if (this.#open !== null) this.cancel(this.#open);
  };

  /** Idempotent. Whatever is still running for this stream ends. */
  #close(): void {
    if (this.#closed) return;
    this.#closed = true;
    this.signal?.removeEventListener("abort", this.#onAbort);
    if (this.#open === null) return;
    this.cancel(this.#open);
    this.#open.discard();
  }
}
