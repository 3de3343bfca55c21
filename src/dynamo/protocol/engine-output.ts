import type { TokenLogprob, Usage } from "../../engine/types.ts";

/** The part of LLMEngineOutput that this worker sends; text stays unset, since it would switch off the frontend's detokenizer and stop strings. */
export interface EngineOutput {
  token_ids: number[];
  finish_reason?: "eos" | "stop" | "length";
  log_probs?: number[];
  top_logprobs?: TopLogprob[][];
  completion_usage?: CompletionUsage;
}
interface TopLogprob {
  rank: number;
  token_id: number;
  /** null: the frontend decodes text and bytes. */
  token: null;
  logprob: number;
}
interface CompletionUsage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
}

/** JSON has no infinities; masked tokens get this logprob. */
const LOGPROB_FLOOR = -9999;
const finite = (logprob: number) => (Number.isFinite(logprob) ? Math.min(0, logprob) : LOGPROB_FLOOR);

export function completionUsage(usage: Usage, completionTokens = usage.completionTokens): CompletionUsage {
  return {
    prompt_tokens: usage.promptTokens,
    completion_tokens: completionTokens,
    total_tokens: usage.promptTokens + completionTokens,
    prompt_tokens_details: { cached_tokens: usage.cachedTokens },
  };
}

/** log_probs and top_logprobs, one entry per token. */
export function logprobFields(tokens: readonly TokenLogprob[]): Pick<EngineOutput, "log_probs" | "top_logprobs"> {
  return {
    log_probs: tokens.map((token) => finite(token.logprob)),
    top_logprobs: tokens.map((token) => token.top.map((item, i) => ({ rank: i + 1, token_id: item.tokenId, token: null, logprob: finite(item.logprob) }))),
  };
}

/** The Annotated layer of a good item. */
export const outputItem = (data: EngineOutput): unknown => ({ data });
