import { AddedTokens, readAddedToken } from "./added-tokens.ts";
import type { AddedToken, IsPlain } from "./added-tokens.ts";
import { createModel } from "./bpe.ts";
import type { Bpe } from "./bpe.ts";
import { createDecoderPlan, PieceStream, pieceBytes, pieceOf } from "./decoder.ts";
import type { DecoderPlan, Piece } from "./decoder.ts";
import { TokenizerError } from "./errors.ts";
import { isObject, shown } from "./json-fields.ts";
import { createNormalizer } from "./normalizer.ts";
import { readPostProcessor } from "./post-processor.ts";
import type { Affixes } from "./post-processor.ts";
import { createPreTokenizer } from "./pre-tokenizer.ts";
import type { PreTokenize } from "./pre-tokenizer.ts";

export interface EncodeOptions {
  /** Puts what the file's post-processor and add_bos_token / add_eos_token ask for around the ids. */
  addSpecialTokens: boolean;
  /** false: control-token text stays text. Default true. Added tokens that are no control tokens are read either way. */
  parseSpecial?: boolean;
  /** Finer than parseSpecial: true where a control token over [start, end) of the text stays text. */
  isPlain?: IsPlain;
}

const ALWAYS: IsPlain = () => true;
const NEVER: IsPlain = () => false;

/**
 * Text ↔ token ids by a tokenizer.json (model type BPE) and its tokenizer_config.json. Ids equal those of the reference
 * implementation (Python `tokenizers`); stored `padding` and `truncation` are ignored: they describe training batches.
 * Normalizers and the translation of split patterns come from @huggingface/tokenizers; merging, splitting and decoding are
 * our own, where that library differs from the reference or is slow. Cost is linear in the text (n log n inside one
 * unbroken piece).
 */
export class Tokenizer {
  /** One more than the largest id. The model's own vocabulary may be larger (padding rows). */
  readonly vocabSize: number;
  readonly bosTokenId: number | null;
  readonly eosTokenId: number | null;
  /** Control tokens by their text. */
  readonly specialTokens: ReadonlyMap<string, number>;

  readonly #model: Bpe;
  readonly #added: AddedTokens;
  readonly #preTokenize: PreTokenize;
  readonly #affixes: Affixes;
  readonly #plan: DecoderPlan;
  readonly #tokens: (string | undefined)[];
  readonly #addedById: ReadonlyMap<number, AddedToken>;
  readonly #special: ReadonlySet<number>;
  /** Pieces of tokens that are not the first, by id; filled on use. */
  readonly #pieces: (Piece | undefined)[] = [];

  private constructor(json: Record<string, unknown>, config: Record<string, unknown>) {
    this.#model = createModel(json["model"]);
    const added = readAddedTokens(json["added_tokens"], config, this.#model.vocab);
    const normalize = createNormalizer(json["normalizer"]);
    this.#added = new AddedTokens(added, normalize);
    this.#preTokenize = createPreTokenizer(json["pre_tokenizer"]);
    this.#plan = createDecoderPlan(json["decoder"]);
    this.#tokens = [];
    for (const [token, id] of this.#model.vocab) this.#tokens[id] = token;
    for (const token of added) this.#tokens[token.id] = token.content;
    this.vocabSize = this.#tokens.length;
    this.#addedById = new Map(added.map((t) => [t.id, t]));
    const specials = added.filter((t) => t.special);
    this.specialTokens = new Map(specials.map((t) => [t.content, t.id]));
    this.#special = new Set(specials.map((t) => t.id));
    const byText = (name: string) => this.#idOf(config, name);
    this.bosTokenId = byText("bos_token");
    this.eosTokenId = byText("eos_token");
    this.#affixes = affixes(readPostProcessor(json["post_processor"]), config, this.bosTokenId, this.eosTokenId);
    for (const id of [...this.#affixes.before, ...this.#affixes.after])
      if (this.#tokens[id] === undefined) throw new TokenizerError(`tokenizer.json: post_processor names id ${id}, expected an id of the vocabulary`);
  }

  /** @throws TokenizerError naming the field, its value and what was expected. */
  static create(tokenizerJson: unknown, tokenizerConfig: Record<string, unknown>): Tokenizer {
    if (!isObject(tokenizerJson)) throw new TokenizerError(`tokenizer.json: the file holds ${shown(tokenizerJson)}, expected an object`);
    return new Tokenizer(tokenizerJson, tokenizerConfig);
  }

  #idOf(config: Record<string, unknown>, name: string): number | null {
    const content = tokenText(config[name]);
    if (content === null) return null;
    return this.specialTokens.get(content) ?? this.#model.vocab.get(content) ?? null;
  }

  /** Lone surrogates count as U+FFFD, as in any UTF-8 encoding of the text. */
  encode(text: string, { addSpecialTokens, parseSpecial = true, isPlain }: EncodeOptions): number[] {
    const ids = addSpecialTokens ? this.#affixes.before.slice() : [];
    const plain = parseSpecial ? (isPlain ?? NEVER) : ALWAYS;
    for (const section of this.#added.split(text.toWellFormed(), plain)) {
      if ("id" in section) ids.push(section.id);
      else for (const piece of this.#preTokenize(section.text, section.start === 0)) this.#model.encode(piece, ids);
    }
    if (addSpecialTokens) ids.push(...this.#affixes.after);
    return ids;
  }

  /** Ids outside the vocabulary contribute nothing. */
  decode(ids: readonly number[], { skipSpecialTokens }: { skipSpecialTokens: boolean }): string {
    const stream = new PieceStream(this.#plan, false);
    let text = "";
    let first = true;
    for (const id of ids) {
      const piece = this.pieceOf(id, { skipSpecialTokens, first });
      if (piece === null) continue;
      first = false;
      text += stream.push(piece);
    }
    return text + stream.flush();
  }

  /**
   * What the token adds to decoded text; null for ids outside the vocabulary and for skipped control tokens.
   * `first`: it is the first one of the text (some decoders drop the space that stands before the first word).
   */
  pieceOf(id: number, { skipSpecialTokens, first }: { skipSpecialTokens: boolean; first: boolean }): Piece | null {
    const token = this.#tokens[id];
    if (token === undefined || (skipSpecialTokens && this.#special.has(id))) return null;
    if (first) return pieceOf(this.#plan, token, this.#addedById.has(id), true);
    return (this.#pieces[id] ??= settle(pieceOf(this.#plan, token, this.#addedById.has(id), false), this.#plan));
  }

  /** A stream that joins pieces to text (for Detokenizer). */
  pieceStream(continuation: boolean): PieceStream {
    return new PieceStream(this.#plan, continuation);
  }

  /** The bytes one token stands for inside a text: a control token's own text in UTF-8; empty for unknown ids. */
  tokenBytes(id: number): Uint8Array {
    const piece = this.pieceOf(id, { skipSpecialTokens: false, first: false });
    return piece === null ? new Uint8Array(0) : pieceBytes(piece).slice();
  }

  isSpecial(id: number): boolean {
    return this.#special.has(id);
  }
}

/** "</s>" or {"content": "</s>", …}. */
function tokenText(value: unknown): string | null {
  if (typeof value === "string") return value;
  return isObject(value) && typeof value["content"] === "string" ? value["content"] : null;
}

/**
 * Added tokens of tokenizer.json, with those that only tokenizer_config.json knows. What the configuration names as bos,
 * eos, … or as additional special token is a control token, whatever its entry says.
 */
function readAddedTokens(value: unknown, config: Record<string, unknown>, vocab: ReadonlyMap<string, number>): AddedToken[] {
  const tokens: AddedToken[] = [];
  if (value !== null && value !== undefined) {
    if (!Array.isArray(value)) throw new TokenizerError(`tokenizer.json: added_tokens is ${shown(value)}, expected an array`);
    value.forEach((entry, i) => tokens.push(readAddedToken(entry, isObject(entry) ? entry["id"] : undefined, `added_tokens[${i}]`)));
  }
  const byContent = new Map(tokens.map((t) => [t.content, t]));
  const usedIds = new Set(tokens.map((t) => t.id));
  const extra = config["added_tokens_decoder"];
  for (const [id, entry] of isObject(extra) ? Object.entries(extra) : []) {
    const token = readAddedToken(entry, Number(id), `added_tokens_decoder["${id}"]`);
    const known = byContent.get(token.content);
    if (known) known.special ||= token.special;
    else if (!usedIds.has(token.id)) {
      tokens.push(token);
      byContent.set(token.content, token);
    }
  }
  for (const content of controlTexts(config)) {
    const known = byContent.get(content);
    if (known) known.special = true;
    else if (vocab.has(content)) {
      const id = vocab.get(content)!;
      tokens.push({ id, content, special: true, lstrip: false, rstrip: false, singleWord: false, normalized: false });
      byContent.set(content, tokens.at(-1)!);
    }
  }
  return tokens;
}

function controlTexts(config: Record<string, unknown>): string[] {
  const names = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];
  const more = config["additional_special_tokens"];
  const all = [...names.map((name) => config[name]), ...(Array.isArray(more) ? more : [])];
  return all.map(tokenText).filter((text): text is string => text !== null && text !== "");
}

function affixes(file: Affixes, config: Record<string, unknown>, bos: number | null, eos: number | null): Affixes {
  const before = adjusted(file.before, config["add_bos_token"], bos, (ids, id) => [id, ...ids]);
  const after = adjusted(file.after, config["add_eos_token"], eos, (ids, id) => [...ids, id]);
  return { before, after };
}

/** An explicit add_bos_token / add_eos_token wins over the post-processor; absent, the post-processor stands. */
function adjusted(ids: number[], wanted: unknown, id: number | null, add: (ids: number[], id: number) => number[]): number[] {
  if (id === null || typeof wanted !== "boolean") return ids;
  if (!wanted) return ids.filter((other) => other !== id);
  return ids.includes(id) ? ids : add(ids, id);
}

/** Bytes that are text on their own become text once and for all: the fast path of streaming. */
function settle(piece: Piece, plan: DecoderPlan): Piece {
  if (typeof piece === "string" || plan.bytes !== "level") return piece;
  for (const byte of piece) if (byte >= 0x80) return piece;
  return String.fromCharCode(...piece);
}
