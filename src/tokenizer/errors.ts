/** A tokenizer.json that cannot be used: names the field, its value and what was expected. */
export class TokenizerError extends Error {
  override name = "TokenizerError";
}

/**
 * A chat template that cannot be parsed, or a conversation it refuses. For `raise_exception('…')` the message is exactly
 * that text; callers answer 400 with it.
 */
export class TemplateError extends Error {
  override name = "TemplateError";
}
