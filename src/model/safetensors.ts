import { join } from "node:path";
import { describe, isFile, isObject, OpenFile, parseJsonObject, readJsonFile } from "./files.ts";
import { duplicateKey } from "./json-keys.ts";
import { ModelError } from "./types.ts";

/** One tensor as its file's header has it. */
export interface StoredTensor {
  name: string;
  /** Index into the list of files. */
  file: number;
  path: string;
  /** The format's own name: F32, BF16, Q4_1, … */
  type: string;
  /** Outermost dimension first. */
  shape: number[];
  /** Absolute, in the file. */
  offset: number;
  bytes: number;
}

export interface StoredTensors {
  files: { path: string; bytes: number }[];
  tensors: Map<string, StoredTensor>;
}

/** Headers above this are refused; a header of 1,000 tensors has about 120 kB. */
const MAX_HEADER_BYTES = 16 << 20;
const MAX_INDEX_BYTES = 16 << 20;

/** Bits per element of every dtype the format defines. */
const DTYPE_BITS: Record<string, number> = {
  BOOL: 8, U8: 8, I8: 8, I16: 16, U16: 16, I32: 32, U32: 32, I64: 64, U64: 64,
  F16: 16, BF16: 16, F32: 32, F64: 64, C64: 64,
  F8_E4M3: 8, F8_E5M2: 8, F8_E8M0: 8, F4: 4, F6_E2M3: 6, F6_E3M2: 6,
};

/**
 * Header of one safetensors file, checked: every tensor's bytes match shape and dtype, and the tensors cover the data without gap or overlap.
 * Reads the header only.
 * @throws ModelError naming file and tensor.
 */
export function readSafetensors(path: string, fileIndex = 0): { bytes: number; tensors: StoredTensor[] } {
  const file = OpenFile.open(path);
  try {
    const { header, dataStart } = readHeader(file);
    const tensors: StoredTensor[] = [];
    for (const [name, entry] of Object.entries(header)) {
      if (name === "__metadata__") checkMetadata(path, entry);
      else tensors.push(readEntry(path, fileIndex, name, entry, dataStart, file.size));
    }
    checkCoverage(path, tensors, dataStart, file.size);
    return { bytes: file.size, tensors };
  } finally {
    file.close();
  }
}

function readHeader(file: OpenFile): { header: Record<string, unknown>; dataStart: number } {
  const field = "header length";
  if (file.size < 8) throw new ModelError(file.path, field, `the file has ${file.size} bytes, expected at least 8`);
  const length = file.read(0, 8, field).readBigUInt64LE(0);
  if (length < 2n) throw new ModelError(file.path, field, `${length}, expected at least 2`);
  if (length > BigInt(file.size - 8)) throw new ModelError(file.path, field, `${length}, but only ${file.size - 8} bytes follow`);
  if (length > BigInt(MAX_HEADER_BYTES)) throw new ModelError(file.path, field, `${length}, expected at most ${MAX_HEADER_BYTES}`);
  const { text, value } = parseJsonObject(file.read(8, Number(length), "header"), file.path, "header");
  const duplicate = duplicateKey(text);
  if (duplicate !== null) throw new ModelError(file.path, duplicate, "occurs twice in the header");
  return { header: value, dataStart: 8 + Number(length) };
}

function checkMetadata(path: string, entry: unknown): void {
  if (!isObject(entry)) throw new ModelError(path, "__metadata__", `expected an object of strings, found ${describe(entry)}`);
  for (const [key, value] of Object.entries(entry))
    if (typeof value !== "string") throw new ModelError(path, `__metadata__.${key}`, `expected a string, found ${describe(value)}`);
}

function isCount(value: unknown): value is number {
  return typeof value === "number" && Number.isSafeInteger(value) && value >= 0;
}

function readEntry(path: string, file: number, name: string, entry: unknown, dataStart: number, fileBytes: number): StoredTensor {
  const fail = (key: string, problem: string) => new ModelError(path, `tensor "${name}" ${key}`, problem);
  if (!isObject(entry)) throw new ModelError(path, `tensor "${name}"`, `expected an object, found ${describe(entry)}`);
  const { dtype, shape, data_offsets: offsets } = entry;
  const bits = typeof dtype === "string" && Object.hasOwn(DTYPE_BITS, dtype) ? DTYPE_BITS[dtype] : undefined;
  if (typeof dtype !== "string" || bits === undefined) throw fail("dtype", `unknown: ${describe(dtype)}`);
  if (!Array.isArray(shape) || shape.length > 8 || !shape.every(isCount))
    throw fail("shape", `expected up to 8 whole numbers, found ${describe(shape)}`);
  // Products beyond 2^53 are not exact, but they are then far above any file and refused by the comparison below.
  const needed = (shape.reduce((product, dim) => product * dim, 1) * bits) / 8;
  if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(isCount))
    throw fail("data_offsets", `expected two whole numbers, found ${describe(offsets)}`);
  const [begin, end] = offsets as [number, number];
  if (end < begin) throw fail("data_offsets", `${describe(offsets)} run backwards`);
  if (end > fileBytes - dataStart) throw fail("data_offsets", `${describe(offsets)} reach beyond the ${fileBytes - dataStart} data bytes of the file`);
  if (end - begin !== needed) throw fail("data_offsets", `${end - begin} bytes, but ${dtype} of shape ${describe(shape)} takes ${needed}`);
  return { name, file, path, type: dtype, shape, offset: dataStart + begin, bytes: end - begin };
}

function checkCoverage(path: string, tensors: StoredTensor[], dataStart: number, fileBytes: number): void {
  let at = dataStart;
  for (const tensor of [...tensors].sort((a, b) => a.offset - b.offset || a.bytes - b.bytes)) {
    if (tensor.offset !== at)
      throw new ModelError(path, `tensor "${tensor.name}" data_offsets`,
        `begin at ${tensor.offset - dataStart}, expected ${at - dataStart} (${tensor.offset < at ? "overlaps the tensor before it" : "a gap"})`);
    at += tensor.bytes;
  }
  if (at !== fileBytes) throw new ModelError(path, "header", `its tensors end at byte ${at}, the file at ${fileBytes}`);
}

/**
 * Every tensor of a model directory: model.safetensors, else the shards that model.safetensors.index.json lists.
 * @throws ModelError for missing shards, a tensor in two shards, or an index that disagrees with them.
 */
export function readSafetensorsDirectory(directory: string): StoredTensors {
  const single = join(directory, "model.safetensors");
  const index = join(directory, "model.safetensors.index.json");
  if (isFile(single)) {
    const { bytes, tensors } = readSafetensors(single);
    return { files: [{ path: single, bytes }], tensors: new Map(tensors.map((tensor) => [tensor.name, tensor])) };
  }
  if (!isFile(index)) throw new ModelError(directory, "", "holds neither model.safetensors nor model.safetensors.index.json");
  const weightMap = readJsonFile(index, MAX_INDEX_BYTES).weight_map;
  if (!isObject(weightMap)) throw new ModelError(index, "weight_map", `expected an object, found ${describe(weightMap)}`);
  const shards = new Set<string>();
  for (const [name, shard] of Object.entries(weightMap)) {
    // A shard is a sibling: a path in the index would let a model read files elsewhere.
    if (typeof shard !== "string" || !/^[^/\\\0]+\.safetensors$/.test(shard))
      throw new ModelError(index, `weight_map["${name}"]`, `expected the name of a .safetensors file beside the index, found ${describe(shard)}`);
    shards.add(shard);
  }
  const out: StoredTensors = { files: [], tensors: new Map() };
  for (const shard of [...shards].sort()) {
    const path = join(directory, shard);
    if (!isFile(path)) throw new ModelError(index, "weight_map", `names ${shard}, which is not in the directory`);
    const { bytes, tensors } = readSafetensors(path, out.files.length);
    out.files.push({ path, bytes });
    for (const tensor of tensors) {
      const other = out.tensors.get(tensor.name);
      if (other) throw new ModelError(path, `tensor "${tensor.name}"`, `is also in ${other.path}`);
      out.tensors.set(tensor.name, tensor);
    }
  }
  for (const [name, shard] of Object.entries(weightMap)) {
    const tensor = out.tensors.get(name);
    if (!tensor) throw new ModelError(index, `weight_map["${name}"]`, `${String(shard)} does not hold this tensor`);
    if (tensor.path !== join(directory, String(shard)))
      throw new ModelError(index, `weight_map["${name}"]`, `says ${String(shard)}, but the tensor is in ${tensor.path}`);
  }
  return out;
}
