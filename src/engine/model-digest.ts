import { closeSync, openSync, readSync } from "node:fs";
import type { ModelSpec, WeightPlan } from "../config/model-spec.ts";

/** Of each tensor, from its middle: embeddings of rare tokens and norms begin alike in many checkpoints. */
const SAMPLE_BYTES = 1024;

/**
 * What makes KV of two engines interchangeable, beside the layout of its pages: the model's configuration, and a sample of every tensor,
 * since a fine-tuned checkpoint has the configuration of its base. 32 bytes.
 * @throws Error of the file system
 */
export function modelDigest(spec: ModelSpec, weights: WeightPlan): Uint8Array {
  const hash = new Bun.CryptoHasher("sha256");
  hash.update(JSON.stringify(sorted(spec)));
  const files = weights.files.map((file) => openSync(file.path, "r"));
  try {
    const sample = Buffer.alloc(SAMPLE_BYTES);
    for (const tensor of weights.tensors.toSorted((a, b) => a.id - b.id)) {
      const { id, dtype, rows, cols, offset, bytes } = tensor;
      hash.update(`\n${id} ${dtype} ${rows} ${cols} `);
      const length = Math.min(SAMPLE_BYTES, bytes);
      const read = readSync(files[tensor.file]!, sample, 0, length, offset + Math.floor((bytes - length) / 2));
      hash.update(sample.subarray(0, read));
    }
  } finally {
    for (const file of files) closeSync(file);
  }
  return new Uint8Array(hash.digest());
}

/** The same text for the same content, whatever order the keys came in. */
function sorted(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(sorted);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).toSorted(([a], [b]) => (a < b ? -1 : 1)).map(([key, item]) => [key, sorted(item)]));
}
