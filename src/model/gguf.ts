import { OpenFile, type JsonObject } from "./files.ts";
import { GgufReader } from "./gguf-reader.ts";
import type { StoredTensor } from "./safetensors.ts";
import { ModelError } from "./types.ts";

/** A parsed GGUF header: metadata by key, tensors by name with absolute offsets. */
export interface GgufFile {
  path: string;
  bytes: number;
  metadata: JsonObject;
  /** The value type of each key's array elements, or of the value itself. */
  types: Map<string, ValueTypeName>;
  tensors: Map<string, StoredTensor>;
  /** SHA-256 of the header, hex. */
  headerHash: string;
}

const VALUE_TYPES = ["UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "FLOAT32", "BOOL", "STRING", "ARRAY", "UINT64", "INT64", "FLOAT64"] as const;
export type ValueTypeName = (typeof VALUE_TYPES)[number];
/** Least bytes an element takes in the file. */
const MIN_BYTES: Record<ValueTypeName, number> = {
  UINT8: 1, INT8: 1, UINT16: 2, INT16: 2, UINT32: 4, INT32: 4, FLOAT32: 4, BOOL: 1, STRING: 8, ARRAY: 12, UINT64: 8, INT64: 8, FLOAT64: 8,
};

/** Block size and bytes of the tensor types that can be served. */
const TENSOR_TYPES: Record<number, { name: string; elements: number; bytes: number }> = {
  0: { name: "F32", elements: 1, bytes: 4 },
  1: { name: "F16", elements: 1, bytes: 2 },
  2: { name: "Q4_0", elements: 32, bytes: 18 },
  3: { name: "Q4_1", elements: 32, bytes: 20 },
  8: { name: "Q8_0", elements: 32, bytes: 34 },
  30: { name: "BF16", elements: 1, bytes: 2 },
};
/** Names of the others, so that a refusal says which it is. */
const OTHER_TYPES: Record<number, string> = {
  6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
  18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
  29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
};

const MAX_KEYS = 1 << 16;
const MAX_TENSORS = 1 << 16;
const MAX_KEY_BYTES = 65535;
const MAX_STRING_BYTES = 16 << 20;
/** Longest array that is kept: vocabularies and merge lists are below 600,000. */
const MAX_ARRAY = 1 << 21;
/** All arrays together, so that many of them do not add up to much memory. */
const MAX_ELEMENTS = 1 << 22;
const MAX_NAME_BYTES = 256;
const MAX_DIMS = 4;
const MAX_ALIGNMENT = 1 << 20;

/**
 * Parses and checks the header of a GGUF file, version 2 or 3, little-endian. Reads no tensor data.
 * @throws ModelError naming file and field.
 */
export function readGguf(path: string): GgufFile {
  const file = OpenFile.open(path);
  try {
    const reader = new GgufReader(file);
    reader.field = "magic";
    if (file.size < 4 || reader.u32() !== 0x46554747) throw reader.fail('expected "GGUF"');
    readVersion(reader);
    reader.field = "tensor_count";
    const tensorCount = reader.count("says", 32, MAX_TENSORS);
    reader.field = "metadata_kv_count";
    const keyCount = reader.count("says", 13, MAX_KEYS);
    const { metadata, types } = readMetadata(reader, keyCount);
    const alignment = readAlignment(path, metadata, types);
    const tensors = readTensorInfos(reader, path, tensorCount);
    const dataStart = Math.ceil(reader.position / alignment) * alignment;
    placeTensors(path, tensors, dataStart, alignment, file.size);
    return {
      path, bytes: file.size, metadata, types, headerHash: reader.digest(),
      tensors: new Map(tensors.map((tensor) => [tensor.name, tensor])),
    };
  } finally {
    file.close();
  }
}

function readVersion(reader: GgufReader): void {
  reader.field = "version";
  const version = reader.u32();
  if (version === 2 || version === 3) return;
  throw reader.fail(version !== 0 && (version & 0xffff) === 0 ? "big-endian files are not supported" : `${version}, expected 2 or 3`);
}

function readMetadata(reader: GgufReader, count: number): { metadata: JsonObject; types: Map<string, ValueTypeName> } {
  const metadata: JsonObject = Object.create(null);
  const types = new Map<string, ValueTypeName>();
  let elements = 0;
  for (let i = 0; i < count; i++) {
    reader.field = `key ${i} of ${count}`;
    const key = reader.string(MAX_KEY_BYTES);
    reader.field = key.length > 100 ? `${key.slice(0, 97)}...` : key;
    if (types.has(key)) throw reader.fail("occurs twice");
    const type = readType(reader);
    // Descriptions may be in any encoding; what the tokenizer is built from must be exact.
    const lenient = !key.startsWith("tokenizer.");
    if (type === "ARRAY") {
      const element = readType(reader);
      if (element === "ARRAY") throw reader.fail("an array of arrays is not supported");
      const length = reader.count("an array of length", MIN_BYTES[element], MAX_ARRAY);
      elements += length;
      if (elements > MAX_ELEMENTS) throw reader.fail(`brings all arrays to ${elements} elements, expected at most ${MAX_ELEMENTS}`);
      const values: unknown[] = [];
      for (let j = 0; j < length; j++) values.push(readValue(reader, element, lenient));
      metadata[key] = values;
      types.set(key, element);
    } else {
      metadata[key] = readValue(reader, type, lenient);
      types.set(key, type);
    }
  }
  return { metadata, types };
}

function readType(reader: GgufReader): ValueTypeName {
  const id = reader.u32();
  const type = VALUE_TYPES[id];
  if (type === undefined) throw reader.fail(`value type ${id}, expected 0 to ${VALUE_TYPES.length - 1}`);
  return type;
}

function readValue(reader: GgufReader, type: Exclude<ValueTypeName, "ARRAY">, lenient: boolean): unknown {
  switch (type) {
    case "UINT8": return reader.u8();
    case "INT8": return reader.i8();
    case "UINT16": return reader.u16();
    case "INT16": return reader.i16();
    case "UINT32": return reader.u32();
    case "INT32": return reader.i32();
    case "FLOAT32": return reader.f32();
    case "FLOAT64": return reader.f64();
    case "UINT64": return reader.u64();
    case "INT64": return reader.i64();
    case "STRING": return reader.string(MAX_STRING_BYTES, lenient);
    case "BOOL": {
      const value = reader.u8();
      if (value > 1) throw reader.fail(`a BOOL of value ${value}, expected 0 or 1`);
      return value === 1;
    }
  }
}

function readAlignment(path: string, metadata: JsonObject, types: Map<string, ValueTypeName>): number {
  const key = "general.alignment";
  const type = types.get(key);
  if (type === undefined) return 32;
  const value = metadata[key];
  if (type !== "UINT32" || typeof value !== "number") throw new ModelError(path, key, `has type ${type}, expected UINT32`);
  if (value < 8 || value > MAX_ALIGNMENT || (value & (value - 1)) !== 0)
    throw new ModelError(path, key, `${value}, expected a power of two from 8 to ${MAX_ALIGNMENT}`);
  return value;
}

/** Offsets are still relative to the data section here. */
function readTensorInfos(reader: GgufReader, path: string, count: number): StoredTensor[] {
  const tensors: StoredTensor[] = [];
  const names = new Set<string>();
  for (let i = 0; i < count; i++) {
    reader.field = `tensor ${i} of ${count} name`;
    const name = reader.string(MAX_NAME_BYTES);
    reader.field = `tensor "${name}"`;
    if (names.has(name)) throw reader.fail("occurs twice");
    names.add(name);
    const dimensions = reader.u32();
    if (dimensions < 1 || dimensions > MAX_DIMS) throw reader.fail(`${dimensions} dimensions, expected 1 to ${MAX_DIMS}`);
    const shape: number[] = [];
    let elements = 1;
    for (let d = 0; d < dimensions; d++) {
      const size = reader.u64();
      if (typeof size === "bigint" || size < 1) throw reader.fail(`dimension ${d} is ${size}, expected 1 to ${Number.MAX_SAFE_INTEGER}`);
      elements *= size;
      if (!Number.isSafeInteger(elements)) throw reader.fail(`dimension ${d} is ${size}: too many elements`);
      shape.unshift(size); // the file has the innermost dimension first
    }
    const typeId = reader.u32();
    const type = TENSOR_TYPES[typeId];
    if (!type)
      throw reader.fail(`type ${OTHER_TYPES[typeId] ?? `number ${typeId}`} is not supported, expected one of ${Object.values(TENSOR_TYPES).map((t) => t.name).join(", ")}`);
    if (shape[dimensions - 1]! % type.elements !== 0) throw reader.fail(`${shape[dimensions - 1]} columns, expected a multiple of ${type.elements} for ${type.name}`);
    const offset = reader.u64();
    if (typeof offset === "bigint") throw reader.fail(`offset ${offset} lies beyond the end of the file`);
    tensors.push({ name, file: 0, path, type: type.name, shape, offset, bytes: (elements / type.elements) * type.bytes });
  }
  return tensors;
}

function placeTensors(path: string, tensors: StoredTensor[], dataStart: number, alignment: number, fileBytes: number): void {
  for (const tensor of tensors) {
    const fail = (problem: string) => new ModelError(path, `tensor "${tensor.name}"`, problem);
    if (tensor.offset % alignment !== 0) throw fail(`offset ${tensor.offset}, expected a multiple of the alignment ${alignment}`);
    tensor.offset += dataStart;
    if (tensor.offset + tensor.bytes > fileBytes)
      throw fail(`its ${tensor.bytes} bytes at byte ${tensor.offset} reach beyond the end of the file (${fileBytes} bytes)`);
  }
  const sorted = [...tensors].sort((a, b) => a.offset - b.offset);
  sorted.forEach((tensor, i) => {
    const before = sorted[i - 1];
    if (before && before.offset + before.bytes > tensor.offset) throw new ModelError(path, `tensor "${tensor.name}"`, `overlaps tensor "${before.name}"`);
  });
}
