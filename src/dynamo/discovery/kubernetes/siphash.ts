const MASK = (1n << 64n) - 1n;
const rotate = (x: bigint, bits: bigint): bigint => ((x << bits) | (x >> (64n - bits))) & MASK;

/**
 * SipHash-1-3 with a key of zeros: one round per 8-byte word, three to finish.
 * @returns an unsigned 64-bit hash
 */
export function sipHash13(bytes: Uint8Array): bigint {
  // "somepseudorandomlygeneratedbytes", the published start state.
  let [v0, v1, v2, v3] = [0x736f6d6570736575n, 0x646f72616e646f6dn, 0x6c7967656e657261n, 0x7465646279746573n];
  const round = () => {
    v0 = (v0 + v1) & MASK;
    v1 = rotate(v1, 13n) ^ v0;
    v0 = rotate(v0, 32n);
    v2 = (v2 + v3) & MASK;
    v3 = rotate(v3, 16n) ^ v2;
    v0 = (v0 + v3) & MASK;
    v3 = rotate(v3, 21n) ^ v0;
    v2 = (v2 + v1) & MASK;
    v1 = rotate(v1, 17n) ^ v2;
    v2 = rotate(v2, 32n);
  };
  const absorb = (word: bigint) => {
    v3 ^= word;
    round();
    v0 ^= word;
  };
  // The last word holds the rest of the bytes and, on top, the length modulo 256.
  const padded = new Uint8Array((Math.floor(bytes.length / 8) + 1) * 8);
  padded.set(bytes);
  padded[padded.length - 1] = bytes.length & 0xff;
  const view = new DataView(padded.buffer);
  for (let at = 0; at < padded.length; at += 8) absorb(view.getBigUint64(at, true));
  v2 ^= 0xffn;
  for (let i = 0; i < 3; i++) round();
  return v0 ^ v1 ^ v2 ^ v3;
}
