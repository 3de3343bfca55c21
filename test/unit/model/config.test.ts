import { afterAll, beforeEach, describe, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { inverseFrequencies } from "../../../src/model/rope.ts";
import { openModel } from "../../../src/model/model.ts";
import { setLogSink } from "../../../src/telemetry/log.ts";
import { type TinyModel, tinyModel, tinyWeights, writeTinyHf } from "../../support/models.ts";
import { expectRefusal } from "../../support/model-errors.ts";
import { quantize } from "../../../scripts/models/quantize.ts";
import { writeSafetensors } from "../../../scripts/models/writers.ts";
import { readSafetensors } from "../../../src/model/safetensors.ts";

const scratch = mkdtempSync(join(tmpdir(), "layerscale-config-"));
afterAll(() => {
  rmSync(scratch, { recursive: true });
  setLogSink((line) => void process.stderr.write(line + "\n"));
});
let warnings: string[] = [];
beforeEach(() => {
  warnings = [];
  setLogSink((line) => void warnings.push(line));
});

let count = 0;
/** A tiny model on disk whose config.json then gets other values; undefined removes a key. */
function directory(model: TinyModel, edits: Record<string, unknown> = {}): string {
  const path = writeTinyHf(join(scratch, `model${count++}`), model);
  const file = join(path, "config.json");
  const config = { ...(JSON.parse(readFileSync(file, "utf8")) as Record<string, unknown>), ...edits };
  writeFileSync(file, JSON.stringify(config));
  return path;
}
const open = (model: TinyModel, edits: Record<string, unknown> = {}) => openModel(directory(model, edits));
const refuse = (model: TinyModel, edits: Record<string, unknown>, field: string | RegExp, words?: RegExp) =>
  expectRefusal(directory(model, edits), "config.json", field, words);

const llama = tinyModel("tiny-llama"); // untied
const linear = tinyModel("tiny-llama-linear"); // tied
const qwen2 = tinyModel("tiny-qwen2");
const qwen3 = tinyModel("tiny-qwen3");

describe("architecture", () => {
  test("the three supported ones", async () => {
    expect((await open(llama)).spec).toMatchObject({ architecture: "llama", qkvBias: false, oBias: false, qkNorm: false });
    expect((await open(qwen2)).spec).toMatchObject({ architecture: "qwen2", qkvBias: true, oBias: false, qkNorm: false, kvHeads: 1 });
    expect((await open(qwen3)).spec).toMatchObject({ architecture: "qwen3", qkvBias: false, qkNorm: true, headDim: 32 });
  });
  test("others are refused by name", async () => {
    await refuse(llama, { architectures: ["MistralForCausalLM"] }, "architectures", /MistralForCausalLM.*LlamaForCausalLM/);
    await refuse(llama, { architectures: ["Qwen3NextForCausalLM"] }, "architectures", /recurrent or hybrid/);
    await refuse(llama, { architectures: ["Mamba2ForCausalLM"], model_type: "mamba2" }, "architectures", /recurrent or hybrid/);
    await refuse(llama, { architectures: [], model_type: "rwkv" }, "model_type", /rwkv.*recurrent or hybrid/);
    await refuse(llama, { model_type: "qwen2" }, "model_type", /disagrees/);
    await refuse(llama, { architectures: undefined, model_type: undefined }, "architectures", /missing/);
    await refuse(llama, { architectures: "LlamaForCausalLM" }, "architectures", /list of strings/);
  });
  test("what the forward pass does not do is refused by name", async () => {
    await refuse(llama, { mlp_bias: true }, "mlp_bias");
    await refuse(llama, { hidden_act: "gelu" }, "hidden_act", /gelu/);
    await refuse(llama, { quantization_config: { quant_method: "gptq" } }, "quantization_config", /gptq/);
  });
  test("attention_bias needs the bias tensors", async () => {
    await expectRefusal(directory(llama, { attention_bias: true }), "", 'tensor "model.layers.0.self_attn.q_proj.bias"', /missing/);
  });
  test("bias tensors that the config denies are refused, not dropped", async () => {
    await expectRefusal(directory(tinyModel("tiny-llama-llama3"), { attention_bias: false }), "model.safetensors", /bias"$/, /unexpected/);
  });
});

describe("shapes", () => {
  test("out of range, of the wrong type or missing", async () => {
    await refuse(llama, { hidden_size: undefined }, "hidden_size", /nothing/);
    await refuse(llama, { hidden_size: "64" }, "hidden_size", /"64"/);
    await refuse(llama, { hidden_size: 64.5 }, "hidden_size");
    await refuse(llama, { hidden_size: -64 }, "hidden_size");
    await refuse(llama, { num_hidden_layers: 100000 }, "num_hidden_layers", /1024/);
    await refuse(llama, { num_hidden_layers: 0 }, "num_hidden_layers");
    await refuse(llama, { vocab_size: 1e300 }, "vocab_size");
    await refuse(llama, { num_key_value_heads: 3 }, "num_key_value_heads", /divide/);
    await refuse(llama, { rms_norm_eps: "small" }, "rms_norm_eps");
    await refuse(llama, { max_position_embeddings: 0 }, "max_position_embeddings");
    await refuse(llama, { tie_word_embeddings: "yes" }, "tie_word_embeddings");
  });
  test("head_dim: null or absent means hidden / heads", async () => {
    expect((await open(llama, { head_dim: null })).spec.headDim).toBe(16);
    expect((await open(llama, { head_dim: undefined })).spec.headDim).toBe(16);
    expect((await open(qwen2, { head_dim: null })).spec.headDim).toBe(16);
  });
  test("head_dim: absent means 128 for Qwen3, as its class has it", async () => {
    await expectRefusal(directory(qwen3, { head_dim: undefined }), "model.safetensors", /q_proj/, /expected \[512, 64\]/);
  });
  test("head_dim: odd, too large, or indivisible hidden", async () => {
    await refuse(qwen3, { head_dim: 31 }, "head_dim", /even/);
    await refuse(qwen3, { head_dim: 1024 }, "head_dim");
    await refuse(llama, { head_dim: null, hidden_size: 66 }, "head_dim", /multiple/);
  });
  test("num_key_value_heads: absent means all heads for Llama", async () => {
    const all: TinyModel = { ...llama, config: { ...llama.config, num_key_value_heads: 4 } };
    expect((await open(all, { num_key_value_heads: undefined })).spec.kvHeads).toBe(4);
    expect((await open(all, { num_key_value_heads: null })).spec.kvHeads).toBe(4);
    await expectRefusal(directory(llama, { num_key_value_heads: undefined }), "model.safetensors", /k_proj/, /expected \[64, 64\]/);
  });
  test("num_key_value_heads: absent means 32 for Qwen, as its class has it", async () => {
    await refuse(qwen2, { num_key_value_heads: undefined }, "num_key_value_heads", /32 does not divide/);
  });
  test("values of the class stand in for absent ones", async () => {
    const { spec } = await open(llama, { rms_norm_eps: undefined, max_position_embeddings: undefined });
    expect(spec.rmsEps).toBe(1e-6);
    expect(spec.maxContext).toBe(2048);
    expect((await open(qwen2, { max_position_embeddings: undefined })).spec.maxContext).toBe(32768);
  });
  test("embedding rows beyond vocab_size are padding, fewer are refused", async () => {
    const model = await open(llama, { vocab_size: 380 });
    expect(model.spec.vocab).toBe(380);
    const head = model.weights.tensors.find((tensor) => tensor.name === "lm_head.weight")!;
    expect([head.rows, head.bytes]).toEqual([380, 380 * 64 * 4]);
    expect(warnings.join()).toContain("rows beyond the vocabulary");
    await expectRefusal(directory(llama, { vocab_size: 385 }), "model.safetensors", /embed_tokens/, /\[384, 64\].*expected \[385, 64\]/);
  });
});

describe("tied embeddings (H4)", () => {
  const tensorNames = async (path: string) => (await openModel(path)).weights.tensors.map((tensor) => tensor.name);
  /** Adds lm_head.weight to a tied model's only shard; its values are those of the seed. */
  function withHead(model: TinyModel, seed: number, edits: Record<string, unknown>): string {
    const path = directory({ ...model, shards: 1 }, edits);
    const file = join(path, "model.safetensors");
    const bytes = readFileSync(file);
    const tensors = readSafetensors(file).tensors.map((tensor) => ({
      name: tensor.name, shape: tensor.shape, dtype: model.dtype,
      chunks: () => [bytes.subarray(tensor.offset, tensor.offset + tensor.bytes)],
    }));
    const embedding = { role: "embedding", layer: 0, hf: "model.embed_tokens.weight", gguf: "", rows: 384, cols: 64, vector: false } as const;
    const head = quantize(tinyWeights(embedding, seed), model.dtype);
    writeSafetensors(file, [...tensors, { name: "lm_head.weight", shape: [384, 64], dtype: model.dtype, chunks: () => [head] }]);
    return path;
  }

  test("true, head absent: tied", async () => {
    const model = await open(linear);
    expect(model.spec.tiedEmbeddings).toBe(true);
  });
  test("true, head present and equal: tied, head not placed", async () => {
    const path = withHead(linear, linear.seed, {});
    expect((await openModel(path)).spec.tiedEmbeddings).toBe(true);
    expect(await tensorNames(path)).not.toContain("lm_head.weight");
    expect(warnings).toEqual([]);
  });
  test("true, head present and different: the head counts, with a warning", async () => {
    const path = withHead(linear, 99, {});
    expect((await openModel(path)).spec.tiedEmbeddings).toBe(false);
    expect(await tensorNames(path)).toContain("lm_head.weight");
    expect(warnings.join()).toContain("differs from the embedding");
  });
  test("false, head present: not tied", async () => {
    expect((await open(llama)).spec.tiedEmbeddings).toBe(false);
    expect((await openModel(withHead(linear, linear.seed, { tie_word_embeddings: false }))).spec.tiedEmbeddings).toBe(false);
  });
  test("false, head absent: refused naming the tensor", async () => {
    await refuse(linear, { tie_word_embeddings: false }, "tie_word_embeddings", /lm_head\.weight/);
  });
  test("flag missing: false, as the classes have it", async () => {
    expect((await open(llama, { tie_word_embeddings: undefined })).spec.tiedEmbeddings).toBe(false);
    await refuse(linear, { tie_word_embeddings: undefined }, "tie_word_embeddings", /lm_head\.weight/);
  });
  test("flag nested in text_config", async () => {
    expect((await open(linear, { tie_word_embeddings: undefined, text_config: { tie_word_embeddings: true } })).spec.tiedEmbeddings).toBe(true);
  });
});

describe("rotary embedding (H5)", () => {
  const freqs = async (edits: Record<string, unknown>) => (await open(llama, edits)).spec.rope.invFreq;
  const plain = inverseFrequencies(16, 10000, { type: "default" });

  test("rope_theta missing means 10000; null scaling means none", async () => {
    expect(await freqs({ rope_theta: undefined })).toEqual(plain);
    expect(await freqs({ rope_theta: 10000, rope_scaling: null })).toEqual(plain);
    expect(await freqs({ rope_parameters: {} })).toEqual(plain);
  });
  test("old and new spelling agree", async () => {
    const expected = inverseFrequencies(16, 500000, { type: "linear", factor: 4 });
    expect(await freqs({ rope_theta: 500000, rope_scaling: { type: "linear", factor: 4 } })).toEqual(expected);
    expect(await freqs({ rope_theta: 500000, rope_scaling: { rope_type: "linear", factor: 4.0 } })).toEqual(expected);
    expect(await freqs({ rope_parameters: { rope_type: "linear", factor: 4, rope_theta: 500000 } })).toEqual(expected);
    expect(await freqs({ rope_parameters: { full_attention: { rope_type: "linear", factor: 4, rope_theta: 500000 } } })).toEqual(expected);
    expect(expected[1]).toBe(Math.fround(inverseFrequencies(16, 500000, { type: "default" })[1]! / 4));
  });
  test("llama3: original length from the dict, the top level, or the context", async () => {
    const llama3 = (originalMaxPositions: number) => inverseFrequencies(16, 10000, { type: "llama3", factor: 8, lowFreqFactor: 1, highFreqFactor: 4, originalMaxPositions });
    const scaling = { rope_type: "llama3", factor: 8, low_freq_factor: 1, high_freq_factor: 4 };
    expect(await freqs({ rope_scaling: { ...scaling, original_max_position_embeddings: 64 } })).toEqual(llama3(64));
    expect(await freqs({ rope_scaling: { ...scaling, original_max_position_embeddings: 64 }, original_max_position_embeddings: 128 })).toEqual(llama3(128));
    expect(await freqs({ rope_scaling: scaling })).toEqual(llama3(512));
    expect(llama3(64)).not.toEqual(llama3(128));
  });
  test("unsupported types are refused by name", async () => {
    for (const type of ["yarn", "dynamic", "longrope", "su", "mrope", "proportional", "ntk"])
      await refuse(llama, { rope_scaling: { type, factor: 4 } }, "rope_scaling.type", new RegExp(`"${type}".*expected default, linear or llama3`));
    await refuse(llama, { rope_parameters: { rope_type: "yarn", factor: 4 } }, "rope_parameters.rope_type", /yarn/);
    await refuse(llama, { rope_scaling: { type: "default", mrope_section: [1, 2] } }, "rope_scaling.mrope_section");
    await refuse(llama, { rope_parameters: { full_attention: {}, sliding_attention: {} } }, "rope_parameters.sliding_attention");
  });
  test("partial rotation is refused, a factor of 1 is not", async () => {
    await refuse(llama, { partial_rotary_factor: 0.5 }, "partial_rotary_factor", /0\.5/);
    await refuse(llama, { rope_parameters: { rope_type: "default", partial_rotary_factor: 0.25 } }, "rope_parameters.partial_rotary_factor");
    expect(await freqs({ partial_rotary_factor: 1.0 })).toEqual(plain);
  });
  test("missing or broken factors", async () => {
    await refuse(llama, { rope_scaling: { type: "linear" } }, "rope_scaling.factor", /nothing/);
    await refuse(llama, { rope_scaling: { type: "linear", factor: 0 } }, "rope_scaling.factor");
    await refuse(llama, { rope_scaling: { type: "linear", factor: "4" } }, "rope_scaling.factor");
    await refuse(llama, { rope_scaling: { rope_type: "llama3", factor: 8, low_freq_factor: 4, high_freq_factor: 4 } }, "rope_scaling.high_freq_factor");
    await refuse(llama, { rope_scaling: "linear" }, "rope_scaling", /object/);
    await refuse(llama, { rope_theta: 0 }, "rope_theta");
  });
});

describe("sliding window (H6)", () => {
  test("Qwen2: use_sliding_window false leaves sliding_window without effect", async () => {
    expect((await open(qwen2, { use_sliding_window: false, sliding_window: 4096 })).spec.architecture).toBe("qwen2");
    expect((await open(qwen2, { use_sliding_window: undefined, sliding_window: 4096 })).spec.architecture).toBe("qwen2");
    expect((await open(qwen2, { sliding_window: null })).spec.architecture).toBe("qwen2");
  });
  test("Qwen2 and Qwen3: use_sliding_window true is refused", async () => {
    await refuse(qwen2, { use_sliding_window: true }, "use_sliding_window");
    await refuse(qwen3, { use_sliding_window: true, sliding_window: 1024 }, "use_sliding_window");
    await refuse(qwen2, { use_sliding_window: "false" }, "use_sliding_window", /true or false/);
  });
  test("layer_types: one per layer, all full_attention", async () => {
    expect((await open(qwen2, { layer_types: ["full_attention", "full_attention"] })).spec.layers).toBe(2);
    await refuse(qwen2, { layer_types: ["full_attention"] }, "layer_types", /1 entries, expected num_hidden_layers 2/);
    await refuse(qwen2, { layer_types: ["full_attention", "sliding_attention"] }, "layer_types[1]", /sliding_attention/);
    await refuse(qwen2, { layer_types: ["linear_attention", "full_attention"] }, "layer_types[0]", /linear_attention/);
  });
});
