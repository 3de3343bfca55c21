import { basename } from "node:path";
import type { ModelSpec } from "../config/model-spec.ts";
import { EMBEDDING, LM_HEAD } from "./architectures/decoder.ts";
import { ARCHITECTURES, unsupportedArchitecture } from "./architectures/index.ts";
import { LIMITS } from "./config.ts";
import { Fields } from "./fields.ts";
import { OpenFile } from "./files.ts";
import { type GgufFile, readGguf } from "./gguf.ts";
import { ggufAssets } from "./gguf-assets.ts";
import { MAX_HEAD_DIM, MAX_LAYERS } from "./roles.ts";
import { ropeFromGguf } from "./rope.ts";
import type { StoredTensor } from "./safetensors.ts";
import { type LoadedModel, ModelError } from "./types.ts";
import { dominantDtype, planWeights } from "./weights.ts";

const ROPE_FACTORS = "rope_freqs.weight";

/**
 * A GGUF file: spec and weights from its header, tokenizer and settings from its metadata. Reads no weights but rope_freqs.weight.
 * @throws ModelError
 */
export function openGguf(path: string): LoadedModel {
  const gguf = readGguf(path);
  const spec = specFromGguf(gguf);
  const general = new Fields(path, gguf.metadata);
  const weights = planWeights(spec, { files: [{ path, bytes: gguf.bytes }], tensors: gguf.tensors }, "gguf", path);
  const { assets, eosTokenIds } = ggufAssets(gguf, spec);
  return {
    name: basename(path).replace(/\.gguf$/i, ""),
    path,
    format: "gguf",
    spec,
    weights,
    kvScales: () => null,
    dtype: dominantDtype(weights),
    assets,
    generation: {
      temperature: general.optionalNumber("general.sampling.temp", 0, 1e6),
      topP: general.optionalNumber("general.sampling.top_p", Number.MIN_VALUE, 1),
      eosTokenIds,
    },
  };
}

/** The spec of a GGUF's metadata; biases, head and vocabulary are read off its tensors. */
export function specFromGguf(gguf: GgufFile): ModelSpec {
  const general = new Fields(gguf.path, gguf.metadata);
  const name = general.string("general.architecture");
  if (name === null) throw general.fail("general.architecture", "missing");
  const architecture = ARCHITECTURES.find((candidate) => candidate.ggufName === name);
  if (!architecture) throw general.fail("general.architecture", unsupportedArchitecture(name, ARCHITECTURES.map((candidate) => candidate.ggufName)));
  if (general.int("split.count", 0, 65535, 1) > 1) throw general.fail("split.count", "models split over several files are not supported, expected one file");

  const meta = new Fields(gguf.path, gguf.metadata, `${name}.`);
  refuseUnsupported(meta);
  const hidden = meta.int("embedding_length", 1, LIMITS.hidden);
  const layers = meta.int("block_count", 1, MAX_LAYERS);
  const heads = perLayer(meta, "attention.head_count", layers, LIMITS.heads);
  const kvHeads = perLayer(meta, "attention.head_count_kv", layers, LIMITS.heads, heads);
  if (heads % kvHeads !== 0) throw meta.fail("attention.head_count_kv", `${kvHeads} does not divide attention.head_count ${heads}`);
  const headDim = readHeadDim(meta, hidden, heads);
  const scale = meta.optionalNumber("attention.scale", 0, 1e6);
  if (scale !== null && scale !== 0 && Math.abs(scale * Math.sqrt(headDim) - 1) > 1e-5)
    throw meta.fail("attention.scale", `${scale} is not supported, expected 1/sqrt(${headDim})`);
  const tensor = (suffix: string) => gguf.tensors.get(suffix);
  return {
    architecture: architecture.name,
    hidden,
    layers,
    heads,
    kvHeads,
    headDim,
    intermediate: perLayer(meta, "feed_forward_length", layers, LIMITS.intermediate),
    vocab: readVocab(gguf, general),
    rmsEps: meta.number("attention.layer_norm_rms_epsilon", 0, 1),
    maxContext: meta.int("context_length", 1, LIMITS.positions),
    rope: ropeFromGguf(meta, headDim, architecture.ggufRope, ropeFactors(gguf, headDim)),
    qkvBias: architecture.qkvBias === "attention_bias" ? tensor("blk.0.attn_q.bias") !== undefined : architecture.qkvBias,
    oBias: architecture.oBias === "attention_bias" ? tensor("blk.0.attn_output.bias") !== undefined : architecture.oBias,
    qkNorm: architecture.qkNorm,
    tiedEmbeddings: tensor(LM_HEAD.gguf) === undefined,
  };
}

/** Keys that would change the arithmetic of these architectures. */
function refuseUnsupported(meta: Fields): void {
  for (const key of ["expert_count", "attention.sliding_window", "nextn_predict_layers", "leading_dense_block_count"]) {
    const value = meta.optionalInt(key, 0, LIMITS.positions);
    if (value) throw meta.fail(key, `${value} is not supported, expected 0`);
  }
  for (const key of ["logit_scale", "residual_scale", "embedding_scale", "attn_logit_softcapping", "final_logit_softcapping"]) {
    const value = meta.optionalNumber(key, -1e9, 1e9);
    if (value !== null && value !== 0 && value !== 1) throw meta.fail(key, `${value} is not supported`);
  }
  if (!meta.bool("attention.causal", true)) throw meta.fail("attention.causal", "false is not supported, expected true");
}

/** A number that some files give once per layer; layers that differ are not supported. */
function perLayer(meta: Fields, key: string, layers: number, max: number, fallback?: number): number {
  const value = meta.raw(key);
  if (!Array.isArray(value)) return meta.int(key, 1, max, fallback);
  if (value.length !== layers) throw meta.fail(key, `${value.length} values, expected block_count ${layers}`);
  const first: unknown = value[0];
  if (typeof first !== "number" || !Number.isInteger(first) || first < 1 || first > max || value.some((item) => item !== first))
    throw meta.fail(key, "layers that differ are not supported, expected one whole number from 1 to " + max);
  return first;
}

function readHeadDim(meta: Fields, hidden: number, heads: number): number {
  const key = "attention.key_length";
  if (!meta.has(key) && hidden % heads !== 0)
    throw meta.fail(key, `missing, and embedding_length ${hidden} is not a multiple of attention.head_count ${heads}`);
  const headDim = meta.int(key, 2, MAX_HEAD_DIM, hidden / heads);
  if (headDim % 2 !== 0 || headDim > MAX_HEAD_DIM) throw meta.fail(key, `${headDim}, expected an even number up to ${MAX_HEAD_DIM}`);
  const valueDim = meta.int("attention.value_length", 1, 1 << 16, headDim);
  if (valueDim !== headDim) throw meta.fail("attention.value_length", `${valueDim}, expected attention.key_length ${headDim}`);
  return headDim;
}

/** Tokens of the vocabulary; the embedding may have padding rows beyond it, never fewer rows. */
function readVocab(gguf: GgufFile, general: Fields): number {
  const key = "tokenizer.ggml.tokens";
  const tokens = general.strings(key);
  if (!tokens || tokens.length === 0) throw general.fail(key, "missing: the file carries no vocabulary");
  if (tokens.length > LIMITS.vocab) throw general.fail(key, `${tokens.length} tokens, expected at most ${LIMITS.vocab}`);
  const rows = gguf.tensors.get(EMBEDDING.gguf)?.shape[0];
  if (rows !== undefined && rows < tokens.length) throw general.fail(key, `${tokens.length} tokens, but tensor "${EMBEDDING.gguf}" has only ${rows} rows`);
  return tokens.length;
}

/** Per-frequency divisors that the converter stores for llama3 scaling: (headDim/2) f32, or null when the file has none. */
function ropeFactors(gguf: GgufFile, headDim: number): number[] | null {
  const tensor = gguf.tensors.get(ROPE_FACTORS);
  if (!tensor) return null;
  const fail = (problem: string) => new ModelError(gguf.path, `tensor "${ROPE_FACTORS}"`, problem);
  if (tensor.type !== "F32" || tensor.shape.length !== 1 || tensor.shape[0] !== headDim / 2)
    throw fail(`${tensor.type} of shape [${tensor.shape.join(", ")}], expected F32 of [${headDim / 2}]`);
  const bytes = readTensor(tensor);
  const factors: number[] = [];
  for (let i = 0; i < headDim / 2; i++) {
    const factor = bytes.readFloatLE(i * 4);
    if (!(factor > 0) || !Number.isFinite(factor)) throw fail(`value ${i} is ${factor}, expected a positive number`);
    factors.push(factor);
  }
  return factors;
}

/** The bytes of a small tensor. */
function readTensor(tensor: StoredTensor): Buffer {
  const file = OpenFile.open(tensor.path);
  try {
    return file.read(tensor.offset, tensor.bytes, `tensor "${tensor.name}"`);
  } finally {
    file.close();
  }
}
