import { EngineError } from "./errors.ts";
import { LS_PAGE_TOKENS, ls_status } from "./native/abi.gen.ts";
import { type NativeBackend, NativeError, type PoolCounts } from "./native/backend.ts";
import type { NativeTransfer } from "./native/transfer.ts";
import type { Sequence } from "./sequence.ts";
import type { KvSource } from "./types.ts";

/** Pages that hold `tokens` tokens. */
export function pagesFor(tokens: number): number {
  return Math.ceil(tokens / LS_PAGE_TOKENS);
}

/** New pages that a row needs beyond those it already holds. */
export function newPages(start: number, length: number): number {
  return pagesFor(start + length) - pagesFor(start);
}

/** A cache domain that nothing is ever committed to. */
const ISOLATED = 0x69736f6c61746564n;

/** What became of an attempt to open a sequence that is pulled. */
export type PullAttempt =
  /** Pages are on their way. */
  | { kind: "pulling" }
  /** Everything was in the prefix cache. */
  | { kind: "ready" }
  /** Nothing was opened. layout: KV of another kind · pages: none free · source: the address is none */
  | { kind: "layout" | "pages" | "source"; text: string };

type StepCounts = Pick<PoolCounts, "free" | "cached" | "held" | "total">;

function check({ free, cached, held, total }: StepCounts, expected: number): void {
  if (free + cached === expected && free + cached + held === total) return;
  throw new EngineError("engine", `page counts differ: expected ${expected} free or cached pages of ${total}, native reports free ${free}, cached ${cached}, held ${held}`);
}

/** The calls of the native pool that scheduling needs. */
export type PagePool = Pick<NativeBackend, "openSequence" | "closeSequence" | "poolStats">;

/**
 * Page arithmetic for the scheduler. Native owns pages, tables and the prefix tree; this mirror knows how many pages a step may take
 * and what a row needs. Opening and closing re-read the native counts (how many attached pages were evictable is known only there);
 * a step's effect is predicted and compared with the counts after its submission and with those that its result carries.
 */
export class KvManager {
  #counts: PoolCounts;
  /** Grows whenever pages may have become free: a blocked admission is not tried again before. */
  releases = 0;

  constructor(
    private readonly pool: PagePool,
    private readonly options: { prefixCache: boolean; strict: boolean },
    private readonly transfer: NativeTransfer | null = null,
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
    const { slot, cachedTokens, start } = this.pool.openSequence(sequence.tokens, sequence.numTokens, sequence.isolated ? ISOLATED : sequence.cacheDomain);
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
    const commit = !this.options.prefixCache || sequence.isolated ? 0 : sequence.internal || sequence.pulling ? sequence.numAttached : sequence.numComputed;
    const { slot } = sequence;
    sequence.slot = -1;
    sequence.pulling = false;
    sequence.numComputed = sequence.numAttached = 0;
    this.pool.closeSequence(slot, commit);
    this.releases++;
    this.sync();
  }

  /** Opens a sequence whose prompt another engine has computed; its source is used up unless nothing was opened. */
  openPull(sequence: Sequence): PullAttempt {
    const { source } = sequence;
    if (this.transfer === null || source === null) throw new EngineError("engine", "a pull without transfer or source");
    try {
      const { slot, cachedTokens, start, pages } = this.transfer.openPull(sequence.tokens, sequence.numTokens, sequence.cacheDomain, source);
      if (cachedTokens < 0 || start !== sequence.numTokens - 1) throw new EngineError("engine", `ls_seq_open_pull reported ${cachedTokens} cached tokens and start ${start} for ${sequence.numTokens} tokens`);
      sequence.slot = slot;
      sequence.numAttached = cachedTokens;
      sequence.numComputed = start;
      sequence.pulling = pages > 0;
      this.sync();
      return { kind: pages > 0 ? "pulling" : "ready" };
    } catch (error) {
      if (!(error instanceof NativeError)) throw error;
      const kind = ({ [ls_status.LS_LAYOUT]: "layout", [ls_status.LS_NO_PAGES]: "pages", [ls_status.LS_INVALID]: "source" } as const)[error.status];
      if (kind === undefined) throw error;
      return { kind, text: error.text };
    }
  }

  /** Begins a copy of an opened sequence's prompt. The last token's KV is not part of it: whoever fetches the copy computes that token. @returns false when host memory is short */
  stage(sequence: Sequence): boolean {
    try {
      this.transfer?.stage(sequence.slot, sequence.promptLength - 1);
      return true;
    } catch (error) {
      if (error instanceof NativeError && error.status === ls_status.LS_NO_MEMORY) return false;
      throw error;
    }
  }

  /** Offers the copy of a computed prompt. */
  publish(sequence: Sequence): void {
    if (this.transfer !== null) sequence.copyId = this.transfer.publish(sequence.slot);
  }

  /** Lets a sender free a copy that will not be fetched. An address that is none has no sender. */
  drop(source: KvSource): void {
    try {
      this.transfer?.drop(source);
    } catch (error) {
      if (!(error instanceof NativeError) || error.status !== ls_status.LS_INVALID) throw error;
    }
  }

  /** Takes the native counts as they are. */
  sync(): void {
    this.#counts = this.pool.poolStats();
  }

  /** A step that takes `pages` pages was submitted. */
  took(pages: number): void {
    const expected = this.available - pages;
    this.sync();
    if (this.options.strict) check(this.#counts, expected);
  }

  /** The counts of a step's result. */
  settle(result: StepCounts): void {
    const expected = this.available;
    const { openSeqs, evictions } = this.#counts;
    this.#counts = { free: result.free, cached: result.cached, held: result.held, total: result.total, openSeqs, evictions };
    if (this.options.strict) check(result, expected);
  }
}
