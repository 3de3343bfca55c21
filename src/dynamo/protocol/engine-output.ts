import type { TokenLogprob, Usage } from "../../engine/types.ts";
import type { PayloadCodec } from "./codec.ts";
import { encodeMsgpack } from "./msgpack.ts";

/** The part of LLMEngineOutput that this worker sends; text stays unset, since it would switch off the frontend's detokenizer and stop strings. */
export interface EngineOutput {
  token_ids: number[];
  finish_reason?: "eos" | "stop" | "length";
  log_probs?: number[];
  top_logprobs?: TopLogprob[][];
  completion_usage?: CompletionUsage;
  /** Of a prefill worker: where the KV waits. The frontend passes it to a decode worker as it is. */
  disaggregated_params?: Record<string, unknown>;
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

const MSGPACK_HEAD = encodeMsgpack({ data: { data: { token_ids: [] } }, complete_final: false });
const MSGPACK_TAIL = encodeMsgpack({ complete_final: false }).subarray(1);
/** Up to the ids: the empty list is one byte. */
const MSGPACK_BEFORE = MSGPACK_HEAD.subarray(0, MSGPACK_HEAD.length - MSGPACK_TAIL.length - 1);

/** An item of tokens alone, which most are: its bytes are put together from fixed parts, not by way of an object. */
export class TokenItem {
  readonly data: { readonly token_ids: readonly number[] };
  constructor(tokenIds: readonly number[]) {
    this.data = { token_ids: tokenIds };
  }

  /** The same bytes as the codec gives for {data: this, complete_final: false}. */
  encode(codec: PayloadCodec): Buffer {
    const ids = this.data.token_ids;
    if (codec.name === "msgpack") return Buffer.concat([MSGPACK_BEFORE, encodeMsgpack(ids), MSGPACK_TAIL]);
    return Buffer.from(`{"data":{"data":{"token_ids":[${ids.length === 1 ? ids[0] : ids.join(",")}]}},"complete_final":false}`, "latin1");
  }
}
