import { toByteLevel } from "../../../../src/tokenizer/byte-level.ts";
import { Tokenizer } from "../../../../src/tokenizer/tokenizer.ts";

export const EOS = 257;

/** Characters of the byte-level table, in byte order. toByteLevel takes text, so bytes above 0x7f come from two-byte characters. */
function tableOfBytes(): string[] {
  const chars: string[] = [];
  for (let byte = 0; byte < 0x80; byte++) chars[byte] = toByteLevel(String.fromCharCode(byte));
  for (let code = 0x80; code < 0x800; code++) {
    const bytes = new TextEncoder().encode(String.fromCharCode(code));
    const level = [...toByteLevel(String.fromCharCode(code))];
    bytes.forEach((byte, i) => (chars[byte] = level[i] as string));
  }
  for (const code of [0xffff, 0x10000, 0x40000, 0x80000, 0xc0000, 0x100000]) {
    const text = String.fromCodePoint(code);
    const level = [...toByteLevel(text)];
    new TextEncoder().encode(text).forEach((byte, i) => (chars[byte] = level[i] as string));
  }
  for (let code = 0x800; code < 0xffff; code += 0x1000) {
    const text = String.fromCharCode(code);
    if (!text.isWellFormed()) continue;
    const level = [...toByteLevel(text)];
    new TextEncoder().encode(text).forEach((byte, i) => (chars[byte] = level[i] as string));
  }
  return chars;
}

/** A real tokenizer whose token ids are byte values; 256 is BOS, 257 EOS, both control tokens. */
export function byteTokenizer(): Tokenizer {
  const vocab: Record<string, number> = {};
  tableOfBytes().forEach((char, byte) => (vocab[char] = byte));
  const special = (id: number, content: string) => ({ id, content, special: true, single_word: false, lstrip: false, rstrip: false, normalized: false });
  return Tokenizer.create(
    {
      version: "1.0",
      added_tokens: [special(256, "<s>"), special(EOS, "</s>")],
      normalizer: null,
      pre_tokenizer: { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: false },
      post_processor: null,
      decoder: { type: "ByteLevel", add_prefix_space: true, trim_offsets: true, use_regex: true },
      model: { type: "BPE", vocab, merges: [] },
    },
    { bos_token: "<s>", eos_token: "</s>" },
  );
}
