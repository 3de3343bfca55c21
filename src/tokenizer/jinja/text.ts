/**
 * A template's string with its origin per UTF-16 unit: "1" in the mask where the unit came from the conversation, "0" where
 * the template wrote it; no mask = all from the template. Operations that move text around keep the mask exactly; the few
 * that rewrite it (upper, title, …) mark the whole result as soon as one unit came from outside.
 */
export class Text {
  private constructor(
    readonly s: string,
    readonly mask: string | null,
    /** Marked safe: adding to it escapes HTML. */
    readonly markup = false,
  ) {}

  static readonly EMPTY = new Text("", null);

  static of(s: string): Text {
    return s === "" ? Text.EMPTY : new Text(s, null);
  }

  /** Text of the conversation. */
  static outside(s: string): Text {
    return s === "" ? Text.EMPTY : new Text(s, "1".repeat(s.length));
  }

  static join(parts: readonly Text[]): Text {
    let s = "";
    let masked = false;
    for (const part of parts) {
      s += part.s;
      masked ||= part.mask !== null;
    }
    if (!masked) return Text.of(s);
    let mask = "";
    for (const part of parts) mask += part.mask ?? "0".repeat(part.s.length);
    return new Text(s, mask);
  }

  get length(): number {
    return this.s.length;
  }

  /** Offsets in UTF-16 units. */
  slice(from: number, to: number = this.s.length): Text {
    if (from <= 0 && to >= this.s.length) return this;
    const s = this.s.slice(from, to);
    return s === "" ? Text.EMPTY : new Text(s, this.mask === null ? null : this.mask.slice(from, to));
  }

  plus(other: Text): Text {
    return Text.join([this, other]);
  }

  /** A rewritten version of this text. */
  rewritten(s: string): Text {
    if (this.mask === null || !this.mask.includes("1")) return Text.of(s);
    return Text.outside(s);
  }

  asMarkup(): Text {
    return new Text(this.s, this.mask, true);
  }

  /** HTML-escaped, unless marked safe. */
  escaped(): Text {
    return this.markup ? this : ESCAPES.reduce<Text>((text, [from, to]) => text.replace(from, Text.of(to)), this);
  }

  /** Cut at each occurrence of `separator` (not empty), at most `limit` times. */
  split(separator: string, limit = Infinity): Text[] {
    const parts: Text[] = [];
    let from = 0;
    for (let at = this.s.indexOf(separator); at >= 0 && parts.length < limit; at = this.s.indexOf(separator, from)) {
      parts.push(this.slice(from, at));
      from = at + separator.length;
    }
    parts.push(this.slice(from, this.s.length));
    return parts;
  }

  /** Python's str.replace. */
  replace(old: string, by: Text, limit = Infinity): Text {
    if (old === "") {
      const pieces: Text[] = [];
      let at = 0;
      let left = limit;
      for (const char of this.s) {
        if (left-- > 0) pieces.push(by);
        pieces.push(this.slice(at, (at += char.length)));
      }
      if (left > 0) pieces.push(by);
      return Text.join(pieces);
    }
    return joinTexts(this.split(old, limit), by);
  }

  /** Python's strip family: without `chars` white space, else any of the characters. */
  strip(sides: "both" | "left" | "right", chars: string | null): Text {
    const cut = chars === null ? isPythonSpace : (char: string) => chars.includes(char);
    let from = 0;
    let to = this.s.length;
    if (sides !== "right")
      while (from < to) {
        const char = String.fromCodePoint(this.s.codePointAt(from)!);
        if (!cut(char)) break;
        from += char.length;
      }
    if (sides !== "left")
      while (to > from) {
        const pair = to - from >= 2 && this.s.codePointAt(to - 2)! > 0xffff;
        const char = this.s.slice(to - (pair ? 2 : 1), to);
        if (!cut(char)) break;
        to -= char.length;
      }
    return this.slice(from, to);
  }

  /** Characters (code points) one by one. */
  characters(): Text[] {
    const out: Text[] = [];
    let at = 0;
    for (const char of this.s) out.push(this.slice(at, (at += char.length)));
    return out;
  }
}

const ESCAPES: readonly [string, string][] = [["&", "&amp;"], ["<", "&lt;"], [">", "&gt;"], ['"', "&#34;"], ["'", "&#39;"]];

export function joinTexts(parts: readonly Text[], separator: Text): Text {
  if (separator.length === 0) return Text.join(parts);
  return Text.join(parts.flatMap((part, i) => (i === 0 ? [part] : [separator, part])));
}

/** str.isspace() of one character: unlike JavaScript's \s it has U+001C–U+001F and U+0085, and not U+FEFF. */
export function isPythonSpace(char: string): boolean {
  return /^[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]$/.test(char);
}
