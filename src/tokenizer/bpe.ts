import { arrayAt, fail, flagAt, isObject, MAX_TOKEN_ID, objectAt, tokenIdOf } from "./json-fields.ts";
import type { Json } from "./json-fields.ts";
import { MergeTable } from "./merge-table.ts";

/** Pieces up to this many symbols scan for the best pair; longer ones use a heap, so that cost stays n log n. */
const SCAN_LIMIT = 24;
const CACHE_ENTRIES = 20_000;
const CACHED_PIECE_LENGTH = 64;
const HEX = Array.from({ length: 256 }, (_, byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`);
const utf8 = new TextEncoder();

/**
 * Byte-pair encoding over token ids: `model` of tokenizer.json with the semantics of the reference (byte fallback, unknown
 * token with and without fusing, ignore_merges, sub-word prefix, end-of-word suffix).
 */
export class Bpe {
  readonly vocab: ReadonlyMap<string, number>;
  readonly #merges: MergeTable;
  readonly #unk: number | null;
  readonly #fuseUnk: boolean;
  readonly #ignoreMerges: boolean;
  readonly #prefix: string;
  readonly #suffix: string;
  /** Ids of <0x00>..<0xFF>, where the model falls back to bytes. */
  readonly #byteIds: (number | undefined)[] | null;
  readonly #cache = new Map<string, readonly number[]>();

  constructor(config: Json) {
    const vocab = readVocab(objectAt(config, "vocab", "model.vocab"));
    this.vocab = vocab;
    const unk = config["unk_token"] ?? null;
    if (unk !== null && typeof unk !== "string") fail("model.unk_token", unk, "a string or null");
    this.#unk = unk === null ? null : (vocab.get(unk) ?? fail("model.unk_token", unk, "a token of model.vocab"));
    this.#fuseUnk = flagAt(config, "fuse_unk", false, "model.fuse_unk");
    this.#ignoreMerges = flagAt(config, "ignore_merges", false, "model.ignore_merges");
    this.#prefix = affix(config, "continuing_subword_prefix");
    this.#suffix = affix(config, "end_of_word_suffix");
    this.#byteIds = flagAt(config, "byte_fallback", false, "model.byte_fallback") ? HEX.map((t) => vocab.get(t)) : null;
    this.#merges = this.#readMerges(arrayAt(config, "merges", "model.merges"));
  }

  #readMerges(merges: unknown[]): MergeTable {
    const table = new MergeTable(merges.length);
    const tokens: string[] = [];
    for (const [token, id] of this.vocab) tokens[id] = token;
    // Trained vocabularies list tokens in the order of their merges: the next id is the usual one, no text is joined then.
    let usual = -1;
    merges.forEach((merge, rank) => {
      let left: unknown, right: unknown;
      if (typeof merge === "string") {
        const space = merge.indexOf(" ", 1);
        left = merge.slice(0, space);
        right = merge.slice(space + 1);
        if (space < 0) fail(`model.merges[${rank}]`, merge, "two tokens");
      } else if (Array.isArray(merge) && merge.length === 2) [left, right] = merge;
      if (typeof left !== "string" || typeof right !== "string") fail(`model.merges[${rank}]`, merge, "two tokens");
      const leftId = this.vocab.get(left);
      const rightId = this.vocab.get(right);
      const next = tokens[usual];
      const expected =
        next !== undefined && this.#prefix === "" && next.length === left.length + right.length && next.startsWith(left) && next.endsWith(right);
      const merged = expected ? usual : this.vocab.get(left + right.slice(this.#prefix.length));
      if (leftId === undefined || rightId === undefined || merged === undefined)
        fail(`model.merges[${rank}]`, merge, "tokens of model.vocab whose join is one too");
      table.set(leftId, rightId, rank, merged);
      usual = merged + 1;
    });
    return table;
  }

  /** Appends the ids of one pre-token to `out`. */
  encode(piece: string, out: number[]): void {
    if (piece.length === 0) return;
    if (this.#ignoreMerges) {
      const whole = this.vocab.get(piece);
      if (whole !== undefined) {
        out.push(whole);
        return;
      }
    }
    let ids = this.#cache.get(piece);
    if (ids === undefined) {
      const symbols = this.#symbols(piece);
      ids = symbols.length <= SCAN_LIMIT ? this.#mergeByScan(symbols) : this.#mergeByHeap(symbols);
      if (piece.length <= CACHED_PIECE_LENGTH) {
        if (this.#cache.size >= CACHE_ENTRIES) this.#cache.clear();
        this.#cache.set(piece, ids);
      }
    }
    for (const id of ids) out.push(id);
  }

  /** One id per character; characters outside the vocabulary become byte tokens or the unknown token, or are dropped. */
  #symbols(piece: string): number[] {
    const ids: number[] = [];
    let unknown = false;
    for (let at = 0; at < piece.length; ) {
      const char = String.fromCodePoint(piece.codePointAt(at)!);
      const first = at === 0;
      at += char.length;
      const symbol = (first ? char : this.#prefix + char) + (at >= piece.length ? this.#suffix : "");
      const id = this.vocab.get(symbol);
      if (id !== undefined) {
        ids.push(id);
        unknown = false;
        continue;
      }
      if (this.#byteIds) {
        const bytes = Array.from(utf8.encode(symbol), (byte) => this.#byteIds![byte]);
        if (bytes.every((byte) => byte !== undefined)) {
          ids.push(...bytes);
          continue;
        }
      }
      if (this.#unk !== null && !(unknown && this.#fuseUnk)) ids.push(this.#unk);
      unknown = this.#unk !== null;
    }
    return ids;
  }

  #mergeByScan(ids: number[]): number[] {
    const merges = this.#merges;
    for (;;) {
      let best = -1;
      let bestRank = Infinity;
      for (let i = 0; i + 1 < ids.length; i++) {
        const rank = merges.rank(ids[i]!, ids[i + 1]!);
        if (rank >= 0 && rank < bestRank) {
          bestRank = rank;
          best = i;
        }
      }
      if (best < 0) return ids;
      ids.splice(best, 2, merges.merged(ids[best]!, ids[best + 1]!));
    }
  }

  /** Linked symbols in typed arrays; a heap entry is rank * 2^32 + position, so equal ranks merge left to right. */
  #mergeByHeap(symbols: number[]): number[] {
    const merges = this.#merges;
    const count = symbols.length;
    const ids = Int32Array.from(symbols);
    const next = Int32Array.from({ length: count }, (_, i) => (i + 1 < count ? i + 1 : -1));
    const previous = Int32Array.from({ length: count }, (_, i) => i - 1);
    const heap = new MinHeap();
    const offer = (left: number) => {
      if (left < 0 || next[left]! < 0) return;
      const rank = merges.rank(ids[left]!, ids[next[left]!]!);
      if (rank >= 0) heap.push(rank * 2 ** 32 + left);
    };
    for (let i = 0; i + 1 < count; i++) offer(i);
    for (let top = heap.pop(); top !== undefined; top = heap.pop()) {
      const left = top % 2 ** 32;
      const rank = Math.floor(top / 2 ** 32);
      const right = next[left]!;
      // Stale entries: the symbol was merged away (id -1), or its pair is another one by now.
      if (ids[left] === -1 || right < 0 || merges.rank(ids[left]!, ids[right]!) !== rank) continue;
      ids[left] = merges.merged(ids[left]!, ids[right]!);
      ids[right] = -1;
      next[left] = next[right]!;
      if (next[left]! >= 0) previous[next[left]!] = left;
      offer(previous[left]!);
      offer(left);
    }
    return Array.from(ids).filter((id) => id !== -1);
  }
}

function readVocab(entries: Json): Map<string, number> {
  const vocab = new Map<string, number>();
  for (const token of Object.keys(entries)) {
    const id = entries[token];
    if (typeof id !== "number" || !Number.isInteger(id) || id < 0 || id > MAX_TOKEN_ID) tokenIdOf(id, `model.vocab[${JSON.stringify(token)}]`);
    vocab.set(token, id as number);
  }
  return vocab;
}

function affix(config: Json, key: string): string {
  const value = config[key] ?? "";
  return typeof value === "string" ? value : fail(`model.${key}`, value, "a string or null");
}

export function createModel(value: unknown): Bpe {
  if (!isObject(value)) return fail("model", value, "an object");
  // Files of the first format version have no type; their merges tell that they are BPE.
  const type = value["type"] ?? (Array.isArray(value["merges"]) ? "BPE" : undefined);
  if (type !== "BPE") fail("model.type", type, '"BPE"');
  if (typeof value["dropout"] === "number" && value["dropout"] > 0) fail("model.dropout", value["dropout"], "null or 0");
  return new Bpe(value);
}

/** Binary min-heap of doubles. */
class MinHeap {
  readonly #items: number[] = [];

  push(value: number): void {
    const items = this.#items;
    let at = items.length;
    items.push(value);
    while (at > 0) {
      const parent = (at - 1) >> 1;
      if (items[parent]! <= value) break;
      items[at] = items[parent]!;
      at = parent;
    }
    items[at] = value;
  }

  pop(): number | undefined {
    const items = this.#items;
    const top = items[0];
    const last = items.pop();
    if (items.length === 0 || last === undefined) return top;
    let at = 0;
    for (;;) {
      let child = at * 2 + 1;
      if (child >= items.length) break;
      if (child + 1 < items.length && items[child + 1]! < items[child]!) child++;
      if (items[child]! >= last) break;
      items[at] = items[child]!;
      at = child;
    }
    items[at] = last;
    return top;
  }
}
