/**
 * Makers of tiny random models: the same seed gives the same bytes everywhere, so golden data made from them stays valid.
 * Hugging Face directories (single file or sharded) and GGUF files of the three architectures, with a small byte-level BPE tokenizer.
 */
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import type { ModelSpec, WeightDtype } from "../../src/config/model-spec.ts";
import { requiredTensors, type TensorSlot } from "../../src/model/architectures/decoder.ts";
import { specFromConfig } from "../../src/model/config.ts";
import { dequantize, permuteHeads, quantize } from "../../scripts/models/quantize.ts";
import { type GgufEntry, type TensorSource, writeGguf, writeSafetensors } from "../../scripts/models/writers.ts";
import { TINY_CHAT_TEMPLATE, TINY_TOKENS, TINY_VOCAB, tinyMerges, tinyTokenizerConfig, tinyTokenizerJson } from "./tiny-tokenizer.ts";

export interface TinyModel {
  name: string;
  seed: number;
  /** Overrides and additions to baseConfig; null values are written as null. */
  config: Record<string, unknown>;
  dtype: "f32" | "bf16" | "f16";
  /** Number of safetensors files. */
  shards: number;
}

const LLAMA = { architectures: ["LlamaForCausalLM"], model_type: "llama", attention_bias: false, mlp_bias: false };
const QWEN2 = { architectures: ["Qwen2ForCausalLM"], model_type: "qwen2", use_sliding_window: false, sliding_window: 4096, max_window_layers: 1 };
const QWEN3 = { architectures: ["Qwen3ForCausalLM"], model_type: "qwen3", attention_bias: false, use_sliding_window: false, sliding_window: null };

/** Every shape and rope variant that golden data covers. */
export const TINY_MODELS: readonly TinyModel[] = [
  { name: "tiny-llama", seed: 1, dtype: "f32", shards: 1, config: { ...LLAMA, num_hidden_layers: 3, tie_word_embeddings: false } },
  { name: "tiny-llama-linear", seed: 2, dtype: "bf16", shards: 2, config: { ...LLAMA, tie_word_embeddings: true, rope_theta: 10000.0, rope_scaling: { type: "linear", factor: 4.0 } } },
  {
    name: "tiny-llama-llama3", seed: 3, dtype: "f32", shards: 1,
    config: {
      ...LLAMA, tie_word_embeddings: false, attention_bias: true, head_dim: 32,
      rope_parameters: { rope_type: "llama3", rope_theta: 500000.0, factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 64 },
    },
  },
  { name: "tiny-qwen2", seed: 4, dtype: "f32", shards: 2, config: { ...QWEN2, tie_word_embeddings: true, num_key_value_heads: 1, rope_theta: 1000000.0 } },
  { name: "tiny-qwen2-bf16", seed: 5, dtype: "bf16", shards: 1, config: { ...QWEN2, tie_word_embeddings: false, rope_theta: 1000000.0 } },
  { name: "tiny-qwen3", seed: 6, dtype: "f32", shards: 1, config: { ...QWEN3, tie_word_embeddings: false, head_dim: 32, rope_theta: 1000000.0 } },
  { name: "tiny-qwen3-bf16", seed: 7, dtype: "bf16", shards: 3, config: { ...QWEN3, tie_word_embeddings: true, head_dim: 32, num_hidden_layers: 3, rope_parameters: { rope_type: "default", rope_theta: 1000000.0 } } },
];

export function tinyModel(name: string): TinyModel {
  const found = TINY_MODELS.find((model) => model.name === name);
  if (!found) throw new Error(`no tiny model ${name}`);
  return found;
}

/** config.json of a tiny model. */
export function tinyConfig(model: TinyModel): Record<string, unknown> {
  return {
    hidden_size: 64,
    intermediate_size: 128,
    num_hidden_layers: 2,
    num_attention_heads: 4,
    num_key_value_heads: 2,
    vocab_size: TINY_VOCAB,
    max_position_embeddings: 512,
    rms_norm_eps: 1e-6,
    hidden_act: "silu",
    bos_token_id: TINY_TOKENS.bos,
    eos_token_id: TINY_TOKENS.imEnd,
    torch_dtype: { f32: "float32", bf16: "bfloat16", f16: "float16" }[model.dtype],
    ...model.config,
  };
}

export function tinySpec(model: TinyModel): ModelSpec {
  return specFromConfig("config.json", tinyConfig(model));
}

/** A seeded stream of well-mixed 32-bit words: word i depends on (seed, i) alone. */
export function randomWord(seed: number, index: number): number {
  let x = (Math.imul(index, 0x9e3779b9) ^ seed) >>> 0;
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (x ^ (x >>> 16)) >>> 0;
}

/** FNV-1a of a tensor's name: each tensor has a stream of its own. */
function nameSeed(name: string, seed: number): number {
  let hash = 0x811c9dc5 ^ seed;
  for (let i = 0; i < name.length; i++) hash = Math.imul(hash ^ name.charCodeAt(i), 0x01000193);
  return randomWord(hash >>> 0, seed);
}

/** Values of one tensor: uniform around 0 (norms: around 1), scaled so that activations keep their size from layer to layer. */
export function tinyWeights(slot: TensorSlot, seed: number): Float32Array {
  const stream = nameSeed(slot.hf, seed);
  const out = new Float32Array(slot.rows * slot.cols);
  const norm = slot.vector && slot.hf.endsWith("norm.weight");
  const table = slot.role === "embedding" || slot.role === "lmHead";
  const amplitude = norm ? 0.2 : slot.vector ? 0.3 : table ? 0.45 : 1.7 / Math.sqrt(slot.cols);
  for (let i = 0; i < out.length; i++) out[i] = (norm ? 1 : 0) + ((randomWord(stream, i) >>> 8) / (1 << 24) - 0.5) * 2 * amplitude;
  return out;
}

function roundTo(values: Float32Array, dtype: TinyModel["dtype"]): Float32Array {
  return dequantize(quantize(values, dtype), dtype, values.length);
}

function once(bytes: () => Uint8Array): () => Iterable<Uint8Array> {
  return function* () {
    yield bytes();
  };
}

function hfTensors(model: TinyModel, spec: ModelSpec): TensorSource[] {
  return requiredTensors(spec).map((slot) => ({
    name: slot.hf,
    shape: slot.vector ? [slot.cols] : [slot.rows, slot.cols],
    dtype: model.dtype,
    chunks: once(() => quantize(tinyWeights(slot, model.seed), model.dtype)),
  }));
}

/** Writes the whole directory and returns it. */
export function writeTinyHf(directory: string, model: TinyModel): string {
  mkdirSync(directory, { recursive: true });
  const json = (name: string, value: unknown) => writeFileSync(join(directory, name), JSON.stringify(value, null, 1));
  const tensors = hfTensors(model, tinySpec(model));
  if (model.shards === 1) {
    writeSafetensors(join(directory, "model.safetensors"), tensors);
  } else {
    const weightMap: Record<string, string> = {};
    for (let shard = 0; shard < model.shards; shard++) {
      const pad = (n: number) => String(n).padStart(5, "0");
      const file = `model-${pad(shard + 1)}-of-${pad(model.shards)}.safetensors`;
      const part = tensors.filter((_, i) => i % model.shards === shard);
      writeSafetensors(join(directory, file), part);
      for (const tensor of part) weightMap[tensor.name] = file;
    }
    json("model.safetensors.index.json", { metadata: {}, weight_map: weightMap });
  }
  json("config.json", tinyConfig(model));
  json("generation_config.json", { bos_token_id: TINY_TOKENS.bos, eos_token_id: [TINY_TOKENS.imEnd, TINY_TOKENS.endOfText] });
  json("tokenizer.json", tinyTokenizerJson());
  json("tokenizer_config.json", tinyTokenizerConfig());
  return directory;
}

/**
 * The same for tests behind the frontend: random weights answer with random bytes, and the frontend's decoder panics at some that are no
 * UTF-8; here every token is plain text.
 * @param context tokens, instead of the model's
 */
export function writePlainTinyHf(directory: string, model: TinyModel, context?: number): string {
  writeTinyHf(directory, model);
  const edit = <T>(name: string, change: (content: T) => void) => {
    const path = join(directory, name);
    const content = JSON.parse(readFileSync(path, "utf8")) as T;
    change(content);
    writeFileSync(path, JSON.stringify(content));
  };
  edit<{ model: { vocab: Record<string, number> } }>("tokenizer.json", ({ model: bpe }) => {
    bpe.vocab = Object.fromEntries(Object.entries(bpe.vocab).map(([token, id]) => [id >= 128 && id < 256 ? `[byte${id}]` : token, id]));
  });
  if (context !== undefined) edit<{ max_position_embeddings: number }>("config.json", (config) => void (config.max_position_embeddings = context));
  return directory;
}

/** Metadata of a GGUF of the same model. */
export function tinyGgufEntries(model: TinyModel): GgufEntry[] {
  const spec = tinySpec(model);
  const arch = spec.architecture;
  const config = tinyConfig(model);
  const parameters = (config.rope_parameters ?? {}) as Record<string, unknown>;
  const scaling = config.rope_scaling as Record<string, unknown> | undefined;
  const entries: GgufEntry[] = [
    { key: "general.architecture", type: "STRING", value: arch },
    { key: "general.name", type: "STRING", value: model.name },
    { key: "general.alignment", type: "UINT32", value: 32 },
    { key: `${arch}.block_count`, type: "UINT32", value: spec.layers },
    { key: `${arch}.context_length`, type: "UINT32", value: spec.maxContext },
    { key: `${arch}.embedding_length`, type: "UINT32", value: spec.hidden },
    { key: `${arch}.feed_forward_length`, type: "UINT32", value: spec.intermediate },
    { key: `${arch}.attention.head_count`, type: "UINT32", value: spec.heads },
    { key: `${arch}.attention.head_count_kv`, type: "UINT32", value: spec.kvHeads },
    { key: `${arch}.attention.key_length`, type: "UINT32", value: spec.headDim },
    { key: `${arch}.attention.value_length`, type: "UINT32", value: spec.headDim },
    { key: `${arch}.attention.layer_norm_rms_epsilon`, type: "FLOAT32", value: spec.rmsEps },
    { key: `${arch}.rope.freq_base`, type: "FLOAT32", value: parameters.rope_theta ?? config.rope_theta ?? 10000 },
  ];
  if (scaling) entries.push({ key: `${arch}.rope.scaling.type`, type: "STRING", value: "linear" }, { key: `${arch}.rope.scaling.factor`, type: "FLOAT32", value: scaling.factor });
  const vocab = Object.entries((tinyTokenizerJson().model as { vocab: Record<string, number> }).vocab).sort((a, b) => a[1] - b[1]);
  const specials = new Set<number>(Object.values(TINY_TOKENS));
  entries.push(
    { key: "tokenizer.ggml.model", type: "STRING", value: "gpt2" },
    { key: "tokenizer.ggml.pre", type: "STRING", value: "smollm" },
    { key: "tokenizer.ggml.tokens", type: "STRING", value: vocab.map(([text]) => text) },
    { key: "tokenizer.ggml.token_type", type: "INT32", value: vocab.map(([, id]) => (specials.has(id) ? 3 : 1)) },
    { key: "tokenizer.ggml.merges", type: "STRING", value: tinyMerges() },
    { key: "tokenizer.ggml.bos_token_id", type: "UINT32", value: TINY_TOKENS.bos },
    { key: "tokenizer.ggml.eos_token_id", type: "UINT32", value: TINY_TOKENS.imEnd },
    { key: "tokenizer.ggml.add_bos_token", type: "BOOL", value: false },
    { key: "tokenizer.chat_template", type: "STRING", value: TINY_CHAT_TEMPLATE },
  );
  return entries;
}

/** Tensors of a GGUF of the same model: rows of q and k interleaved for arch "llama", vectors as f32. */
export function tinyGgufTensors(model: TinyModel, dtype: WeightDtype): TensorSource[] {
  const spec = tinySpec(model);
  const interleave = spec.architecture === "llama";
  const heads: Partial<Record<TensorSlot["role"], number>> = { q: spec.heads, k: spec.kvHeads, qBias: spec.heads, kBias: spec.kvHeads };
  const tensors = requiredTensors(spec).map((slot): TensorSource => {
    const target = slot.vector ? "f32" : dtype;
    return {
      name: slot.gguf,
      shape: slot.vector ? [slot.cols] : [slot.rows, slot.cols],
      dtype: target,
      chunks: once(() => {
        // The same values as in the directory, whatever either stores them as.
        const values = roundTo(tinyWeights(slot, model.seed), model.dtype);
        const count = heads[slot.role];
        return quantize(interleave && count !== undefined ? permuteHeads(values, count, slot.vector ? 1 : slot.cols, true) : values, target);
      }),
    };
  });
  const factors = llama3Factors(model, spec);
  if (factors) tensors.push({ name: "rope_freqs.weight", shape: [factors.length], dtype: "f32", chunks: once(() => quantize(factors, "f32")) });
  return tensors;
}

/** What a converter stores for llama3 scaling: the divisor of each unscaled frequency. */
function llama3Factors(model: TinyModel, spec: ModelSpec): Float32Array | null {
  const parameters = tinyConfig(model).rope_parameters as { rope_type?: string; rope_theta: number } | undefined;
  if (parameters?.rope_type !== "llama3") return null;
  return Float32Array.from(spec.rope.invFreq, (freq, i) => Math.pow(parameters.rope_theta, (-2 * i) / spec.headDim) / freq);
}

export function writeTinyGguf(path: string, model: TinyModel, dtype: WeightDtype, version = 3): string {
  mkdirSync(path.slice(0, -basename(path).length), { recursive: true });
  writeGguf(path, tinyGgufEntries(model), tinyGgufTensors(model, dtype), version);
  return path;
}
