import { LS_PAGE_TOKENS } from "./native/abi.gen.ts";

export interface SchedulerOptions {
  /** Token budget of a step. */
  chunkedPrefillSize: number;
  maxNumSeqs: number;
  /** Tokens a sequence may hold. */
  contextLength: number;
}

/** Tokens that prefills get in every step, however many sequences decode. */
const PREFILL_FLOOR = LS_PAGE_TOKENS;

/** Tokens that prefills get in a step beside `decodes` sequences that need one each. */
export function prefillBudget(chunkedPrefillSize: number, decodes: number): number {
  return Math.max(chunkedPrefillSize - decodes, Math.min(PREFILL_FLOOR, chunkedPrefillSize));
}

/** Most tokens one step can hold: the budget, or all sequences but one decoding beside a prefill that must not starve. */
export function maxBatchTokens({ chunkedPrefillSize, maxNumSeqs }: Pick<SchedulerOptions, "chunkedPrefillSize" | "maxNumSeqs">): number {
  return Math.max(chunkedPrefillSize, maxNumSeqs - 1 + Math.min(PREFILL_FLOOR, chunkedPrefillSize));
}
