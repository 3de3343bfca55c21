import { SplitPreTokenizer } from "@huggingface/tokenizers";
import { toByteLevel } from "./byte-level.ts";
import { arrayAt, fail, flagAt, isObject, stringAt } from "./json-fields.ts";
import type { Json } from "./json-fields.ts";

/**
 * `pre_tokenizer` of tokenizer.json: text of one section → pieces that merges never cross. The patterns are Oniguruma
 * expressions; the library translates them, the splitting itself is done here, because the library's differs from the
 * reference: Digits knows ASCII digits only, \s and \w are JavaScript's, behaviours other than Isolated and Removed are
 * not honoured.
 */
export type PreTokenize = (text: string, startOfInput: boolean) => string[];
type Stage = (piece: string, startOfInput: boolean, out: string[]) => void;
type Behavior = "Removed" | "Isolated" | "MergedWithPrevious" | "MergedWithNext" | "Contiguous";
const BEHAVIORS: readonly string[] = ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"];

const GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
const PUNCTUATION = /[\p{P}\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e]/gu;

export function createPreTokenizer(value: unknown): PreTokenize {
  const stages = value === null || value === undefined ? [] : stagesOf(value, "pre_tokenizer");
  return (text, startOfInput) => {
    let pieces = [text];
    for (const stage of stages) {
      const out: string[] = [];
      for (let i = 0; i < pieces.length; i++) stage(pieces[i]!, startOfInput && i === 0, out);
      pieces = out;
    }
    return pieces;
  };
}

function stagesOf(value: unknown, field: string): Stage[] {
  if (!isObject(value)) return fail(field, value, "an object");
  const type = value["type"];
  switch (type) {
    case "Sequence":
      return arrayAt(value, "pretokenizers", `${field}.pretokenizers`).flatMap((p, i) => stagesOf(p, `${field}.pretokenizers[${i}]`));
    case "ByteLevel":
      return byteLevel(value, field);
    case "Split":
      return [splitter(patternOf(value, field), behaviorOf(value["behavior"], `${field}.behavior`), flagAt(value, "invert", false, `${field}.invert`))];
    case "Digits":
      return [splitter(/\p{N}/gu, flagAt(value, "individual_digits", false, `${field}.individual_digits`) ? "Isolated" : "Contiguous")];
    case "Punctuation":
      return [splitter(PUNCTUATION, behaviorOf(value["behavior"] ?? "Isolated", `${field}.behavior`))];
    case "Whitespace":
      return [splitter(oniguruma({ Regex: "\\w+|[^\\w\\s]+" }, field), "Removed", true)];
    case "WhitespaceSplit":
      return [splitter(/\p{White_Space}/gu, "Removed")];
    case "BertPreTokenizer":
      return [splitter(/\p{White_Space}/gu, "Removed"), splitter(PUNCTUATION, "Isolated")];
    case "CharDelimiterSplit":
      return [splitter(oniguruma({ String: stringAt(value, "delimiter", `${field}.delimiter`) }, field), "Removed")];
    case "Metaspace":
      return [metaspace(value, field)];
    default:
      return fail(`${field}.type`, type, "Sequence, ByteLevel, Split, Digits, Punctuation, Whitespace, WhitespaceSplit, BertPreTokenizer, CharDelimiterSplit or Metaspace");
  }
}

function behaviorOf(value: unknown, field: string): Behavior {
  if (typeof value !== "string") return fail(field, value, BEHAVIORS.join(", "));
  // The reference writes CamelCase; some files carry snake_case.
  const name = BEHAVIORS.find((b) => b.toLowerCase() === value.replaceAll("_", "").toLowerCase());
  return (name as Behavior | undefined) ?? fail(field, value, BEHAVIORS.join(", "));
}

function patternOf(config: Json, field: string): RegExp {
  const pattern = config["pattern"];
  if (isObject(pattern)) {
    if (typeof pattern["Regex"] === "string") return oniguruma({ Regex: pattern["Regex"] }, field);
    if (typeof pattern["String"] === "string") return oniguruma({ String: pattern["String"] }, field);
  }
  return fail(`${field}.pattern`, pattern, 'an object with "Regex" or "String"');
}

function oniguruma(pattern: { Regex: string } | { String: string }, field: string): RegExp {
  type Config = ConstructorParameters<typeof SplitPreTokenizer>[0];
  try {
    const compiled = new SplitPreTokenizer({ type: "Split", pattern, behavior: "Isolated", invert: false } as unknown as Config).pattern;
    // A String pattern comes back with a capture group; only match positions are read here.
    if (compiled) return compiled;
  } catch (error) {
    return fail(`${field}.pattern`, pattern, `a supported expression (${(error as Error).message})`);
  }
  return fail(`${field}.pattern`, pattern, "a supported expression");
}

/** Cuts a piece at the matches; `invert` swaps what is a match and what is between matches. */
function splitter(pattern: RegExp, behavior: Behavior, invert = false): Stage {
  return (piece, _start, out) => {
    if (behavior === "Isolated") {
      let from = 0;
      for (const match of piece.matchAll(pattern)) {
        if (match[0].length === 0) continue;
        if (match.index > from) out.push(piece.slice(from, match.index));
        out.push(match[0]);
        from = match.index + match[0].length;
      }
      if (from < piece.length) out.push(piece.slice(from));
      return;
    }
    const parts = partsOf(piece, pattern, invert);
    let text = "";
    let previous: boolean | null = null;
    for (const [part, isMatch] of parts) {
      if (behavior === "Removed") {
        if (!isMatch) out.push(part);
        continue;
      }
      const joins =
        previous !== null &&
        (behavior === "Contiguous" ? isMatch === previous : behavior === "MergedWithPrevious" ? isMatch && !previous : !isMatch && previous);
      if (joins) text += part;
      else {
        if (text !== "") out.push(text);
        text = part;
      }
      previous = isMatch;
    }
    if (text !== "") out.push(text);
  };
}

function partsOf(piece: string, pattern: RegExp, invert: boolean): [string, boolean][] {
  const parts: [string, boolean][] = [];
  let from = 0;
  for (const match of piece.matchAll(pattern)) {
    if (match[0].length === 0) continue;
    if (match.index > from) parts.push([piece.slice(from, match.index), invert]);
    parts.push([match[0], !invert]);
    from = match.index + match[0].length;
  }
  if (from < piece.length) parts.push([piece.slice(from), invert]);
  return parts;
}

function byteLevel(config: Json, field: string): Stage[] {
  const prefix = flagAt(config, "add_prefix_space", true, `${field}.add_prefix_space`);
  const stages: Stage[] = [];
  if (prefix) stages.push((piece, _start, out) => void out.push(piece.startsWith(" ") ? piece : " " + piece));
  if (flagAt(config, "use_regex", true, `${field}.use_regex`)) stages.push(splitter(oniguruma({ Regex: GPT2 }, field), "Isolated"));
  stages.push((piece, _start, out) => void out.push(toByteLevel(piece)));
  return stages;
}

function metaspace(config: Json, field: string): Stage {
  const replacement = config["replacement"] ?? "\u2581";
  if (typeof replacement !== "string" || [...replacement].length !== 1) return fail(`${field}.replacement`, replacement, "one character");
  // Files older than `prepend_scheme` say add_prefix_space.
  const scheme = config["prepend_scheme"] ?? (config["add_prefix_space"] === false ? "never" : "always");
  if (scheme !== "always" && scheme !== "first" && scheme !== "never") return fail(`${field}.prepend_scheme`, scheme, "always, first or never");
  const split = flagAt(config, "split", true, `${field}.split`) ? splitter(oniguruma({ String: replacement }, field), "MergedWithNext") : null;
  return (piece, startOfInput, out) => {
    let text = piece.replaceAll(" ", () => replacement);
    if ((scheme === "always" || (scheme === "first" && startOfInput)) && !text.startsWith(replacement)) text = replacement + text;
    if (split) split(text, startOfInput, out);
    else out.push(text);
  };
}
