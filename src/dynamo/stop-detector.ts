import { Detokenizer } from "../tokenizer/detokenizer.ts";
import { StopMatcher } from "../tokenizer/stop-matcher.ts";
import type { Tokenizer } from "../tokenizer/tokenizer.ts";
import type { StopDetector } from "./handler.ts";

/** Text of an answer, as the frontend will make it, watched for stop strings. */
export function stopDetector(tokenizer: Tokenizer, stops: readonly string[], skipSpecialTokens: boolean): StopDetector {
  const detokenizer = new Detokenizer(tokenizer, { skipSpecialTokens });
  const matcher = new StopMatcher(stops);
  return { push: (ids) => matcher.push(detokenizer.push(ids)).matched !== null };
}
