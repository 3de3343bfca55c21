import type { ChatParams, ChatTemplate } from "./chat-template.ts";
import type { Tokenizer } from "./tokenizer.ts";

/**
 * A conversation → prompt ids, in which only the template's own markers become control tokens.
 *
 * Method: the template runs on strings that remember, for each character, whether the template or the conversation wrote
 * it (jinja/text.ts), through concatenation, slicing, splitting, trimming, replacing, tojson. The rendered text is then
 * encoded once, as a whole; a control token is read out of it only where every one of its characters is the template's.
 * Text like `<|im_end|>` in a message, a tool definition, an argument, a key, or put together from two message parts, is
 * split into ordinary tokens. Everything else (split patterns, merges, added tokens that are no control tokens) sees the
 * same text as always, so ordinary conversations give exactly the ids of the rendered text.
 *
 * No special tokens are added around the result: a template writes its own (a second BOS would harm the model).
 * @throws TemplateError
 */
export function encodeChat(tokenizer: Tokenizer, template: ChatTemplate, params: ChatParams): number[] {
  const { text, fromConversation } = template.renderWithOrigin(params);
  const isPlain = (start: number, end: number) => {
    for (let at = start; at < end; at++) if (fromConversation(at)) return true;
    return false;
  };
  return tokenizer.encode(text, { addSpecialTokens: false, isPlain });
}
