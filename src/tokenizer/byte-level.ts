/**
 * The byte ↔ character table of byte-level BPE: printable Latin-1 bytes stand for themselves, the other 68 for U+0100
 * upward, so that any byte sequence is a string of visible characters in the vocabulary.
 */
function printable(byte: number): boolean {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
}

const CHAR_OF_BYTE: string[] = [];
/** Byte of each character code below 0x144, -1 where the table has none. */
const BYTE_OF_CHAR = new Int16Array(0x144).fill(-1);
for (let byte = 0, extra = 0; byte < 256; byte++) {
  const code = printable(byte) ? byte : 0x100 + extra++;
  CHAR_OF_BYTE.push(String.fromCharCode(code));
  BYTE_OF_CHAR[code] = byte;
}

const utf8 = new TextEncoder();
const PLAIN = /^[\x21-\x7e]*$/;
const PLAIN_AFTER_SPACE = /^ [\x21-\x7e]*$/;

/** Text → its UTF-8 bytes as table characters. */
export function toByteLevel(text: string): string {
  if (PLAIN.test(text)) return text;
  if (PLAIN_AFTER_SPACE.test(text)) return CHAR_OF_BYTE[0x20] + text.slice(1);
  let out = "";
  for (const byte of utf8.encode(text)) out += CHAR_OF_BYTE[byte]!;
  return out;
}

/** Token → its bytes; null where a character is not of the table (the token then stands for its own UTF-8). */
export function fromByteLevel(token: string): Uint8Array | null {
  const bytes = new Uint8Array(token.length);
  for (let i = 0; i < token.length; i++) {
    const code = token.charCodeAt(i);
    const byte = code < BYTE_OF_CHAR.length ? BYTE_OF_CHAR[code]! : -1;
    if (byte < 0) return null;
    bytes[i] = byte;
  }
  return bytes;
}
