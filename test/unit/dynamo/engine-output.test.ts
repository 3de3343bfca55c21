import { expect, test } from "bun:test";
import { completionUsage, logprobFields } from "../../../src/dynamo/protocol/engine-output.ts";
import { jsonCodec } from "../../../src/dynamo/protocol/codec.ts";

test("every logprob is a finite number, whatever the engine gives, and none above 0", () => {
  const top = [0.0000001, -0.5, -Infinity, NaN, Infinity].map((logprob, tokenId) => ({ tokenId, logprob }));
  const fields = logprobFields([{ tokenId: 3, logprob: -Infinity, top }, { tokenId: 4, logprob: NaN, top: [] }]);
  expect(fields.log_probs).toEqual([-9999, -9999]);
  expect(fields.top_logprobs).toEqual([
    [0, -0.5, -9999, -9999, -9999].map((logprob, token_id) => ({ rank: token_id + 1, token_id, token: null, logprob })),
    [],
  ]);
  expect(jsonCodec.encode(fields.log_probs).toString()).not.toContain("null");
});

test("usage counts what is sent, not what was computed", () => {
  expect(completionUsage({ promptTokens: 10, completionTokens: 9, cachedTokens: 4 }, 6)).toEqual({ prompt_tokens: 10, completion_tokens: 6, total_tokens: 16, prompt_tokens_details: { cached_tokens: 4 } });
});
