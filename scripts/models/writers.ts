/** Writers of safetensors and GGUF files, streaming one chunk of tensor data at a time. */
import { closeSync, openSync, renameSync, writeSync } from "node:fs";
import type { WeightDtype } from "../../src/config/model-spec.ts";
import { storedBytes } from "./quantize.ts";

/** A tensor to be written: shape outermost first, data produced in order when its turn comes. */
export interface TensorSource {
  name: string;
  shape: number[];
  dtype: WeightDtype;
  /** Chunks of stored bytes, together storedBytes(dtype, product of shape). */
  chunks: () => Iterable<Uint8Array>;
}

export function elementCount(shape: readonly number[]): number {
  return shape.reduce((product, size) => product * size, 1);
}

/** Writes through a temporary name, so a file that exists is complete. */
function writeFile(path: string, write: (append: (bytes: Uint8Array) => void) => void): void {
  const temporary = `${path}.${process.pid}.part`;
  const fd = openSync(temporary, "w");
  try {
    write((bytes) => {
      for (let done = 0; done < bytes.length; ) done += writeSync(fd, bytes, done);
    });
  } finally {
    closeSync(fd);
  }
  renameSync(temporary, path);
}

function appendTensor(tensor: TensorSource, append: (bytes: Uint8Array) => void): number {
  let written = 0;
  for (const chunk of tensor.chunks()) {
    append(chunk);
    written += chunk.length;
  }
  const expected = storedBytes(tensor.dtype, elementCount(tensor.shape));
  if (written !== expected) throw new Error(`${tensor.name}: ${written} bytes, expected ${expected}`);
  return written;
}

const SAFETENSORS_DTYPE: Partial<Record<WeightDtype, string>> = { f32: "F32", f16: "F16", bf16: "BF16" };

export function writeSafetensors(path: string, tensors: readonly TensorSource[]): void {
  let offset = 0;
  const header: Record<string, unknown> = { __metadata__: { format: "pt" } };
  for (const tensor of tensors) {
    const bytes = storedBytes(tensor.dtype, elementCount(tensor.shape));
    const dtype = SAFETENSORS_DTYPE[tensor.dtype];
    if (!dtype) throw new Error(`${tensor.name}: ${tensor.dtype} has no place in safetensors`);
    header[tensor.name] = { dtype, shape: tensor.shape, data_offsets: [offset, offset + bytes] };
    offset += bytes;
  }
  const json = JSON.stringify(header);
  const padded = Buffer.from(json.padEnd(Math.ceil(json.length / 8) * 8, " "));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(padded.length));
  writeFile(path, (append) => {
    append(length);
    append(padded);
    for (const tensor of tensors) appendTensor(tensor, append);
  });
}

export type GgufValueType = "UINT8" | "INT8" | "UINT16" | "INT16" | "UINT32" | "INT32" | "FLOAT32" | "BOOL" | "STRING" | "UINT64" | "INT64" | "FLOAT64";
/** One metadata entry; an array value is written as an array of `type`. */
export interface GgufEntry {
  key: string;
  type: GgufValueType;
  value: unknown;
}

const VALUE_TYPE_ID: Record<GgufValueType | "ARRAY", number> = {
  UINT8: 0, INT8: 1, UINT16: 2, INT16: 3, UINT32: 4, INT32: 5, FLOAT32: 6, BOOL: 7, STRING: 8, ARRAY: 9, UINT64: 10, INT64: 11, FLOAT64: 12,
};
const TENSOR_TYPE_ID: Record<WeightDtype, number> = { f32: 0, f16: 1, q4_0: 2, q4_1: 3, q8_0: 8, bf16: 30 };
const ALIGNMENT = 32;

function u32(value: number): Buffer {
  const out = Buffer.alloc(4);
  out.writeUInt32LE(value);
  return out;
}
function u64(value: number | bigint): Buffer {
  const out = Buffer.alloc(8);
  out.writeBigUInt64LE(BigInt(value));
  return out;
}
export function ggufString(text: string): Buffer {
  const bytes = Buffer.from(text, "utf8");
  return Buffer.concat([u64(bytes.length), bytes]);
}

function ggufScalar(type: GgufValueType, value: unknown): Buffer {
  if (type === "STRING") return ggufString(String(value));
  const out = Buffer.alloc(8);
  const number = Number(value);
  switch (type) {
    case "UINT8": return out.subarray(0, out.writeUInt8(number));
    case "INT8": return out.subarray(0, out.writeInt8(number));
    case "BOOL": return out.subarray(0, out.writeUInt8(value ? 1 : 0));
    case "UINT16": return out.subarray(0, out.writeUInt16LE(number));
    case "INT16": return out.subarray(0, out.writeInt16LE(number));
    case "UINT32": return out.subarray(0, out.writeUInt32LE(number));
    case "INT32": return out.subarray(0, out.writeInt32LE(number));
    case "FLOAT32": return out.subarray(0, out.writeFloatLE(number));
    case "FLOAT64": return out.subarray(0, out.writeDoubleLE(number));
    case "UINT64": return out.subarray(0, out.writeBigUInt64LE(BigInt(value as number)));
    case "INT64": return out.subarray(0, out.writeBigInt64LE(BigInt(value as number)));
  }
}

/** Key, type and value of one entry. */
export function ggufEntry(entry: GgufEntry): Buffer {
  const { key, type, value } = entry;
  if (!Array.isArray(value)) return Buffer.concat([ggufString(key), u32(VALUE_TYPE_ID[type]), ggufScalar(type, value)]);
  const head = [ggufString(key), u32(VALUE_TYPE_ID.ARRAY), u32(VALUE_TYPE_ID[type]), u64(value.length)];
  return Buffer.concat([...head, ...value.map((item) => ggufScalar(type, item))]);
}

/** Everything before the tensor data, padded to the alignment. */
export function ggufHeader(entries: readonly GgufEntry[], tensors: readonly TensorSource[], version = 3): Buffer {
  const infos: Buffer[] = [];
  let offset = 0;
  for (const tensor of tensors) {
    const bytes = storedBytes(tensor.dtype, elementCount(tensor.shape));
    infos.push(ggufString(tensor.name), u32(tensor.shape.length), ...[...tensor.shape].reverse().map(u64), u32(TENSOR_TYPE_ID[tensor.dtype]), u64(offset));
    offset += Math.ceil(bytes / ALIGNMENT) * ALIGNMENT;
  }
  const header = Buffer.concat([Buffer.from("GGUF"), u32(version), u64(tensors.length), u64(entries.length), ...entries.map(ggufEntry), ...infos]);
  return Buffer.concat([header, padding(header.length)]);
}

function padding(length: number): Buffer {
  return Buffer.alloc((ALIGNMENT - (length % ALIGNMENT)) % ALIGNMENT);
}

export function writeGguf(path: string, entries: readonly GgufEntry[], tensors: readonly TensorSource[], version = 3): void {
  writeFile(path, (append) => {
    append(ggufHeader(entries, tensors, version));
    for (const tensor of tensors) append(padding(appendTensor(tensor, append)));
  });
}
