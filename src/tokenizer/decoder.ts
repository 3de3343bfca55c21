import { fromByteLevel } from "./byte-level.ts";
import { arrayAt, fail, flagAt, isObject, stringAt } from "./json-fields.ts";
import type { Json } from "./json-fields.ts";
import { Utf8Stream } from "./utf8-stream.ts";

/**
 * `decoder` of tokenizer.json as a plan that works token by token, so that one implementation serves whole-list decoding
 * and streaming and the two cannot differ. Differences from the reference, all on purpose:
 * - under byte-level decoding, added tokens stand for their own text, also where its characters are in the byte table;
 * - in a run of byte tokens (<0xE4>…) only the invalid bytes become U+FFFD; the reference replaces the whole run, which
 *   could not be streamed without holding valid text back for as long as the run lasts;
 * - clean_up_tokenization_spaces is not applied: it rewrites what the model said (" ," → ",").
 */
export interface DecoderPlan {
  bytes: "level" | "fallback" | "none";
  /** Token text → text, before bytes are joined. */
  maps: ((token: string, first: boolean) => string)[];
  /** Text that stands between tokens (files without a decoder join with a space). */
  separator: string;
  /** Cut from the start and the end of the whole text: at most this many of this character. */
  stripStart: { char: string; count: number } | null;
  stripEnd: { char: string; count: number } | null;
}

const utf8 = new TextEncoder();
const BYTE_TOKEN = /^<0x([0-9A-Fa-f]{2})>$/;

export function createDecoderPlan(value: unknown): DecoderPlan {
  const plan: DecoderPlan = { bytes: "none", maps: [], separator: "", stripStart: null, stripEnd: null };
  if (value === null || value === undefined) plan.separator = " ";
  else addStage(plan, { fused: false }, value, "decoder");
  return plan;
}

function addStage(plan: DecoderPlan, state: { fused: boolean }, value: unknown, field: string): void {
  if (!isObject(value)) fail(field, value, "an object or null");
  const type = value["type"];
  const early = (what: string) => {
    if (state.fused) fail(field, value, `no ${what} after Fuse or ByteLevel`);
  };
  switch (type) {
    case "Sequence":
      arrayAt(value, "decoders", `${field}.decoders`).forEach((d, i) => addStage(plan, state, d, `${field}.decoders[${i}]`));
      return;
    case "ByteLevel":
      early("ByteLevel");
      plan.bytes = "level";
      state.fused = true;
      return;
    case "ByteFallback":
      early("ByteFallback");
      plan.bytes = "fallback";
      return;
    case "Fuse":
      state.fused = true;
      return;
    case "Replace":
      early("Replace");
      plan.maps.push(replacer(value, field));
      return;
    case "Metaspace":
      early("Metaspace");
      plan.maps.push(metaspace(value, field));
      return;
    case "Strip":
      addStrip(plan, state.fused, value, field);
      return;
    default:
      fail(`${field}.type`, type, "Sequence, ByteLevel, ByteFallback, Fuse, Replace, Metaspace or Strip");
  }
}

function replacer(config: Json, field: string): (token: string) => string {
  const pattern = config["pattern"];
  const content = stringAt(config, "content", `${field}.content`);
  if (!isObject(pattern) || typeof pattern["String"] !== "string") return fail(`${field}.pattern`, pattern, 'an object with "String"');
  const text = pattern["String"];
  return (token) => token.replaceAll(text, () => content);
}

function metaspace(config: Json, field: string): (token: string, first: boolean) => string {
  const replacement = config["replacement"] ?? "\u2581";
  if (typeof replacement !== "string" || [...replacement].length !== 1) return fail(`${field}.replacement`, replacement, "one character");
  const scheme = config["prepend_scheme"] ?? (flagAt(config, "add_prefix_space", true, `${field}.add_prefix_space`) ? "always" : "never");
  return (token, first) => token.replaceAll(replacement, first && scheme !== "never" ? "" : " ");
}

function addStrip(plan: DecoderPlan, fused: boolean, config: Json, field: string): void {
  const char = stringAt(config, "content", `${field}.content`);
  const start = count(config["start"] ?? 0, `${field}.start`);
  const stop = count(config["stop"] ?? 0, `${field}.stop`);
  if (char.length !== 1) fail(`${field}.content`, char, "one character");
  if (fused) {
    if (start > 0) plan.stripStart = { char, count: start };
    if (stop > 0) plan.stripEnd = { char, count: stop };
    return;
  }
  plan.maps.push((token) => {
    let from = 0;
    while (from < start && token[from] === char) from++;
    let to = token.length;
    while (token.length - to < stop && to > from && token[to - 1] === char) to--;
    return token.slice(from, to);
  });
}

function count(value: unknown, field: string): number {
  return typeof value === "number" && Number.isInteger(value) && value >= 0 && value <= 1024 ? value : fail(field, value, "an integer from 0 to 1024");
}

/** What one token contributes: text where that is certain, bytes where a neighbour may complete them. */
export type Piece = string | Uint8Array;

export function pieceOf(plan: DecoderPlan, token: string, added: boolean, first: boolean): Piece {
  if (plan.bytes === "level") return added ? token : (fromByteLevel(token) ?? token);
  let text = token;
  for (const map of plan.maps) text = map(text, first);
  if (plan.bytes === "fallback") {
    const byte = BYTE_TOKEN.exec(text);
    if (byte) return Uint8Array.of(parseInt(byte[1]!, 16));
  }
  return text;
}

export function pieceBytes(piece: Piece): Uint8Array {
  return typeof piece === "string" ? utf8.encode(piece) : piece;
}

/** Joins pieces to text: UTF-8 over token borders, separators, stripping at both ends of the whole text. */
export class PieceStream {
  readonly #utf8: Utf8Stream;
  #toStrip: number;
  /** Trailing characters that stripEnd would cut if the text ended here. */
  #tail = "";
  #started = false;

  constructor(
    readonly plan: DecoderPlan,
    continuation: boolean,
  ) {
    this.#utf8 = new Utf8Stream(plan.bytes === "fallback" ? "byte" : "part");
    this.#toStrip = continuation ? 0 : (plan.stripStart?.count ?? 0);
  }

  push(piece: Piece): string {
    let text: string;
    if (typeof piece !== "string") text = this.#utf8.push(piece);
    else text = this.#utf8.idle ? piece : this.#utf8.flush() + piece;
    if (this.plan.separator !== "" && this.#started) text = this.plan.separator + text;
    this.#started = true;
    return this.#strip(text);
  }

  flush(): string {
    const text = this.#strip(this.#utf8.flush());
    this.#tail = "";
    return text;
  }

  #strip(text: string): string {
    const { stripStart, stripEnd } = this.plan;
    if (this.#toStrip > 0 && stripStart && text !== "") {
      let cut = 0;
      while (cut < text.length && this.#toStrip > 0 && text[cut] === stripStart.char) {
        cut++;
        this.#toStrip--;
      }
      if (cut < text.length) this.#toStrip = 0;
      text = text.slice(cut);
    }
    if (!stripEnd) return text;
    const all = this.#tail + text;
    let keep = all.length;
    while (all.length - keep < stripEnd.count && keep > 0 && all[keep - 1] === stripEnd.char) keep--;
    this.#tail = all.slice(keep);
    return all.slice(0, keep);
  }
}
