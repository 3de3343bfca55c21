/** A small byte-level BPE tokenizer: 256 bytes, some merges, four control tokens. Ids are stable. */

/** Printable stand-ins of the 256 bytes, in the order of GPT-2's table. */
function byteAlphabet(): string[] {
  const printable = (byte: number) => (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
  const out: string[] = [];
  let extra = 0;
  for (let byte = 0; byte < 256; byte++) out.push(String.fromCharCode(printable(byte) ? byte : 0x100 + extra++));
  return out;
}

const WORDS = "the and you for that with this have from they will what there when your can said each which their time how about".split(" ");

/** "left right", each result being a token: words are built letter by letter, with and without a leading space (Ġ). */
export function tinyMerges(): string[] {
  const merges: string[] = [];
  const made = new Set<string>();
  for (const word of WORDS.flatMap((word) => [word, `\u0120${word}`])) {
    for (let length = 2; length <= word.length; length++) {
      const token = word.slice(0, length);
      if (made.has(token)) continue;
      made.add(token);
      merges.push(`${word.slice(0, length - 1)} ${word[length - 1]}`);
    }
  }
  return merges.slice(0, TINY_VOCAB - 256 - 4);
}

export const TINY_VOCAB = 384;
/** Control tokens, behind the bytes. */
export const TINY_TOKENS = { endOfText: 256, bos: 257, imStart: 258, imEnd: 259 };
const TEXTS: Record<number, string> = { 256: "<|endoftext|>", 257: "<|bos|>", 258: "<|im_start|>", 259: "<|im_end|>" };

export const TINY_CHAT_TEMPLATE =
  "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

function addedTokens() {
  return Object.entries(TEXTS).map(([id, content]) => ({ id: Number(id), content, single_word: false, lstrip: false, rstrip: false, normalized: false, special: true }));
}

/** tokenizer.json, 384 tokens: bytes, control tokens, merges, and fillers that no text encodes to. */
export function tinyTokenizerJson(): Record<string, unknown> {
  const vocab: Record<string, number> = {};
  for (const token of byteAlphabet()) vocab[token] = Object.keys(vocab).length;
  for (const text of Object.values(TEXTS)) vocab[text] = Object.keys(vocab).length;
  for (const merge of tinyMerges()) vocab[merge.replace(" ", "")] = Object.keys(vocab).length;
  for (let id = Object.keys(vocab).length; id < TINY_VOCAB; id++) vocab[`[filler${id}]`] = id;
  const byteLevel = { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: true };
  return {
    version: "1.0",
    truncation: null,
    padding: null,
    added_tokens: addedTokens(),
    normalizer: null,
    pre_tokenizer: { type: "Sequence", pretokenizers: [{ type: "Digits", individual_digits: true }, byteLevel] },
    post_processor: null,
    decoder: { ...byteLevel, add_prefix_space: true },
    model: {
      type: "BPE", dropout: null, unk_token: null, continuing_subword_prefix: null, end_of_word_suffix: null,
      fuse_unk: false, byte_fallback: false, ignore_merges: false, vocab, merges: tinyMerges(),
    },
  };
}

export function tinyTokenizerConfig(): Record<string, unknown> {
  return {
    tokenizer_class: "PreTrainedTokenizerFast",
    bos_token: TEXTS[TINY_TOKENS.bos],
    eos_token: TEXTS[TINY_TOKENS.imEnd],
    pad_token: TEXTS[TINY_TOKENS.endOfText],
    add_bos_token: false,
    clean_up_tokenization_spaces: false,
    model_max_length: 512,
    chat_template: TINY_CHAT_TEMPLATE,
  };
}
