import { EngineError } from "./errors.ts";
import { LS_PAGE_TOKENS } from "./native/abi.gen.ts";
import type { NativeBackend, PoolCounts } from "./native/backend.ts";
import type { Sequence } from "./sequence.ts";

/** Pages that hold `tokens` tokens. */
export function pagesFor(tokens: number): number {
  return Math.ceil(tokens / LS_PAGE_TOKENS);
}

/** New pages that a row needs beyond those it already holds. */
export function newPages(start: number, length: number): number {
  return pagesFor(start + length) - pagesFor(start);
}

/** The calls of the native pool that scheduling needs. */
export type PagePool = Pick<NativeBackend, "openSequence" | "closeSequence" | "poolStats">;

/**
 * Page arithmetic for the scheduler. Native owns pages, tables and the prefix tree; this mirror knows how many pages a step may take
 * and what a row needs. Opening and closing re-read the native counts (how many attached pages were evictable is known only there);
 * a step's effect is predicted and compared with the counts that its result carries.
 */
export class KvManager {
  #counts: PoolCounts;
  /** Grows whenever pages may have become free: a blocked admission is not tried again before. */
  releases = 0;

  constructor(
    private readonly pool: PagePool,
    private readonly options: { prefixCache: boolean; strict: boolean },
  ) {
    this.#counts = pool.poolStats();
  }

  get counts(): Readonly<PoolCounts> {
    return this.#counts;
  }
  /** Pages that a step may take: evictable ones count as free. */
  get available(): number {
    return this.#counts.free + this.#counts.cached;
  }
  get total(): number {
    return this.#counts.total;
  }

  /** Gives the sequence a slot and the longest cached prefix. */
  open(sequence: Sequence): void {
    const { slot, cachedTokens, start } = this.pool.openSequence(sequence.tokens, sequence.numTokens, sequence.cacheDomain);
    if (cachedTokens < 0 || start < cachedTokens || start >= sequence.numTokens) {
      throw new EngineError("engine", `ls_seq_open reported ${cachedTokens} cached tokens and start ${start} for ${sequence.numTokens} tokens`);
    }
    sequence.slot = slot;
    sequence.numAttached = cachedTokens;
    sequence.numComputed = start;
    this.sync();
  }

  /**
   * Takes the slot away. Its pages enter the prefix cache, except those of internal requests; cached pages that were attached at
   * open are in the tree already and stay there.
   */
  close(sequence: Sequence): void {
    const commit = !this.options.prefixCache ? 0 : sequence.internal ? sequence.numAttached : sequence.numComputed;
    const { slot } = sequence;
    sequence.slot = -1;
    sequence.numComputed = sequence.numAttached = 0;
    this.pool.closeSequence(slot, commit);
    this.releases++;
    this.sync();
  }

  /** Takes the native counts as they are. */
  sync(): void {
    this.#counts = this.pool.poolStats();
  }

  /** The counts of a step's result, after a step that took `taken` pages. */
  settle(result: { free: number; cached: number; held: number; total: number }, taken: number): void {
    const expected = this.available - taken;
    const { openSeqs, evictions } = this.#counts;
    this.#counts = { ...result, openSeqs, evictions };
    if (!this.options.strict) return;
    if (this.available !== expected || result.free + result.cached + result.held !== result.total) {
      throw new EngineError("engine", `page counts differ: expected ${expected} free or cached pages of ${result.total}, native reports free ${result.free}, cached ${result.cached}, held ${result.held}`);
    }
  }
}
