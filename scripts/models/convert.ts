/**
 * Rewrites a GGUF of arch "llama", "qwen2" or "qwen3" in another form, without Python:
 *   bun scripts/models/convert.ts IN.gguf OUT TARGET
 * TARGET: hf-bf16 | hf-f16 | hf-f32 (OUT is a directory) · f32 | f16 | bf16 | q8_0 | q4_0 | q4_1 (OUT is a .gguf file).
 * Weights are dequantised first; norms and biases stay f32 in a GGUF. An embedding of a 4-bit GGUF is stored as q8_0.
 */
import { copyFileSync, mkdirSync, rmSync } from "node:fs";
import { basename, join } from "node:path";
import type { WeightDtype } from "../../src/config/model-spec.ts";
import { requiredTensors, type TensorSlot } from "../../src/model/architectures/decoder.ts";
import { OpenFile } from "../../src/model/files.ts";
import { type GgufFile, readGguf } from "../../src/model/gguf.ts";
import { specFromGguf } from "../../src/model/gguf-model.ts";
import { openModel } from "../../src/model/model.ts";
import type { StoredTensor } from "../../src/model/safetensors.ts";
import { dequantize, permuteHeads, quantize, storedBytes } from "./quantize.ts";
import { type GgufEntry, type GgufValueType, type TensorSource, writeGguf, writeSafetensors } from "./writers.ts";

export type HfDtype = "f32" | "f16" | "bf16";
const HF_DTYPES: readonly HfDtype[] = ["f32", "f16", "bf16"];
const GGUF_DTYPES: readonly WeightDtype[] = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"];
/** general.file_type of a GGUF, by what most weights are. */
const FILE_TYPE: Record<WeightDtype, number> = { f32: 0, f16: 1, q4_0: 2, q4_1: 3, q8_0: 7, bf16: 32 };
const CHUNK_ELEMENTS = 1 << 20;

/** A GGUF's tensors as f32, in chunks of whole rows. */
function* rows(file: OpenFile, tensor: StoredTensor): Generator<Float32Array> {
  const cols = tensor.shape.at(-1)!;
  const total = tensor.shape.reduce((product, size) => product * size, 1);
  const dtype = tensor.type.toLowerCase() as WeightDtype;
  const step = Math.max(1, Math.floor(CHUNK_ELEMENTS / cols)) * cols;
  for (let done = 0; done < total; done += step) {
    const count = Math.min(step, total - done);
    const bytes = storedBytes(dtype, count);
    yield dequantize(file.read(tensor.offset + storedBytes(dtype, done), bytes, tensor.name), dtype, count);
  }
}

function whole(file: OpenFile, tensor: StoredTensor): Float32Array {
  const parts = [...rows(file, tensor)];
  const out = new Float32Array(parts.reduce((length, part) => length + part.length, 0));
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}

/** Writes a Hugging Face directory: config, tokenizer and settings as LayerScale derives them, and model.safetensors. */
export async function ggufToHf(input: string, directory: string, dtype: HfDtype): Promise<void> {
  const model = await openModel(input);
  const gguf = readGguf(input);
  if (gguf.tensors.has("rope_freqs.weight")) throw new Error(`${input}: holds rope_freqs.weight, whose llama3 parameters a config.json would need`);
  const file = OpenFile.open(input);
  try {
    mkdirSync(directory, { recursive: true });
    const { heads, kvHeads } = model.spec;
    const interleaved = model.spec.rope.style === "interleaved";
    const tensors = requiredTensors(model.spec).map((slot): TensorSource => {
      const tensor = gguf.tensors.get(slot.gguf)!;
      const headsOf: Partial<Record<TensorSlot["role"], number>> = { q: heads, k: kvHeads, qBias: heads, kBias: kvHeads };
      const permuted = interleaved ? headsOf[slot.role] : undefined;
      return {
        name: slot.hf,
        shape: tensor.shape,
        dtype,
        *chunks() {
          if (permuted === undefined) for (const part of rows(file, tensor)) yield quantize(part, dtype);
          else yield quantize(permuteHeads(whole(file, tensor), permuted, slot.vector ? 1 : slot.cols, false), dtype);
        },
      };
    });
    writeSafetensors(join(directory, "model.safetensors"), tensors);
    const scratch = join(directory, ".assets");
    const files = model.assets.materialize(scratch);
    for (const path of [files.config, files.tokenizer, files.tokenizerConfig, files.generationConfig])
      if (path !== null) copyFileSync(path, join(directory, basename(path)));
    rmSync(scratch, { recursive: true });
  } finally {
    file.close();
  }
}

/** Writes a GGUF with the same metadata and another weight format. */
export function ggufToGguf(input: string, output: string, dtype: WeightDtype): void {
  const gguf = readGguf(input);
  const spec = specFromGguf(gguf);
  const file = OpenFile.open(input);
  try {
    const slots = new Map(requiredTensors(spec).map((slot) => [slot.gguf, slot]));
    const tensors = [...gguf.tensors.values()].map((tensor): TensorSource => {
      const target = targetDtype(dtype, slots.get(tensor.name), tensor);
      return {
        name: tensor.name,
        shape: tensor.shape,
        dtype: target,
        *chunks() {
          for (const part of rows(file, tensor)) yield quantize(part, target);
        },
      };
    });
    writeGguf(output, entriesOf(gguf, dtype), tensors);
  } finally {
    file.close();
  }
}

function targetDtype(dtype: WeightDtype, slot: TensorSlot | undefined, tensor: StoredTensor): WeightDtype {
  if (!slot || slot.vector || tensor.shape.length === 1) return "f32";
  const fourBit = dtype === "q4_0" || dtype === "q4_1";
  return fourBit && (slot.role === "embedding" || slot.role === "lmHead") ? "q8_0" : dtype;
}

function entriesOf(gguf: GgufFile, dtype: WeightDtype): GgufEntry[] {
  return Object.entries(gguf.metadata).map(([key, value]) =>
    key === "general.file_type" ? { key, type: "UINT32", value: FILE_TYPE[dtype] } : { key, type: gguf.types.get(key) as GgufValueType, value });
}

/** Runs one conversion by its target's name (see the head of this file). */
export async function convert(input: string, output: string, target: string): Promise<void> {
  const hf = HF_DTYPES.find((dtype) => target === `hf-${dtype}`);
  if (hf) return ggufToHf(input, output, hf);
  const gguf = GGUF_DTYPES.find((dtype) => target === dtype);
  if (!gguf) throw new Error(`unknown target ${target}, expected ${[...HF_DTYPES.map((dtype) => `hf-${dtype}`), ...GGUF_DTYPES].join(", ")}`);
  ggufToGguf(input, output, gguf);
}

if (import.meta.main) {
  const [input, output, target] = process.argv.slice(2);
  if (!input || !output || !target) {
    console.error("usage: bun scripts/models/convert.ts IN.gguf OUT hf-bf16|hf-f16|hf-f32|f32|f16|bf16|q8_0|q4_0|q4_1");
    process.exit(2);
  }
  await convert(input, output, target);
}
