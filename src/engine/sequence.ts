import { int32Words, splitU64 } from "../util/words.ts";
import type { RowResult } from "./step-plan.ts";
import type { FinishReason, KvSource, SamplingParams } from "./types.ts";

/** A token that a submitted step samples: the device puts it in where the next step begins with it. */
export const UNKNOWN = -1;

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
  /** Ends at its first token; a copy of the prompt's KV is kept for another engine. */
  stage?: boolean;
  /** A copy of the prompt's KV that another engine keeps. */
  source?: KvSource | null;
}

/**
 * One request inside the engine: its tokens and how far they have been computed.
 *
 *   [0, numAttached) pages shared with the prefix cache · [numAttached, numComputed) pages of its own · [numComputed, numTokens) to compute
 *
 * There is no prefill or decode phase: a step computes the next chunk of [numComputed, numTokens), and the chunk that reaches
 * numTokens samples one more token. A preempted sequence keeps its tokens and starts again from what the cache still has.
 * A submitted step counts as computed, and the token it samples is UNKNOWN until its result has come.
 * Of a sequence that is pulled, all but the last token count as computed from its opening; no step may touch it until they have come.
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
  /** Includes tokens that a submitted step samples and that are not known yet. */
  numTokens: number;
  /** Includes what submitted steps compute. */
  numComputed = 0;
  /** The last so many tokens are UNKNOWN: submitted steps sample them. */
  unresolved = 0;
  /** Tokens whose pages came from the prefix cache at the last opening. */
  numAttached = 0;
  /** Prompt tokens that were not computed at the first admission: found in the prefix cache, or pulled. */
  numCached = 0;
  /** numCached is settled. */
  counted = false;
  readonly stage: boolean;
  /** Where the prompt's KV waits; null once it was fetched, or is not to be. */
  source: KvSource | null;
  /** Holds a slot and pages that a transfer fills: it cannot be computed yet. */
  pulling = false;
  /**
   * Shares nothing with the prefix cache, in neither direction. An id of a copy works once: who brings one again learns nothing from it,
   * nor from what the cache holds, and the prompt is computed whole.
   */
  isolated = false;
  /** Of the staged copy, when it is offered. */
  copyId: bigint | null = null;
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
    this.stage = init.stage ?? false;
    this.source = init.source ?? null;
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

  /** A step that samples was submitted. */
  expect(): void {
    this.append(UNKNOWN);
    this.unresolved++;
  }

  /** The oldest token that is not known yet. */
  resolve(token: number): void {
    this.#tokens[this.numTokens - this.unresolved--] = token;
  }

  /** Forgets tokens that nobody waits for any more. */
  forget(): void {
    this.numTokens -= this.unresolved;
    this.unresolved = 0;
  }

  /** Whether it ends with `numTokens` tokens, whatever they are. */
  fullAt(numTokens: number, contextLength: number): boolean {
    const { maxTokens } = this.sampling;
    return this.stage || (maxTokens !== null && numTokens - this.promptLength >= maxTokens) || numTokens >= contextLength;
  }

  /** Why it ends with this token as the last of `numTokens`; null = it goes on. */
  endOf(token: number, numTokens: number, contextLength: number): FinishReason | null {
    if (!this.stage && this.endsWith(token)) return "stop";
    return this.fullAt(numTokens, contextLength) ? "length" : null;
  }

  endsWith(token: number): boolean {
    return this.#eos.includes(token) || this.#stops.includes(token);
  }
}

/** What happened to one sequence: a new token, its end, or both. */
export interface SequenceOutput {
  sequence: Sequence;
  token: number | null;
  logprob: number;
  top: RowResult["top"];
  finishReason: FinishReason | null;
}

/** Who runs first: higher priority, then earlier arrival. Negative when a goes before b. */
export function byRank(a: Sequence, b: Sequence): number {
  return b.priority - a.priority || a.arrival - b.arrival;
}

/** Keeps the list by rank; newcomers usually go last. */
export function insertByRank(list: Sequence[], sequence: Sequence): void {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (byRank(list[middle]!, sequence) <= 0) low = middle + 1;
    else high = middle;
  }
  list.splice(low, 0, sequence);
}
