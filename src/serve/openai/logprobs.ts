import type { Codec } from "../serving.ts";
import type { AnswerToken } from "./generation.ts";

/** JSON has no -Infinity and no NaN: what a model rules out is reported as this. */
const FLOOR = -9999;
const finite = (logprob: number): number => (logprob >= FLOOR ? Math.min(logprob, 0) : FLOOR);

const lossy = new TextDecoder("utf-8", { ignoreBOM: true });
const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

function entry(codec: Codec, tokenId: number, logprob: number): Record<string, unknown> {
  const bytes = codec.tokenBytes(tokenId);
  return { token: lossy.decode(bytes), logprob: finite(logprob), bytes: Array.from(bytes) };
}

/** choices[].logprobs of a chat answer: one entry per generated token, eos included. */
export function chatLogprobs(codec: Codec, tokens: readonly AnswerToken[]): { content: Record<string, unknown>[] } {
  return {
    content: tokens.map((token) => ({
      ...entry(codec, token.tokenId, token.logprob),
      top_logprobs: token.top.map((top) => entry(codec, top.tokenId, top.logprob)),
    })),
  };
}

/** Text of a token, or `bytes:\xf0\x9f` for one that is no text by itself, so that two such tokens stay apart as keys. */
function classicToken(codec: Codec, tokenId: number): string {
  const bytes = codec.tokenBytes(tokenId);
  try {
    return strict.decode(bytes);
  } catch {
    return `bytes:${Array.from(bytes, (byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("")}`;
  }
}

/** choices[].logprobs of a text completion: four parallel arrays. The chosen token is always among top_logprobs. */
export function classicLogprobs(codec: Codec, tokens: readonly AnswerToken[]): Record<string, unknown> {
  return {
    tokens: tokens.map((token) => classicToken(codec, token.tokenId)),
    token_logprobs: tokens.map((token) => finite(token.logprob)),
    top_logprobs: tokens.map((token) => {
      const alternatives = new Map<string, number>();
      for (const { tokenId, logprob } of [...token.top, token]) {
        const text = classicToken(codec, tokenId);
        // Two tokens of the same text: the likelier one is kept.
        if (!alternatives.has(text)) alternatives.set(text, finite(logprob));
      }
      return Object.fromEntries(alternatives);
    }),
    text_offset: tokens.map((token) => token.textOffset),
  };
}
