/** Weight formats to and from f32, as their files store them (little-endian). Blocks of 32 run along a row. */
import type { WeightDtype } from "../../src/config/model-spec.ts";

export const BLOCK = 32;
const BLOCK_BYTES: Record<WeightDtype, [elements: number, bytes: number]> = {
  f32: [1, 4], f16: [1, 2], bf16: [1, 2], q8_0: [BLOCK, 34], q4_0: [BLOCK, 18], q4_1: [BLOCK, 20],
};

/** Bytes that `count` elements take; count is a multiple of the block. */
export function storedBytes(dtype: WeightDtype, count: number): number {
  const [elements, bytes] = BLOCK_BYTES[dtype];
  if (count % elements !== 0) throw new Error(`${count} elements are not a multiple of ${elements} (${dtype})`);
  return (count / elements) * bytes;
}

/** f32 to bf16, to nearest even. */
function bf16Bits(value: number): number {
  f32Scratch[0] = value;
  const bits = u32Scratch[0]!;
  if (Number.isNaN(value)) return (bits >>> 16) | 0x40;
  return (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}
const f32Scratch = new Float32Array(1);
const u32Scratch = new Uint32Array(f32Scratch.buffer);

/** Stored bytes to f32, exactly as the format defines its values. */
export function dequantize(bytes: Uint8Array, dtype: WeightDtype, count: number): Float32Array {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (bytes.byteLength !== storedBytes(dtype, count)) throw new Error(`${bytes.byteLength} bytes for ${count} elements of ${dtype}`);
  const out = new Float32Array(count);
  switch (dtype) {
    case "f32":
      for (let i = 0; i < count; i++) out[i] = view.getFloat32(i * 4, true);
      return out;
    case "f16":
      for (let i = 0; i < count; i++) out[i] = view.getFloat16(i * 2, true);
      return out;
    case "bf16": {
      const bits = new Uint32Array(out.buffer);
      for (let i = 0; i < count; i++) bits[i] = view.getUint16(i * 2, true) << 16;
      return out;
    }
    case "q8_0":
      for (let block = 0, at = 0; block < count; block += BLOCK, at += 34) {
        const d = view.getFloat16(at, true);
        for (let i = 0; i < BLOCK; i++) out[block + i] = d * view.getInt8(at + 2 + i);
      }
      return out;
    case "q4_0":
      for (let block = 0, at = 0; block < count; block += BLOCK, at += 18) {
        const d = view.getFloat16(at, true);
        for (let i = 0; i < 16; i++) {
          const pair = bytes[at + 2 + i]!;
          out[block + i] = d * ((pair & 15) - 8);
          out[block + 16 + i] = d * ((pair >> 4) - 8);
        }
      }
      return out;
    case "q4_1":
      for (let block = 0, at = 0; block < count; block += BLOCK, at += 20) {
        const d = view.getFloat16(at, true);
        const m = view.getFloat16(at + 2, true);
        for (let i = 0; i < 16; i++) {
          const pair = bytes[at + 4 + i]!;
          // The product is rounded to f32 before the sum, as a plain f32 implementation does.
          out[block + i] = Math.fround(d * (pair & 15)) + m;
          out[block + 16 + i] = Math.fround(d * (pair >> 4)) + m;
        }
      }
      return out;
  }
}

/** f32 to stored bytes, rounding to nearest. */
export function quantize(values: Float32Array, dtype: WeightDtype): Uint8Array {
  const out = new Uint8Array(storedBytes(dtype, values.length));
  const view = new DataView(out.buffer);
  switch (dtype) {
    // Hosts here are little-endian, as the formats are: element arrays go over as they are.
    case "f32":
      new Float32Array(out.buffer).set(values);
      return out;
    case "f16":
      new Float16Array(out.buffer).set(values);
      return out;
    case "bf16": {
      const bits = new Uint16Array(out.buffer);
      for (let i = 0; i < values.length; i++) bits[i] = bf16Bits(values[i]!);
      return out;
    }
    case "q8_0":
      eachBlock(values, 34, (block, at) => {
        const d = maxAbs(block) / 127;
        view.setFloat16(at, d, true);
        for (let i = 0; i < BLOCK; i++) out[at + 2 + i] = d === 0 ? 0 : roundAway(block[i]! / d);
      });
      return out;
    case "q4_0":
      eachBlock(values, 18, (block, at) => {
        // The value of largest magnitude becomes exactly -8, so the step has its opposite sign.
        let extreme = 0;
        for (let i = 0; i < BLOCK; i++) if (Math.abs(block[i]!) > Math.abs(extreme)) extreme = block[i]!;
        const d = extreme / -8;
        view.setFloat16(at, d, true);
        packNibbles(out, at + 2, block, (value) => (d === 0 ? 8 : value / d + 8.5));
      });
      return out;
    case "q4_1":
      eachBlock(values, 20, (block, at) => {
        let low = block[0]!;
        let high = low;
        for (let i = 1; i < BLOCK; i++) {
          low = Math.min(low, block[i]!);
          high = Math.max(high, block[i]!);
        }
        const d = (high - low) / 15;
        view.setFloat16(at, d, true);
        view.setFloat16(at + 2, low, true);
        packNibbles(out, at + 4, block, (value) => (d === 0 ? 0 : (value - low) / d + 0.5));
      });
      return out;
  }
}

function eachBlock(values: Float32Array, blockBytes: number, store: (block: Float32Array, at: number) => void): void {
  for (let start = 0, at = 0; start < values.length; start += BLOCK, at += blockBytes) store(values.subarray(start, start + BLOCK), at);
}

function maxAbs(block: Float32Array): number {
  let best = 0;
  for (let i = 0; i < block.length; i++) best = Math.max(best, Math.abs(block[i]!));
  return best;
}

function roundAway(value: number): number {
  return Math.sign(value) * Math.floor(Math.abs(value) + 0.5);
}

/** Low nibbles hold elements 0..15, high nibbles 16..31. */
function packNibbles(out: Uint8Array, at: number, block: Float32Array, scaled: (value: number) => number): void {
  const nibble = (value: number) => Math.max(0, Math.min(15, Math.trunc(scaled(value))));
  for (let i = 0; i < 16; i++) out[at + i] = nibble(block[i]!) | (nibble(block[16 + i]!) << 4);
}

/**
 * The GGUF converter of arch "llama" interleaves the two rotary halves of each head's rows; this undoes it (interleave = false) or does it.
 * values: (heads * headDim, cols), row-major.
 */
export function permuteHeads(values: Float32Array, heads: number, cols: number, interleave: boolean): Float32Array {
  const headDim = values.length / heads / cols;
  const half = headDim / 2;
  const out = new Float32Array(values.length);
  for (let head = 0; head < heads; head++)
    for (let i = 0; i < half; i++)
      for (let part = 0; part < 2; part++) {
        const halves = (head * headDim + part * half + i) * cols;
        const pairs = (head * headDim + 2 * i + part) * cols;
        const [from, to] = interleave ? [halves, pairs] : [pairs, halves];
        out.set(values.subarray(from, from + cols), to);
      }
  return out;
}
