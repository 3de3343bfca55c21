import { fail, flagAt, isObject, stringAt, tokenIdOf } from "./json-fields.ts";
import type { Json } from "./json-fields.ts";
import type { Normalize } from "./normalizer.ts";

export interface AddedToken {
  id: number;
  content: string;
  /** Control token: left out by skipSpecialTokens and never read out of text that must stay plain. */
  special: boolean;
  lstrip: boolean;
  rstrip: boolean;
  singleWord: boolean;
  normalized: boolean;
}

/** A stretch of the input: text for the model, or one added token. `start` is its offset in the input. */
export type Section = { text: string; start: number } | { id: number };

/** True where a control token over [start, end) of the input must stay plain text. */
export type IsPlain = (start: number, end: number) => boolean;

export function readAddedToken(value: unknown, id: unknown, field: string): AddedToken {
  if (!isObject(value)) return fail(field, value, "an object");
  const content = stringAt(value, "content", `${field}.content`);
  const special = flagAt(value, "special", false, `${field}.special`);
  return {
    id: tokenIdOf(id, `${field}.id`),
    content,
    special,
    lstrip: flagAt(value, "lstrip", false, `${field}.lstrip`),
    rstrip: flagAt(value, "rstrip", false, `${field}.rstrip`),
    singleWord: flagAt(value, "single_word", false, `${field}.single_word`),
    normalized: flagAt(value as Json, "normalized", !special, `${field}.normalized`),
  };
}

const WORD_END = /[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}]$/u;
const WORD_START = /^[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}]/u;
const SPACE = /\p{White_Space}/u;

class Node {
  readonly children = new Map<number, Node>();
  token: AddedToken | null = null;
}

/** Finds added tokens in text: leftmost, then longest. One pass, cost bounded by the longest token's length. */
class Matcher {
  readonly #root = new Node();
  /** Finds where a token may begin, so that ordinary text is skipped at the speed of the RegExp engine. */
  readonly #first: RegExp | null;

  constructor(tokens: readonly AddedToken[], contentOf: (token: AddedToken) => string) {
    const firsts = new Set<string>();
    for (const token of tokens) {
      const content = contentOf(token);
      if (content === "") continue;
      let node = this.#root;
      for (let i = 0; i < content.length; i++) {
        const code = content.charCodeAt(i);
        let child = node.children.get(code);
        if (!child) node.children.set(code, (child = new Node()));
        node = child;
      }
      node.token = token;
      firsts.add(`\\u${content.charCodeAt(0).toString(16).padStart(4, "0")}`);
    }
    this.#first = firsts.size === 0 ? null : new RegExp(`[${[...firsts].join("")}]`, "g");
  }

  split(text: string, start: number, isPlain: IsPlain): Section[] {
    if (!this.#first) return [{ text, start }];
    const sections: Section[] = [];
    let from = 0;
    const first = this.#first;
    first.lastIndex = 0;
    for (let found = first.exec(text); found; found = first.exec(text)) {
      const at = found.index;
      const match = this.#longest(text, at, start, isPlain);
      if (!match) {
        first.lastIndex = at + 1;
        continue;
      }
      const { token } = match;
      let begin = at;
      let end = match.end;
      if (token.lstrip) while (begin > from && SPACE.test(text[begin - 1]!)) begin--;
      if (token.rstrip) while (end < text.length && SPACE.test(text[end]!)) end++;
      if (begin > from) sections.push({ text: text.slice(from, begin), start: start + from });
      sections.push({ id: token.id });
      from = end;
      first.lastIndex = end;
    }
    if (from < text.length) sections.push({ text: text.slice(from), start: start + from });
    return sections;
  }

  #longest(text: string, at: number, start: number, isPlain: IsPlain): { token: AddedToken; end: number } | null {
    let best: { token: AddedToken; end: number } | null = null;
    let node: Node | undefined = this.#root;
    for (let i = at; i < text.length; ) {
      node = node.children.get(text.charCodeAt(i++));
      if (!node) break;
      const token: AddedToken | null = node.token;
      if (!token || (token.special && isPlain(start + at, start + i))) continue;
      if (token.singleWord && (WORD_END.test(text.slice(Math.max(0, at - 2), at)) || WORD_START.test(text.slice(i, i + 2)))) continue;
      best = { token, end: i };
    }
    return best;
  }
}

/**
 * Splits input at added tokens: first those matched in the raw text, then, in what is left and normalized, the others.
 * Control tokens are always matched in the raw text: their markers must not depend on what a normalizer does around them.
 */
export class AddedTokens {
  readonly #raw: Matcher;
  readonly #normalized: Matcher | null;

  constructor(
    tokens: readonly AddedToken[],
    readonly normalize: Normalize,
  ) {
    const late = (token: AddedToken) => token.normalized && !token.special && normalize !== null;
    this.#raw = new Matcher(tokens.filter((t) => !late(t)), (t) => t.content);
    const lateTokens = tokens.filter(late);
    this.#normalized = lateTokens.length === 0 ? null : new Matcher(lateTokens, (t) => normalize!(t.content));
  }

  /** Sections in order; their text is normalized. */
  split(text: string, isPlain: IsPlain): Section[] {
    if (text === "") return [];
    const sections = this.#raw.split(text, 0, isPlain);
    if (!this.normalize) return sections;
    return sections.flatMap((section) => {
      if ("id" in section) return [section];
      const normalized = this.normalize!(section.text);
      if (normalized === "") return [];
      if (!this.#normalized) return [{ text: normalized, start: section.start }];
      return this.#normalized.split(normalized, section.start, NEVER);
    });
  }
}

const NEVER: IsPlain = () => false;
