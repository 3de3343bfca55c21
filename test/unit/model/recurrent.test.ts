import { expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { recurrentLayers } from "../../../src/model/recurrent.ts";

/** What is found in a directory with this config.json. */
function found(config: unknown): string | null {
  const directory = mkdtempSync(join(tmpdir(), "layerscale-recurrent-"));
  writeFileSync(join(directory, "config.json"), typeof config === "string" ? config : JSON.stringify(config));
  try {
    return recurrentLayers(directory);
  } finally {
    rmSync(directory, { recursive: true });
  }
}
const plain = { architectures: ["Qwen3ForCausalLM"], model_type: "qwen3", layer_types: ["full_attention", "sliding_attention"], sliding_window: null };

test.each([
  ["the architecture", { ...plain, architectures: ["Qwen3NextForCausalLM"] }, 'architectures = "Qwen3NextForCausalLM"'],
  ["the model type", { ...plain, model_type: "jamba" }, 'model_type = "jamba"'],
  ["a layer", { ...plain, layer_types: ["full_attention", "linear_attention"] }, 'layer_types has "linear_attention"'],
  ["a layer of a nested configuration", { ...plain, layer_types: undefined, text_config: { layer_types: ["mamba"] } }, 'layer_types has "mamba"'],
  ["a setting", { ...plain, linear_num_value_heads: 32 }, "linear_num_value_heads = 32"],
  ["a setting of state space layers", { ...plain, mamba_d_state: 16 }, "mamba_d_state = 16"],
])("recurrent layers are told by %s", (_, config, words) => {
  expect(found(config)).toBe(words);
});

test("attention alone, a setting that is null, and what cannot be read tell nothing", () => {
  for (const config of [plain, { ...plain, linear_num_value_heads: null }, { architectures: ["LlamaForCausalLM"] }, "{", "[]"]) expect(found(config)).toBeNull();
  expect(recurrentLayers(join(tmpdir(), "layerscale-nothing-here"))).toBeNull();
});
