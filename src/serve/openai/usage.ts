import type { Usage } from "../../engine/types.ts";

/** OpenAI's usage object; prefix_cached_tokens only when there are any. */
export function usageObject(usage: Usage): Record<string, unknown> {
  const { promptTokens, completionTokens, cachedTokens } = usage;
  return {
    prompt_tokens: promptTokens,
    completion_tokens: completionTokens,
    total_tokens: promptTokens + completionTokens,
    prompt_tokens_details: { cached_tokens: cachedTokens, ...(cachedTokens > 0 && { prefix_cached_tokens: cachedTokens }) },
  };
}

export function sumUsage(parts: readonly Usage[]): Usage {
  const sum: Usage = { promptTokens: 0, completionTokens: 0, cachedTokens: 0 };
  for (const part of parts) {
    sum.promptTokens += part.promptTokens;
    sum.completionTokens += part.completionTokens;
    sum.cachedTokens += part.cachedTokens;
  }
  return sum;
}
