import { Fields } from "./fields.ts";
import { describe, isObject, type JsonObject } from "./files.ts";
import { type GenerationDefaults, ModelError } from "./types.ts";

/** A parsed file with its path, for messages. */
export interface NamedJson {
  path: string;
  json: JsonObject;
}

/**
 * Sampling defaults and end-of-sequence ids. Ids come from generation_config.json, else config.json (its `text_config` too), else the
 * `eos_token` of tokenizer_config.json looked up in tokenizer.json; an empty list when all are silent.
 * @throws ModelError for values out of range, ids at or over vocab among them.
 */
export function generationDefaults(
  vocab: number,
  config: NamedJson,
  generation: NamedJson | null,
  tokenizerConfig: NamedJson | null,
  tokenizerJson: unknown,
): GenerationDefaults {
  const fields = generation ? new Fields(generation.path, generation.json) : null;
  const nested = config.json.text_config;
  const configFields = new Fields(config.path, isObject(nested) ? { ...nested, ...config.json } : config.json);
  const eosTokenIds = fields?.tokenIds("eos_token_id", vocab) ?? configFields.tokenIds("eos_token_id", vocab) ?? eosOfTokenizer(vocab, tokenizerConfig, tokenizerJson);
  const topP = fields?.optionalNumber("top_p", 0, 1) ?? null;
  if (fields && topP === 0) throw fields.fail("top_p", "0, expected a number above 0 and up to 1");
  return { temperature: fields?.optionalNumber("temperature", 0, 1e6) ?? null, topP, eosTokenIds };
}

function eosOfTokenizer(vocab: number, tokenizerConfig: NamedJson | null, tokenizerJson: unknown): number[] {
  const token = tokenizerConfig?.json.eos_token;
  // A plain string, or an added-token object.
  const text = isObject(token) ? token.content : token;
  if (typeof text !== "string" || !tokenizerConfig) return [];
  const id = tokenId(tokenizerJson, text);
  if (id === null) throw new ModelError(tokenizerConfig.path, "eos_token", `${describe(text)} is not in tokenizer.json`);
  if (id >= vocab) throw new ModelError(tokenizerConfig.path, "eos_token", `${describe(text)} has id ${id}, expected an id below ${vocab}`);
  return [id];
}

/** The id of a token's text in a parsed tokenizer.json: added tokens first, then the model's vocabulary. */
export function tokenId(tokenizerJson: unknown, text: string): number | null {
  if (!isObject(tokenizerJson)) return null;
  const added: unknown[] = Array.isArray(tokenizerJson.added_tokens) ? tokenizerJson.added_tokens : [];
  for (const token of added) if (isObject(token) && token.content === text && isId(token.id)) return token.id;
  const vocab = isObject(tokenizerJson.model) ? tokenizerJson.model.vocab : undefined;
  if (!isObject(vocab) || !Object.hasOwn(vocab, text)) return null;
  const id = vocab[text];
  return isId(id) ? id : null;
}

function isId(value: unknown): value is number {
  return typeof value === "number" && Number.isSafeInteger(value) && value >= 0;
}
