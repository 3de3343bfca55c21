/** Checkpoints with scales for their KV cache. */
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

export interface RawTensor {
  dtype: string;
  shape: number[];
  bytes: Uint8Array;
}

/** A scalar of a type that checkpoints have; values that f16 or bf16 do not hold are cut. */
export function scalar(value: number, dtype: "F32" | "BF16" | "F16" = "F32", shape: number[] = []): RawTensor {
  const f32 = Buffer.alloc(4);
  f32.writeFloatLE(value);
  if (dtype === "F32") return { dtype, shape, bytes: f32 };
  if (dtype === "BF16") return { dtype, shape, bytes: f32.subarray(2) };
  const word = f32.readUInt32LE();
  const exponent = ((word >>> 23) & 255) - 112;
  if (exponent <= 0 || exponent >= 31) throw new RangeError(`${value} is not normal in f16`);
  const bits = ((word >>> 16) & 0x8000) | (exponent << 10) | ((word >>> 13) & 1023);
  return { dtype, shape, bytes: Uint8Array.of(bits & 255, bits >> 8) };
}

/** Adds tensors to one safetensors file of a checkpoint, after those that it has. */
export function addTensors(directory: string, tensors: Record<string, RawTensor>, file = "model.safetensors"): void {
  const path = join(directory, file);
  const old = readFileSync(path);
  const dataStart = 8 + Number(old.readBigUInt64LE(0));
  const header = JSON.parse(old.toString("utf8", 8, dataStart)) as Record<string, unknown>;
  const data = [old.subarray(dataStart)];
  let at = old.length - dataStart;
  for (const [name, { dtype, shape, bytes }] of Object.entries(tensors)) {
    header[name] = { dtype, shape, data_offsets: [at, at + bytes.length] };
    data.push(Buffer.from(bytes));
    at += bytes.length;
  }
  const text = JSON.stringify(header);
  const json = Buffer.from(text.padEnd(Math.ceil(text.length / 8) * 8, " "));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(json.length));
  writeFileSync(path, Buffer.concat([length, json, ...data]));
}

/** Names of the scales of a layer: the two of each spelling, and the older joint one. */
export const SPELLINGS: readonly (readonly [k: string, v: string])[] = [
  ["k_scale", "v_scale"], ["attn.k_scale", "attn.v_scale"], ["k_proj.k_scale", "v_proj.v_scale"], ["k_proj.output_scale", "v_proj.output_scale"],
];
export const scaleName = (layer: number, name: string): string => `model.layers.${layer}.self_attn.${name}`;
