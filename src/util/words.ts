/** int32 words that native code may read or write: over a real ArrayBuffer, because small plain typed arrays can move. */
export function int32Words(length: number): Int32Array {
  return new Int32Array(new ArrayBuffer(length * 4));
}

const scratch = new DataView(new ArrayBuffer(4));

/** The bits of a float32 as an int32 word. */
export function floatToWord(value: number): number {
  scratch.setFloat32(0, value, true);
  return scratch.getInt32(0, true);
}

export function wordToFloat(word: number): number {
  scratch.setInt32(0, word, true);
  return scratch.getFloat32(0, true);
}

/** Low and high int32 word of a 64-bit id, signed or unsigned. */
export function splitU64(value: bigint): [low: number, high: number] {
  return [Number(BigInt.asIntN(32, value)), Number(BigInt.asIntN(32, value >> 32n))];
}

/** The unsigned 64-bit id of two words. */
export function joinU64(low: number, high: number): bigint {
  return (BigInt(high >>> 0) << 32n) | BigInt(low >>> 0);
}
