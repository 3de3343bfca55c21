import type { ModelSpec, WeightDtype, WeightPlan, WeightTensor } from "../config/model-spec.ts";
import { logger } from "../telemetry/log.ts";
import { requiredTensors, type TensorSlot } from "./architectures/decoder.ts";
import { tensorId } from "./roles.ts";
import type { StoredTensor, StoredTensors } from "./safetensors.ts";
import { ModelError } from "./types.ts";

const log = logger("layerscale::model");

/** Elements and bytes of one block; plain formats have blocks of one element. */
export const DTYPES: Record<WeightDtype, { elements: number; bytes: number }> = {
  f32: { elements: 1, bytes: 4 },
  f16: { elements: 1, bytes: 2 },
  bf16: { elements: 1, bytes: 2 },
  q8_0: { elements: 32, bytes: 34 },
  q4_0: { elements: 32, bytes: 18 },
  q4_1: { elements: 32, bytes: 20 },
};

/** The dtype a stored type maps to, by either format's name. */
const BY_NAME: Record<string, WeightDtype> = { F32: "f32", F16: "f16", BF16: "bf16", Q8_0: "q8_0", Q4_0: "q4_0", Q4_1: "q4_1" };

/** Buffers that old checkpoints carry and that the spec already determines. */
const IGNORED = /(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|^rope_freqs\.weight$/;

/** Tensor types a weight may have, for error lines. */
function expectedTypes(format: "hf" | "gguf", vector: boolean): string {
  return format === "hf" || vector ? "F32, F16 or BF16" : Object.keys(BY_NAME).join(", ");
}

/**
 * Places every tensor of the spec. Embedding and head may have more rows than the vocabulary (padding): the first spec.vocab rows count.
 * @param skip names that are present on purpose though the spec has no place for them (a head equal to its tied embedding, scales of a KV cache).
 * @throws ModelError for a missing or unexpected tensor, and for a wrong shape, dtype or alignment, by name.
 */
export function planWeights(spec: ModelSpec, stored: StoredTensors, format: "hf" | "gguf", where: string, skip: ReadonlySet<string> = new Set()): WeightPlan {
  const slots = requiredTensors(spec);
  const tensors: WeightTensor[] = [];
  const used = new Set<string>(skip);
  for (const slot of slots) {
    const name = slot[format];
    const tensor = stored.tensors.get(name);
    if (!tensor) throw new ModelError(where, `tensor "${name}"`, `missing, expected shape ${shapeText(slot)}`);
    tensors.push(place(slot, tensor, format));
    used.add(name);
  }
  for (const tensor of stored.tensors.values())
    if (!used.has(tensor.name) && !IGNORED.test(tensor.name))
      throw new ModelError(tensor.path, `tensor "${tensor.name}"`, `unexpected: a ${spec.architecture} model of ${spec.layers} layers with this configuration has no such tensor`);
  return onlyUsedFiles(stored, tensors);
}

function shapeText(slot: TensorSlot): string {
  return slot.vector ? `[${slot.cols}]` : `[${slot.rows}, ${slot.cols}]`;
}

function place(slot: TensorSlot, tensor: StoredTensor, format: "hf" | "gguf"): WeightTensor {
  const fail = (problem: string) => new ModelError(tensor.path, `tensor "${tensor.name}"`, problem);
  const dtype = Object.hasOwn(BY_NAME, tensor.type) ? BY_NAME[tensor.type]! : null;
  if (dtype === null || (DTYPES[dtype].elements > 1 && slot.vector))
    throw fail(`dtype ${tensor.type} is not supported here, expected ${expectedTypes(format, slot.vector)}`);
  const { shape } = tensor;
  const padded = slot.role === "embedding" || slot.role === "lmHead";
  const fits = slot.vector
    ? shape.length === 1 && shape[0] === slot.cols
    : shape.length === 2 && shape[1] === slot.cols && (padded ? shape[0]! >= slot.rows : shape[0] === slot.rows);
  if (!fits) throw fail(`shape [${shape.join(", ")}], expected ${shapeText(slot)}`);
  if (padded && shape[0]! > slot.rows)
    log.warn("rows beyond the vocabulary are ignored", { tensor: tensor.name, rows: shape[0], vocab: slot.rows });
  const block = DTYPES[dtype];
  if (slot.cols % block.elements !== 0) throw fail(`${slot.cols} columns, expected a multiple of ${block.elements} for ${tensor.type}`);
  // Native code reads elements in place: a misaligned one would be a fault on some machines. Quantised blocks are byte-packed by design.
  const alignment = block.elements > 1 ? 2 : block.bytes;
  if (tensor.offset % alignment !== 0) throw fail(`begins at byte ${tensor.offset} of the file, expected a multiple of ${alignment}`);
  const bytes = slot.rows * (slot.cols / block.elements) * block.bytes;
  if (bytes > tensor.bytes) throw fail(`${tensor.bytes} bytes, expected ${bytes}`);
  return { id: tensorId(slot.role, slot.layer), name: tensor.name, file: tensor.file, offset: tensor.offset, bytes, dtype, rows: slot.rows, cols: slot.cols };
}

/** Files that hold no placed tensor are not mapped. */
function onlyUsedFiles(stored: StoredTensors, tensors: WeightTensor[]): WeightPlan {
  const kept = [...new Set(tensors.map((tensor) => tensor.file))].sort((a, b) => a - b);
  const index = new Map(kept.map((file, i) => [file, i]));
  return {
    files: kept.map((file) => stored.files[file]!),
    tensors: tensors.map((tensor) => ({ ...tensor, file: index.get(tensor.file)! })),
  };
}

/** The dtype that most bytes have. */
export function dominantDtype(plan: WeightPlan): WeightDtype {
  const bytes = new Map<WeightDtype, number>();
  for (const tensor of plan.tensors) bytes.set(tensor.dtype, (bytes.get(tensor.dtype) ?? 0) + tensor.bytes);
  return [...bytes].sort((a, b) => b[1] - a[1])[0]![0];
}
