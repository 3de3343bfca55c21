import type { ModelSpec } from "../config/model-spec.ts";
import { logger } from "../telemetry/log.ts";
import { EMBEDDING, LM_HEAD } from "./architectures/decoder.ts";
import { OpenFile } from "./files.ts";
import type { StoredTensor, StoredTensors } from "./safetensors.ts";
import { ModelError } from "./types.ts";

const log = logger("layerscale::model");
const CHUNK_BYTES = 1 << 20;

/**
 * Decides from flag and tensors whether the head is the embedding matrix (spec.tiedEmbeddings holds the flag):
 * flag set and no head: tied · flag set and a head of equal values: tied · flag set and other values: the head is used, with a warning, as the
 * reference does · flag unset and a head: not tied · flag unset and no head: refused, the head would be random.
 * @returns the decision and the names of tensors that are present but not needed.
 */
export function tieEmbeddings(spec: ModelSpec, stored: StoredTensors, configFile: string): { tied: boolean; skip: Set<string> } {
  const head = stored.tensors.get(LM_HEAD.hf);
  if (!head) {
    if (spec.tiedEmbeddings) return { tied: true, skip: new Set() };
    throw new ModelError(configFile, "tie_word_embeddings", `is false or missing, but tensor "${LM_HEAD.hf}" is missing: expected the tensor, or true`);
  }
  if (!spec.tiedEmbeddings) return { tied: false, skip: new Set() };
  const embedding = stored.tensors.get(EMBEDDING.hf);
  if (embedding && sameValues(embedding, head)) return { tied: true, skip: new Set([LM_HEAD.hf]) };
  log.warn("tie_word_embeddings is true, but lm_head.weight differs from the embedding: lm_head.weight is used", { file: configFile });
  return { tied: false, skip: new Set() };
}

/** Byte equality; tensors of different dtype or shape count as different. */
function sameValues(a: StoredTensor, b: StoredTensor): boolean {
  if (a.type !== b.type || a.bytes !== b.bytes || a.shape.join() !== b.shape.join()) return false;
  const fileA = OpenFile.open(a.path);
  const fileB = OpenFile.open(b.path);
  try {
    for (let at = 0; at < a.bytes; at += CHUNK_BYTES) {
      const length = Math.min(CHUNK_BYTES, a.bytes - at);
      if (!fileA.read(a.offset + at, length, a.name).equals(fileB.read(b.offset + at, length, b.name))) return false;
    }
    return true;
  } finally {
    fileA.close();
    fileB.close();
  }
}
