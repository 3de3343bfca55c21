/** Checkpoints with scales for their KV cache. */
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { readSafetensors } from "../../src/model/safetensors.ts";
import { quantize } from "../../scripts/models/quantize.ts";

export interface RawTensor {
  dtype: string;
  shape: number[];
  bytes: Uint8Array;
}

/** A scalar of a type that checkpoints have. */
export const scalar = (value: number, dtype: "F32" | "BF16" | "F16" = "F32", shape: number[] = []): RawTensor =>
  ({ dtype, shape, bytes: quantize(Float32Array.of(value), dtype.toLowerCase() as "f32" | "bf16" | "f16") });

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

/** Multiplies the values of f32 tensors whose names match, in place. */
export function scaleTensors(directory: string, pattern: RegExp, factor: number): void {
  const path = join(directory, "model.safetensors");
  const file = readFileSync(path);
  for (const { name, type, offset, bytes } of readSafetensors(path).tensors) {
    if (!pattern.test(name)) continue;
    if (type !== "F32") throw new Error(`${name} is ${type}, expected F32`);
    for (let at = offset; at < offset + bytes; at += 4) file.writeFloatLE(file.readFloatLE(at) * factor, at);
  }
  writeFileSync(path, file);
}

/** Names of the scales of a layer: the two of each spelling, and the older joint one. */
export const SPELLINGS: readonly (readonly [k: string, v: string])[] = [
  ["k_scale", "v_scale"], ["attn.k_scale", "attn.v_scale"], ["k_proj.k_scale", "v_proj.v_scale"], ["k_proj.output_scale", "v_proj.output_scale"],
];
export const scaleName = (layer: number, name: string): string => `model.layers.${layer}.self_attn.${name}`;
