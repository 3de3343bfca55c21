import { afterAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { ModelError, openModel } from "../../../src/model/model.ts";
import { addTensors, type RawTensor, scalar, scaleName, SPELLINGS } from "../../support/kv-scales.ts";
import { expectRefusal } from "../../support/model-errors.ts";
import { tinyModel, writeTinyGguf, writeTinyHf } from "../../support/models.ts";

const scratch = mkdtempSync(join(tmpdir(), "layerscale-kv-scales-"));
afterAll(() => rmSync(scratch, { recursive: true }));
const llama = tinyModel("tiny-llama"); // 3 layers
let count = 0;

function checkpoint(tensors: Record<string, RawTensor>, config: Record<string, unknown> = {}): string {
  const directory = writeTinyHf(join(scratch, `m${count++}`), llama);
  addTensors(directory, tensors);
  const file = join(directory, "config.json");
  writeFileSync(file, JSON.stringify({ ...(JSON.parse(readFileSync(file, "utf8")) as object), ...config }));
  return directory;
}
const layered = (make: (layer: number) => [string, RawTensor][]): Record<string, RawTensor> =>
  Object.fromEntries([0, 1, 2].flatMap((layer) => make(layer).map(([name, tensor]) => [scaleName(layer, name), tensor])));
/** Scales that differ from layer to layer and side to side; all are exact in f16 and bf16. */
const VALUES = [{ k: 0.5, v: 0.03125 }, { k: 0.75, v: 4 }, { k: 1.5, v: 0.25 }];
const good = (spelling: readonly [string, string] = ["k_scale", "v_scale"], dtype: "F32" | "BF16" | "F16" = "F32", shape: number[] = []): Record<string, RawTensor> =>
  layered((layer) => [[spelling[0], scalar(VALUES[layer]!.k, dtype, shape)], [spelling[1], scalar(VALUES[layer]!.v, dtype, shape)]]);
const scalesOf = async (tensors: Record<string, RawTensor>, config: Record<string, unknown> = {}) => (await openModel(checkpoint(tensors, config))).kvScales();

/** The model opens, and its scales are refused with a message of one line that names `field`. */
async function refused(tensors: Record<string, RawTensor>, field: string, words: RegExp, config: Record<string, unknown> = {}, file = "model.safetensors"): Promise<void> {
  const model = await openModel(checkpoint(tensors, config));
  let error: unknown;
  try {
    model.kvScales();
  } catch (caught) {
    error = caught;
  }
  if (!(error instanceof ModelError)) throw new Error(`expected a ModelError, got ${String(error)}`);
  expect(error.file).toEndWith(file);
  expect(error.field).toBe(field);
  expect(error.message).toMatch(words);
  expect(error.message).not.toContain("\n");
}

describe("names", () => {
  test.each(SPELLINGS.map((pair) => [pair] as const))("%p", async (spelling) => expect(await scalesOf(good(spelling))).toEqual(VALUES));
  test("the older one for both", async () =>
    expect(await scalesOf(layered((layer) => [["kv_scale", scalar(VALUES[layer]!.k)]]))).toEqual(VALUES.map(({ k }) => ({ k, v: k }))));
  test("several spellings, layer by layer and of the same value", async () => {
    const mixed = { ...good(), [scaleName(1, "k_proj.k_scale")]: scalar(VALUES[1]!.k, "BF16", [1]) };
    delete mixed[scaleName(2, "v_scale")];
    expect(await scalesOf({ ...mixed, [scaleName(2, "v_proj.output_scale")]: scalar(VALUES[2]!.v) })).toEqual(VALUES);
  });
  test("without any there are none, and a GGUF has none", async () => {
    expect(await scalesOf({})).toBeNull();
    expect((await openModel(writeTinyGguf(join(scratch, "none.gguf"), llama, "bf16"))).kvScales()).toBeNull();
  });
  test("sharded checkpoints", async () => {
    const qwen = tinyModel("tiny-qwen3-bf16");
    const directory = writeTinyHf(join(scratch, "sharded"), qwen);
    const shard = "model-00002-of-00003.safetensors";
    addTensors(directory, good(), shard);
    const index = join(directory, "model.safetensors.index.json");
    const content = JSON.parse(readFileSync(index, "utf8")) as { weight_map: Record<string, string> };
    for (const name of Object.keys(good())) content.weight_map[name] = shard;
    writeFileSync(index, JSON.stringify(content));
    expect((await openModel(directory)).kvScales()).toEqual(VALUES);
  });
  test("what only looks like one is an unexpected tensor still", async () => {
    for (const name of [scaleName(3, "k_scale"), scaleName(0, "q_scale"), scaleName(0, "v_proj.k_scale"), scaleName(0, "k_proj.kv_scale"), "model.layers.00.self_attn.k_scale", "layers.0.self_attn.k_scale", scaleName(0, "constructor")])
      await expectRefusal(checkpoint({ ...good(), [name]: scalar(1) }), "model.safetensors", `tensor "${name}"`, /unexpected/);
  });
  test("they are no weights: plan and dominant dtype are those of the checkpoint without them", async () => {
    const [with_, without] = [await openModel(checkpoint(good())), await openModel(checkpoint({}))];
    expect(with_.weights.tensors.map(({ id, offset }) => [id, offset - with_.weights.tensors[0]!.offset])).toEqual(without.weights.tensors.map(({ id, offset }) => [id, offset - without.weights.tensors[0]!.offset]));
    expect(with_.dtype).toBe(without.dtype);
  });
});

describe("values", () => {
  test.each([["F32", []], ["F32", [1]], ["BF16", []], ["BF16", [1]], ["F16", []], ["F16", [1]]] as const)("%s of shape %p", async (dtype, shape) =>
    expect(await scalesOf(good(undefined, dtype, [...shape]))).toEqual(VALUES));
  test("small numbers of f16, and f32 to the last bit", async () => {
    const tiny: RawTensor = { dtype: "F16", shape: [], bytes: Uint8Array.of(0x01, 0) };
    const scales = await scalesOf({ ...good(), [scaleName(0, "k_scale")]: tiny, [scaleName(0, "v_scale")]: scalar(0.1) });
    expect(scales![0]).toEqual({ k: 2 ** -24, v: Math.fround(0.1) });
  });
  const f16 = (bits: number): RawTensor => ({ dtype: "F16", shape: [1], bytes: Uint8Array.of(bits & 255, bits >> 8) });
  test.each([
    ["0", scalar(0)], ["-0", scalar(-0)], ["-0.5", scalar(-0.5)], ["NaN", scalar(NaN)], ["Infinity", scalar(Infinity)], ["-Infinity", scalar(-Infinity, "BF16")],
    ["NaN", scalar(NaN, "BF16")], ["0", f16(0)], ["-0", f16(0x8000)], ["Infinity", f16(0x7c00)], ["NaN", f16(0x7e00)], ["-1.5", f16(0xbe00)],
  ])("%s is refused (%#)", async (text, tensor) => {
    for (const name of ["k_scale", "v_scale"]) await refused({ ...good(), [scaleName(1, name)]: tensor }, `tensor "${scaleName(1, name)}"`, new RegExp(`: is ${text}, expected a finite number above 0$`));
  });
  test.each([[[1, 1]], [[2]], [[0]], [[2, 1, 1]]])("shape %p is refused", async (shape) => {
    const elements = shape.reduce((product, size) => product * size, 1);
    await refused({ ...good(), [scaleName(2, "v_scale")]: { dtype: "F32", shape, bytes: new Uint8Array(4 * elements).fill(63) } }, `tensor "${scaleName(2, "v_scale")}"`, new RegExp(`shape \\[${shape.join(", ")}\\], expected .*\\[\\] or \\[1\\]`));
  });
  test.each([["F64", 8], ["F8_E4M3", 1], ["I32", 4], ["F8_E8M0", 1]])("dtype %s is refused", async (dtype, bytes) =>
    refused({ ...good(), [scaleName(0, "k_scale")]: { dtype, shape: [], bytes: new Uint8Array(bytes).fill(63) } }, `tensor "${scaleName(0, "k_scale")}"`, new RegExp(`dtype ${dtype} .*expected F32, F16 or BF16`)));
});

describe("incomplete and contradicting", () => {
  test("K without V, V without K", async () => {
    const { [scaleName(1, "v_scale")]: _v, ...noV } = good();
    await refused(noV, `tensor "${scaleName(1, "k_scale")}"`, /is 0\.75, but layer 1 has no scale for V: expected both/);
    const { [scaleName(2, "k_scale")]: _k, ...noK } = good();
    await refused(noK, `tensor "${scaleName(2, "v_scale")}"`, /is 0\.25, but layer 2 has no scale for K: expected both/);
  });
  test("some layers", async () => {
    const { [scaleName(1, "v_scale")]: _v, [scaleName(1, "k_scale")]: _k, ...some } = good();
    await refused(some, `tensor "${scaleName(0, "k_scale")}"`, /layer 0 has a scale, but layer 1 has none: expected scales for all 3 layers, or for none/);
  });
  test("two spellings that disagree", async () => {
    await refused({ ...good(), [scaleName(0, "attn.v_scale")]: scalar(0.5) }, `tensor "${scaleName(0, "attn.v_scale")}"`, /is 0\.5, but "model\.layers\.0\.self_attn\.v_scale" is 0\.03125: expected one scale for V of layer 0/);
    await refused({ ...good(), [scaleName(1, "kv_scale")]: scalar(0.75) }, `tensor "${scaleName(1, "kv_scale")}"`, /expected one scale for V of layer 1/);
  });
});

describe("quantization_config", () => {
  const scheme = { num_bits: 8, type: "float", strategy: "tensor", dynamic: false, symmetric: true };
  const compressed = { quant_method: "compressed-tensors", format: "dense", kv_cache_scheme: scheme, config_groups: {}, ignore: ["lm_head"], sparsity_config: {}, transform_config: null };
  test.each([
    ["compressed-tensors without groups", compressed],
    ["groups of nothing", { ...compressed, config_groups: { group_0: { targets: [], weights: null, input_activations: null, output_activations: null } } }],
    ["ModelOpt", { quant_method: "modelopt", quant_algo: null, kv_cache_quant_algo: "FP8", kv_cache_scheme: { type: "float", num_bits: 8 } }],
  ])("a cache alone is served: %s", async (_, quantization_config) => expect(await scalesOf(good(), { quantization_config })).toEqual(VALUES));
  test.each([
    ["weights", { ...compressed, config_groups: { group_0: { targets: ["Linear"], weights: { num_bits: 8 } } } }],
    ["activations", { ...compressed, config_groups: { group_0: { targets: ["Linear"], input_activations: { num_bits: 8 } } } }],
    ["groups that are none", { ...compressed, config_groups: [1] }],
    ["sparsity", { ...compressed, sparsity_config: { format: "sparse-24-bitmask" } }],
    ["rotations", { ...compressed, transform_config: { config_groups: { R1: {} } } }],
    ["no cache scheme", { ...compressed, kv_cache_scheme: null }],
    ["another method", { ...compressed, quant_method: "fp8" }],
    ["an algorithm", { quant_method: "modelopt", quant_algo: "FP8", kv_cache_quant_algo: "FP8" }],
  ])("%s are refused as before", async (_, quantization_config) => expectRefusal(checkpoint(good(), { quantization_config }), "config.json", "quantization_config", /quantised checkpoints/));
  test.each([
    ["type", "int"], ["num_bits", 4], ["strategy", "attn_head"], ["symmetric", false], ["dynamic", true],
  ])("a scheme with %s %p is not that of an fp8 cache", async (field, value) => {
    const quantization_config = { ...compressed, kv_cache_scheme: { ...scheme, [field]: value } };
    await refused(good(), `quantization_config.kv_cache_scheme.${field}`, /not supported for an fp8 cache, expected/, { quantization_config }, "config.json");
    // Nobody asked for a cache of that kind, and there is nothing that could be misread.
    expect(await scalesOf({}, { quantization_config })).toBeNull();
  });
  test("an algorithm of ModelOpt that is not fp8", async () =>
    refused(good(), "quantization_config.kv_cache_quant_algo", /"NVFP4".*expected "FP8"/, { quantization_config: { quant_method: "modelopt", kv_cache_quant_algo: "NVFP4" } }, "config.json"));
});
