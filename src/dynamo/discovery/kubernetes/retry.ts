import { ApiError } from "./errors.ts";

const FIRST_MS = 100;
const LONGEST_MS = 5_000;
/** Shortest time that a request is given, also at the very end. */
const SHORTEST_REQUEST_MS = 250;
const LONGEST_REQUEST_MS = 10_000;

/** Repeats requests that fail for a while, until a deadline. */
export class Retry {
  readonly #deadline: number;
  constructor(limitMs: number) {
    this.#deadline = performance.now() + limitMs;
  }

  /** Wait before the next try after so many failures: doubling, with a random part so that many workers do not come back at once. */
  static backoff(failures: number): number {
    return Math.min(FIRST_MS * 2 ** (failures - 1), LONGEST_MS) * (0.75 + Math.random() / 2);
  }

  /**
   * @param step gets the time its request may take, in milliseconds
   * @throws the error of the last try: at once when it is not transient
   */
  async run<T>(step: (limitMs: number) => Promise<T>, onRetry?: (error: unknown, waitMs: number) => void): Promise<T> {
    for (let failures = 1; ; failures++) {
      try {
        return await step(Math.min(LONGEST_REQUEST_MS, Math.max(SHORTEST_REQUEST_MS, this.#deadline - performance.now())));
      } catch (error) {
        if (!(error instanceof ApiError && error.transient)) throw error;
        const wait = Math.max(Retry.backoff(failures), error.retryAfterMs ?? 0);
        if (performance.now() + wait >= this.#deadline) throw error;
        onRetry?.(error, wait);
        await Bun.sleep(wait);
      }
    }
  }
}
