import type { LoadedModel } from "../model/types.ts";
import { logger } from "../telemetry/log.ts";
import { ChatTemplate, encodeChat } from "../tokenizer/chat-template.ts";
import { Detokenizer } from "../tokenizer/detokenizer.ts";
import { TemplateError } from "../tokenizer/errors.ts";
import { StopMatcher } from "../tokenizer/stop-matcher.ts";
import type { Tokenizer } from "../tokenizer/tokenizer.ts";
import { badRequest } from "./http-errors.ts";
import type { Codec } from "./serving.ts";

/** A template that cannot be read refuses chat requests by its reason; text completions still work. */
export function createCodec(tokenizer: Tokenizer, model: LoadedModel): Codec {
  const template = openTemplate(model);
  return {
    encode: (text) => tokenizer.encode(text, { addSpecialTokens: true }),
    encodeChat: ({ messages, kwargs }) => {
      if (typeof template === "string") throw badRequest(template, "messages");
      try {
        return encodeChat(tokenizer, template, { ...kwargs, messages, addGenerationPrompt: true });
      } catch (error) {
        if (error instanceof TemplateError) throw badRequest(`messages: the chat template refuses them: ${error.message}`, "messages");
        throw error;
      }
    },
    tokenBytes: (id) => tokenizer.tokenBytes(id),
    decoder: (continuation) => new Detokenizer(tokenizer, { skipSpecialTokens: true, continuation }),
    stopMatcher: (stops) => new StopMatcher(stops),
  };
}

/** The template, or why there is none. */
function openTemplate(model: LoadedModel): ChatTemplate | string {
  const { chatTemplate, tokenizerConfig } = model.assets;
  if (chatTemplate === null) return `${model.name} has no chat template; use /v1/completions`;
  try {
    return ChatTemplate.create(chatTemplate, tokenizerConfig);
  } catch (error) {
    if (!(error instanceof TemplateError)) throw error;
    logger("layerscale::serve").warn("chat template cannot be used", { model: model.name, error });
    return `the chat template of ${model.name} cannot be used: ${error.message}`;
  }
}
