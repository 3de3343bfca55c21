import { arrayAt, fail, isObject, objectAt, stringAt, tokenIdOf } from "./json-fields.ts";
import type { Json } from "./json-fields.ts";

/** Ids that `addSpecialTokens` puts around a prompt. */
export interface Affixes {
  before: number[];
  after: number[];
}

const NONE: Affixes = { before: [], after: [] };

/** `post_processor` of tokenizer.json, reduced to what it does to one sequence. */
export function readPostProcessor(value: unknown, field = "post_processor"): Affixes {
  if (value === null || value === undefined) return NONE;
  if (!isObject(value)) return fail(field, value, "an object or null");
  switch (value["type"]) {
    case "ByteLevel":
      return NONE;
    case "Sequence":
      // Later processors wrap what earlier ones made.
      return arrayAt(value, "processors", `${field}.processors`).reduce<Affixes>((inner, processor, i) => {
        const outer = readPostProcessor(processor, `${field}.processors[${i}]`);
        return { before: [...outer.before, ...inner.before], after: [...inner.after, ...outer.after] };
      }, NONE);
    case "TemplateProcessing":
      return template(value, field);
    case "BertProcessing":
    case "RobertaProcessing":
      return { before: [pairId(value, "cls", field)], after: [pairId(value, "sep", field)] };
    default:
      return fail(`${field}.type`, value["type"], "ByteLevel, Sequence, TemplateProcessing, BertProcessing or RobertaProcessing");
  }
}

function template(config: Json, field: string): Affixes {
  const before: number[] = [];
  const after: number[] = [];
  let into = before;
  arrayAt(config, "single", `${field}.single`).forEach((piece, i) => {
    const at = `${field}.single[${i}]`;
    if (!isObject(piece)) return fail(at, piece, "an object");
    if (isObject(piece["Sequence"])) {
      into = after;
    } else if (isObject(piece["SpecialToken"])) {
      const name = stringAt(piece["SpecialToken"], "id", `${at}.SpecialToken.id`);
      const entry = objectAt(objectAt(config, "special_tokens", `${field}.special_tokens`), name, `${field}.special_tokens["${name}"]`);
      for (const id of arrayAt(entry, "ids", `${field}.special_tokens["${name}"].ids`))
        into.push(tokenIdOf(id, `${field}.special_tokens["${name}"].ids`));
    } else fail(at, piece, '"Sequence" or "SpecialToken"');
  });
  return { before, after };
}

function pairId(config: Json, key: string, field: string): number {
  const pair = config[key];
  return Array.isArray(pair) ? tokenIdOf(pair[1], `${field}.${key}[1]`) : fail(`${field}.${key}`, pair, "[token, id]");
}
