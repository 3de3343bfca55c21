import { logger } from "../../telemetry/log.ts";
import type { Work } from "../request-plane/work-handler.ts";

export interface CanaryOptions {
  /** The work of the endpoint that is watched. */
  work: Work;
  payload: Readonly<Record<string, unknown>>;
  /** Without a sign of life for this long, the canary asks. */
  waitMs: number;
  /** How long it waits for its token. */
  timeoutMs: number;
  onHealth: (ready: boolean) => void;
  /** Milliseconds; tests bring their own. */
  now?: () => number;
}

/** The marker by which every mode runs a request whole, and counts it nowhere. */
export const HEALTH_CHECK_KEY = "_HEALTH_CHECK";

/** One greedy token behind a single token. */
export const defaultPayload = (tokenId: number): Record<string, unknown> => ({
  token_ids: [tokenId],
  stop_conditions: { max_tokens: 1, ignore_eos: true },
  sampling_options: { temperature: 0 },
});

const log = logger("layerscale::dynamo::health");

/**
 * Asks the engine for a token in the way of a request, when nothing else has shown for a while that it works: a first time at once, so
 * that readiness does not wait for the first pause. The first item without an error is health; an error, no item or no answer in time is not.
 */
export class Canary {
  readonly #now: () => number;
  #lastSign: number;
  #healthy = false;
  #timer: ReturnType<typeof setTimeout> | null = null;
  #probe: AbortController | null = null;
  #probes = 0;
  /** Counts starts and stops: a probe that outlives its run says nothing. */
  #run = 0;

  constructor(readonly options: CanaryOptions) {
    this.#now = options.now ?? (() => performance.now());
    this.#lastSign = this.#now();
  }

  /** Resolves when the first probe has been judged. */
  async start(): Promise<void> {
    this.stop();
    const run = ++this.#run;
    await this.#ask(run);
    this.#arm(run);
  }

  /** Something was computed or answered. */
  sign(): void {
    this.#lastSign = this.#now();
    if (this.#timer !== null) this.#set(true);
  }

  stop(): void {
    this.#run++;
    if (this.#timer !== null) clearTimeout(this.#timer);
    this.#timer = null;
    this.#probe?.abort();
    this.#probe = null;
    this.#healthy = false;
  }

  #arm(run: number): void {
    if (run !== this.#run) return;
    const left = Math.max(1, this.#lastSign + this.options.waitMs - this.#now());
    this.#timer = setTimeout(() => void this.#due(run), left);
    this.#timer.unref();
  }

  async #due(run: number): Promise<void> {
    if (this.#now() - this.#lastSign >= this.options.waitMs) await this.#ask(run);
    this.#arm(run);
  }

  async #ask(run: number): Promise<void> {
    const probe = (this.#probe = new AbortController());
    const id = `canary-${++this.#probes}`;
    const late = Promise.withResolvers<string>();
    const timer = setTimeout(() => late.resolve(`no answer within ${this.options.timeoutMs} ms`), this.options.timeoutMs);
    const items = this.options.work({ ...this.options.payload, [HEALTH_CHECK_KEY]: true }, { id, headers: {}, metadata: {}, signal: probe.signal });
    const answer = items.next().then(
      (first) => (first.done ? "an answer without items" : null),
      (error: unknown) => (error instanceof Error ? error.message : String(error)),
    );
    const problem = await Promise.race([answer, late.promise]);
    clearTimeout(timer);
    // The rest of the answer is of no interest; the engine hears of it by the abort.
    probe.abort();
    void items.return().catch(() => {});
    if (run !== this.#run) return;
    this.#lastSign = this.#now();
    if (problem !== null) log.warn("health check failed", { requestId: id, problem });
    this.#set(problem === null);
  }

  #set(healthy: boolean): void {
    if (healthy === this.#healthy) return;
    this.#healthy = healthy;
    log.info("health changed", { ready: healthy });
    this.options.onHealth(healthy);
  }
}
