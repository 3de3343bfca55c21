import { int32Words, splitU64 } from "../util/words.ts";
import type { FinishReason, SamplingParams } from "./types.ts";

export type SequenceStatus = "waiting" | "running" | "finished";

export interface SequenceInit {
  /** Unique in the engine. */
  key: number;
  /** (promptLength) ids; copied. */
  prompt: ArrayLike<number>;
  sampling: Omit<SamplingParams, "seed"> & { seed: bigint };
  eosTokenIds: readonly number[];
  stopTokenIds: readonly number[];
  priority: number;
  cacheDomain: bigint;
  internal: boolean;
  /** When the caller handed it in; ms of the loop's clock. */
  submittedAt: number;
}

/**
 * One request inside the engine: its tokens and how far they have been computed.
 *
 *   [0, numAttached) pages shared with the prefix cache · [numAttached, numComputed) pages of its own · [numComputed, numTokens) to compute
 *
 * There is no prefill or decode phase: a step computes the next chunk of [numComputed, numTokens), and the chunk that reaches
 * numTokens samples one more token. A preempted sequence keeps its tokens and starts again from what the cache still has.
 */
export class Sequence {
  readonly key: number;
  readonly promptLength: number;
  readonly sampling: SequenceInit["sampling"];
  /** The seed as two int32 words: a step packs them without touching a bigint. */
  readonly seedWords: readonly [low: number, high: number];
  readonly priority: number;
  readonly cacheDomain: bigint;
  readonly internal: boolean;
  readonly submittedAt: number;
  /** Set by the scheduler: order of arrival, kept over preemption. */
  arrival = 0;
  status: SequenceStatus = "waiting";
  finishReason: FinishReason | null = null;
  /** Native sequence index while running, else -1. */
  slot = -1;
  numTokens: number;
  numComputed = 0;
  /** Tokens whose pages came from the prefix cache at the last opening. */
  numAttached = 0;
  /** Prompt tokens found in the prefix cache at the first admission. */
  numCached = 0;
  preemptions = 0;
  /** When it was first part of a step; null before. ms of the loop's clock. */
  admittedAt: number | null = null;
  readonly #eos: readonly number[];
  readonly #stops: readonly number[];
  #tokens: Int32Array;

  constructor(init: SequenceInit) {
    this.key = init.key;
    this.promptLength = this.numTokens = init.prompt.length;
    this.sampling = init.sampling;
    this.seedWords = splitU64(init.sampling.seed);
    this.priority = init.priority;
    this.cacheDomain = init.cacheDomain;
    this.internal = init.internal;
    this.submittedAt = init.submittedAt;
    this.#eos = init.sampling.ignoreEos ? [] : init.eosTokenIds;
    this.#stops = init.stopTokenIds;
    this.#tokens = int32Words(Math.max(64, init.prompt.length + 16));
    this.#tokens.set(init.prompt);
  }

  /** (numTokens, and room to grow) prompt and generated ids; native may read it. Replaced when it grows. */
  get tokens(): Int32Array {
    return this.#tokens;
  }
  /** Tokens still to compute before the next one can be sampled. */
  get pending(): number {
    return this.numTokens - this.numComputed;
  }
  get numGenerated(): number {
    return this.numTokens - this.promptLength;
  }

  append(token: number): void {
    if (this.numTokens === this.#tokens.length) {
      const grown = int32Words(this.#tokens.length * 2);
      grown.set(this.#tokens);
      this.#tokens = grown;
    }
    this.#tokens[this.numTokens++] = token;
  }

  endsWith(token: number): boolean {
    return this.#eos.includes(token) || this.#stops.includes(token);
  }
}

/** Who runs first: higher priority, then earlier arrival. Negative when a goes before b. */
export function byRank(a: Sequence, b: Sequence): number {
  return b.priority - a.priority || a.arrival - b.arrival;
}
