import type { JsonObject } from "./files.ts";
import { Fields } from "./fields.ts";
import type { GgufFile } from "./gguf.ts";

/** What a GGUF's tokenizer.ggml.* keys say, in the forms of a Hugging Face directory. */
export interface GgufTokenizer {
  tokenizerJson: JsonObject;
  tokenizerConfig: Record<string, unknown>;
  bosTokenId: number | null;
  padTokenId: number | null;
  /** Tokens that end an answer, the file's eos first. */
  eosTokenIds: number[];
}

/** Values of tokenizer.ggml.token_type. */
const TOKEN = { normal: 1, unknown: 2, control: 3, userDefined: 4, unused: 5, byte: 6 } as const;

const GPT2_BYTE_LEVEL = { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: true };
const BYTES_ONLY = { ...GPT2_BYTE_LEVEL, use_regex: false };
const split = (regex: string) => ({ type: "Split", pattern: { Regex: regex }, behavior: "Isolated", invert: false });
/** The word pattern that Llama 3 and Qwen share but for how digits group. */
const words = (digits: string) =>
  `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|${digits}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+`;

interface PreTokenizer {
  steps: JsonObject[];
  normalizer: JsonObject | null;
  /** A word that is a token as a whole is taken without merging. */
  ignoreMerges: boolean;
  /** Prepends bos when the file does not say. */
  addBos: boolean;
  /** Control tokens that end an answer beside the file's eos: what the original models' generation_config.json lists. */
  endTokens: string[];
}

/** By tokenizer.ggml.pre. Each is the pre-tokenizer of the original models' tokenizer.json. */
const LLAMA3: PreTokenizer = {
  steps: [split(words("\\p{N}{1,3}")), BYTES_ONLY], normalizer: null, ignoreMerges: true, addBos: true,
  endTokens: ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
};
const GPT2: PreTokenizer = { steps: [GPT2_BYTE_LEVEL], normalizer: null, ignoreMerges: false, addBos: false, endTokens: [] };
const PRE_TOKENIZERS: Record<string, PreTokenizer> = {
  "llama-bpe": LLAMA3,
  llama3: LLAMA3,
  "llama-v3": LLAMA3,
  qwen2: {
    steps: [split(words("\\p{N}")), BYTES_ONLY], normalizer: { type: "NFC" }, ignoreMerges: false, addBos: false,
    endTokens: ["<|im_end|>", "<|endoftext|>"],
  },
  smollm: { ...GPT2, steps: [{ type: "Digits", individual_digits: true }, GPT2_BYTE_LEVEL] },
  "gpt-2": GPT2,
  // What files without a named pre-tokenizer were made for: the patterns apply one after the other to the pieces of the one before.
  default: {
    ...GPT2,
    steps: [
      split("[\\p{P}\\$\\+<=>\\^~\\|]+"),
      split("'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)"),
      split("\\p{N}+"),
      split("[0-9][0-9][0-9]"),
      BYTES_ONLY,
    ],
  },
};

/**
 * The tokenizer of a GGUF whose vocabulary has `vocab` tokens.
 * @throws ModelError for a tokenizer model other than "gpt2" (byte-level BPE), an unknown pre-tokenizer, and lists that disagree.
 */
export function tokenizerFromGguf(gguf: GgufFile, vocab: number): GgufTokenizer {
  const meta = new Fields(gguf.path, gguf.metadata, "tokenizer.ggml.");
  const model = meta.string("model");
  if (model !== "gpt2") throw meta.fail("model", `unsupported tokenizer ${JSON.stringify(model)}, expected "gpt2" (byte-level BPE)`);
  const preName = meta.string("pre") ?? "default";
  const pre = Object.hasOwn(PRE_TOKENIZERS, preName) ? PRE_TOKENIZERS[preName]! : null;
  if (!pre) throw meta.fail("pre", `unsupported pre-tokenizer ${JSON.stringify(preName.slice(0, 40))}, expected one of ${Object.keys(PRE_TOKENIZERS).join(", ")}`);

  const tokens = meta.strings("tokens") ?? [];
  const types = readTypes(meta, gguf, tokens.length);
  checkScores(meta, gguf, tokens.length);
  const ids = indexTokens(meta, tokens, types);
  const merges = readMerges(meta);
  const special = (key: string) => meta.optionalInt(key, 0, vocab - 1);
  const bos = special("bos_token_id");
  const eos = special("eos_token_id");
  const pad = special("padding_token_id");
  const unknown = special("unknown_token_id");
  const addBos = meta.bool("add_bos_token", pre.addBos) && bos !== null;
  const addEos = meta.bool("add_eos_token", false) && eos !== null;
  const addPrefixSpace = meta.bool("add_space_prefix", false);

  const added = addedTokens(tokens, types);
  const tokenizerJson: JsonObject = {
    version: "1.0",
    truncation: null,
    padding: null,
    added_tokens: added,
    normalizer: pre.normalizer,
    pre_tokenizer: { type: "Sequence", pretokenizers: pre.steps.map((step) => ("add_prefix_space" in step ? { ...step, add_prefix_space: addPrefixSpace } : step)) },
    post_processor: addBos || addEos ? template(tokens, addBos ? bos : null, addEos ? eos : null) : null,
    decoder: { ...GPT2_BYTE_LEVEL, add_prefix_space: true },
    model: {
      type: "BPE", dropout: null, unk_token: null, continuing_subword_prefix: null, end_of_word_suffix: null,
      fuse_unk: false, byte_fallback: false, ignore_merges: pre.ignoreMerges, vocab: Object.fromEntries(ids), merges,
    },
  };
  const text = (id: number | null) => (id === null ? {} : tokens[id]);
  const named: Record<string, unknown> = { bos_token: text(bos), eos_token: text(eos), pad_token: text(pad), unk_token: text(unknown) };
  const tokenizerConfig: Record<string, unknown> = {
    tokenizer_class: "PreTrainedTokenizerFast",
    add_bos_token: addBos,
    add_eos_token: addEos,
    add_prefix_space: addPrefixSpace,
    clean_up_tokenization_spaces: false,
    ...Object.fromEntries(Object.entries(named).filter(([, value]) => typeof value === "string")),
    added_tokens_decoder: Object.fromEntries(added.map(({ id, ...flags }) => [String(id), flags])),
  };
  const ends = [eos, special("eot_token_id"), special("eom_token_id"), ...pre.endTokens.map((name) => controlToken(ids, types, name))];
  return { tokenizerJson, tokenizerConfig, bosTokenId: bos, padTokenId: pad, eosTokenIds: [...new Set(ends.filter((id) => id !== null))] };
}

function controlToken(ids: Map<string, number>, types: number[], name: string): number | null {
  const id = ids.get(name);
  return id !== undefined && types[id] === TOKEN.control ? id : null;
}

function readTypes(meta: Fields, gguf: GgufFile, count: number): number[] {
  const types = meta.raw("token_type");
  if (types === undefined) return Array.from({ length: count }, () => TOKEN.normal);
  const stored = gguf.types.get("tokenizer.ggml.token_type");
  if (!Array.isArray(types) || (stored !== "INT32" && stored !== "UINT32")) throw meta.fail("token_type", `has type ${stored}, expected a list of INT32`);
  if (types.length !== count) throw meta.fail("token_type", `${types.length} entries, expected one for each of ${count} tokens`);
  return types as number[];
}

/** Byte-level BPE has no use for scores; a list that disagrees with its declaration still means a broken file. */
function checkScores(meta: Fields, gguf: GgufFile, count: number): void {
  const scores = meta.raw("scores");
  if (scores === undefined) return;
  const stored = gguf.types.get("tokenizer.ggml.scores");
  if (!Array.isArray(scores) || stored !== "FLOAT32") throw meta.fail("scores", `has type ${stored}, expected a list of FLOAT32`);
  if (scores.length !== count) throw meta.fail("scores", `${scores.length} entries, expected one for each of ${count} tokens`);
}

/** Ids by text. Unused tokens are padding of the embedding: no text ever encodes to them. */
function indexTokens(meta: Fields, tokens: string[], types: number[]): Map<string, number> {
  const ids = new Map<string, number>();
  for (let id = 0; id < tokens.length; id++) {
    if (types[id] === TOKEN.unused) continue;
    const token = tokens[id]!;
    const other = ids.get(token);
    if (other !== undefined) throw meta.fail("tokens", `ids ${other} and ${id} have the same text ${JSON.stringify(token.slice(0, 40))}`);
    ids.set(token, id);
  }
  return ids;
}

/** Each merge is "left right". That both and their join are tokens is the tokenizer's own check, whatever file it came from. */
function readMerges(meta: Fields): string[] {
  const merges = meta.strings("merges");
  if (!merges) throw meta.fail("merges", "missing");
  for (let i = 0; i < merges.length; i++) {
    const merge = merges[i]!;
    const space = merge.indexOf(" ");
    if (space <= 0 || space === merge.length - 1 || merge.indexOf(" ", space + 1) >= 0)
      throw meta.fail("merges", `entry ${i} is ${JSON.stringify(merge.slice(0, 40))}, expected two tokens with a space between`);
  }
  return merges;
}

interface AddedToken {
  id: number;
  content: string;
  single_word: boolean;
  lstrip: boolean;
  rstrip: boolean;
  normalized: boolean;
  special: boolean;
}

/** Tokens that are matched as a whole before the text is split: control tokens (special) and user-defined ones. */
function addedTokens(tokens: string[], types: number[]): AddedToken[] {
  const added: AddedToken[] = [];
  for (let id = 0; id < tokens.length; id++) {
    const type = types[id];
    if (type !== TOKEN.control && type !== TOKEN.userDefined && type !== TOKEN.unknown) continue;
    // An empty text would match everywhere.
    if (tokens[id] === "") continue;
    added.push({ id, content: tokens[id]!, single_word: false, lstrip: false, rstrip: false, normalized: false, special: type !== TOKEN.userDefined });
  }
  return added;
}

/** A post-processor that puts bos before and eos behind a text. */
function template(tokens: string[], bos: number | null, eos: number | null): JsonObject {
  const around = [bos, eos].filter((id) => id !== null);
  const piece = (id: number | null, type: number) => (id === null ? [] : [{ SpecialToken: { id: tokens[id], type_id: type } }]);
  const sequence = (name: string, type: number) => [...piece(bos, type), { Sequence: { id: name, type_id: type } }, ...piece(eos, type)];
  return {
    type: "TemplateProcessing",
    single: sequence("A", 0),
    pair: [...sequence("A", 0), ...sequence("B", 1)],
    special_tokens: Object.fromEntries(around.map((id) => [tokens[id]!, { id: tokens[id], ids: [id], tokens: [tokens[id]] }])),
  };
}
