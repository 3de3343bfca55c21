import { parse, tokenize } from "@huggingface/jinja";
import { TemplateError } from "../errors.ts";

/** The parser's tree, as far as the interpreter reads it: node types by name, children checked where they are used. */
export interface Node {
  readonly type: string;
  readonly [field: string]: unknown;
}

type Token = ReturnType<typeof tokenize>[number];

/** Tests with an argument are calls here: the parser knows tests without arguments only. */
export const TEST_FILTER = "__is__";
export const NOT_TEST_FILTER = "__is_not__";
/** Global that makes a tuple of its arguments. */
export const TUPLE = "__tuple__";

/**
 * Template source → tree, with the environment of chat templates: trim_blocks, lstrip_blocks, loop controls, and the
 * `generation` tag, which marks text for training and prints as its body.
 * @throws TemplateError for a syntax error.
 */
export function parseTemplate(source: string): Node {
  try {
    const tokens = tokenize(whitespace(rawBlocks(source.replace(/\r\n?/g, "\n"))));
    return parse(tuples(testsWithArguments(tokens))) as unknown as Node;
  } catch (error) {
    throw new TemplateError(`chat template: ${(error as Error).message}`);
  }
}

/** {% raw %}…{% endraw %} becomes a string expression that prints the same text. */
function rawBlocks(source: string): string {
  return source.replace(
    /\{%([-+]?)\s*raw\s*(-?)%\}([\s\S]*?)\{%([-+]?)\s*endraw\s*([-+]?)%\}(\n?)/g,
    (_all, before: string, trimStart: string, body: string, trimEnd: string, after: string, newline: string) => {
      let text = trimStart === "-" ? body.trimStart() : body;
      if (trimEnd === "-") text = text.trimEnd();
      else if (trimEnd !== "+") text = text.replace(/(^|\n)[^\S\n]+$/, "$1");
      const literal = text.replaceAll("\\", "\\\\").replaceAll('"', '\\"');
      return `{{${before === "-" ? "-" : ""} "${literal}" ${after === "-" ? "-" : ""}}}${after === "+" ? newline : ""}`;
    },
  );
}

/** trim_blocks: the line break after a tag goes; lstrip_blocks: blanks before a tag at the start of its line go. */
function whitespace(source: string): string {
  return source
    .replace(/(^|\n)[^\S\n]+(?=\{[%#](?!\+))/g, "$1")
    .replace(/([^+][%#]\})\n/g, "$1")
    .replace(/\{%\+/g, "{%")
    .replace(/\+%\}/g, "%}");
}

/** `(a,)` and `()` → a call of a global: the parser knows tuples of two items and more without a comma at the end. */
function tuples(tokens: Token[]): Token[] {
  const out: Token[] = [];
  tokens.forEach((token, i) => {
    if (token.type === "OpenParen" && !isCall(tokens[i - 1])) {
      const last = tokens[closing(tokens, i) - 2]!;
      if (last === token || last.type === "Comma") out.push(make(tokens, TUPLE, "Identifier"));
    }
    out.push(token);
  });
  return out;
}

/** A parenthesis after this token calls it. */
function isCall(before: Token | undefined): boolean {
  if (before?.type === "Identifier") return !KEYWORDS.has(before.value);
  return before?.type === "CloseParen" || before?.type === "CloseSquareBracket";
}

function make(like: Token[], value: string, type: string): Token {
  const TokenClass = like[0]!.constructor as new (value: string, type: string) => Token;
  return new TokenClass(value, type);
}

const CLOSES: Record<string, string> = { OpenSquareBracket: "CloseSquareBracket", OpenParen: "CloseParen", OpenCurlyBracket: "CloseCurlyBracket" };
const OPERAND = new Set(["Identifier", "StringLiteral", "NumericLiteral", "OpenSquareBracket", "OpenCurlyBracket"]);
const KEYWORDS = new Set(["else", "or", "and", "is", "if", "in", "not"]);

/** `x is divisibleby(3)`, `x is in y` → `x | __is__("divisibleby", 3)`: filters bind as tests do. */
function testsWithArguments(tokens: Token[]): Token[] {
  const out: Token[] = [];
  const create = (value: string, type: string) => make(tokens, value, type);
  for (let i = 0; i < tokens.length; i++) {
    const token = tokens[i]!;
    const negated = tokens[i + 1]?.value === "not" && tokens[i + 1]?.type === "Identifier";
    const nameAt = i + (negated ? 2 : 1);
    const name = tokens[nameAt];
    const isTest = token.type === "Identifier" && token.value === "is" && tokens[i - 1]?.type !== "Dot" && name?.type === "Identifier";
    const end = isTest ? argumentEnd(tokens, nameAt + 1) : 0;
    if (!isTest || end === 0) {
      out.push(token);
      continue;
    }
    const inParens = tokens[nameAt + 1]!.type === "OpenParen";
    const args = testsWithArguments(tokens.slice(nameAt + (inParens ? 2 : 1), inParens ? end - 1 : end));
    out.push(create("|", "Pipe"), create(negated ? NOT_TEST_FILTER : TEST_FILTER, "Identifier"), create("(", "OpenParen"), create(name.value, "StringLiteral"));
    out.push(create(",", "Comma"), ...args, create(")", "CloseParen"));
    i = end - 1;
  }
  return out;
}

/** Index after a test's argument that starts at `from`; 0 if there is none. */
function argumentEnd(tokens: Token[], from: number): number {
  const first = tokens[from];
  if (!first) return 0;
  if (first.type === "OpenParen") return closing(tokens, from);
  if (!OPERAND.has(first.type) || (first.type === "Identifier" && KEYWORDS.has(first.value))) return 0;
  let at = CLOSES[first.type] ? closing(tokens, from) : from + 1;
  while (tokens[at]?.type === "Dot" || tokens[at]?.type === "OpenSquareBracket" || (tokens[at]?.type === "OpenParen" && at > from))
    at = tokens[at]!.type === "Dot" ? at + 2 : closing(tokens, at);
  return at;
}

function closing(tokens: Token[], from: number): number {
  let depth = 0;
  for (let at = from; at < tokens.length; at++) {
    if (CLOSES[tokens[at]!.type]) depth++;
    else if (Object.values(CLOSES).includes(tokens[at]!.type) && --depth === 0) return at + 1;
  }
  throw new SyntaxError("unbalanced brackets");
}
