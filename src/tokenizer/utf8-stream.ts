const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
const REPLACEMENT = "\ufffd";
const EMPTY = new Uint8Array(0);

/** Range of the second byte after each lead byte, by the well-formedness table of Unicode (3-7). */
function secondByteOk(lead: number, second: number): boolean {
  if (lead === 0xe0) return second >= 0xa0 && second <= 0xbf;
  if (lead === 0xed) return second >= 0x80 && second <= 0x9f;
  if (lead === 0xf0) return second >= 0x90 && second <= 0xbf;
  if (lead === 0xf4) return second >= 0x80 && second <= 0x8f;
  return second >= 0x80 && second <= 0xbf;
}

function sequenceLength(lead: number): number {
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return 2;
  if (lead >= 0xe0 && lead <= 0xef) return 3;
  return lead >= 0xf0 && lead <= 0xf4 ? 4 : 0;
}

/** Bytes at the end that more bytes could still complete to a character: 0 to 3. */
export function incompleteTail(bytes: Uint8Array): number {
  for (let back = 1; back <= 3 && back <= bytes.length; back++) {
    const lead = bytes[bytes.length - back]!;
    if (lead >= 0x80 && lead <= 0xbf) continue;
    if (sequenceLength(lead) <= back) return 0;
    return back === 1 || secondByteOk(lead, bytes[bytes.length - back + 1]!) ? back : 0;
  }
  return 0;
}

/**
 * UTF-8 → text in pieces. Text comes out as soon as its bytes are complete; at most 3 bytes wait. U+FFFD comes out only
 * for bytes that no later byte can make valid: one per maximal invalid part ("part", what byte-level BPE decoders do) or
 * one per invalid byte ("byte", what byte-fallback decoders do).
 */
export class Utf8Stream {
  #pending: Uint8Array = EMPTY;

  constructor(readonly unit: "part" | "byte") {}

  get idle(): boolean {
    return this.#pending.length === 0;
  }

  push(bytes: Uint8Array): string {
    let all = bytes;
    if (this.#pending.length > 0) {
      all = new Uint8Array(this.#pending.length + bytes.length);
      all.set(this.#pending);
      all.set(bytes, this.#pending.length);
    }
    const tail = incompleteTail(all);
    this.#pending = tail === 0 ? EMPTY : all.slice(all.length - tail);
    return this.#decode(tail === 0 ? all : all.subarray(0, all.length - tail));
  }

  /** The stream of bytes ends here: what waits is invalid. */
  flush(): string {
    const rest = this.#pending;
    this.#pending = EMPTY;
    return this.#decode(rest);
  }

  #decode(bytes: Uint8Array): string {
    if (this.unit === "part") return decoder.decode(bytes);
    let out = "";
    for (let at = 0; at < bytes.length; ) {
      const length = sequenceLength(bytes[at]!);
      const valid =
        length > 0 &&
        at + length <= bytes.length &&
        (length === 1 || secondByteOk(bytes[at]!, bytes[at + 1]!)) &&
        incompleteFree(bytes, at + 2, at + length);
      out += valid ? decoder.decode(bytes.subarray(at, at + length)) : REPLACEMENT;
      at += valid ? length : 1;
    }
    return out;
  }
}

function incompleteFree(bytes: Uint8Array, from: number, to: number): boolean {
  for (let at = from; at < to; at++) if (bytes[at]! < 0x80 || bytes[at]! > 0xbf) return false;
  return true;
}
