import type { Fields } from "./fields.ts";
import { describe, isObject } from "./files.ts";

/** Parts of a compressed-tensors group that quantise something other than the KV cache. */
const GROUP_PARTS = ["weights", "input_activations", "output_activations"];

/**
 * Refuses a checkpoint whose weights or activations are quantised; one that has only scales for its KV cache passes (its weights are plain,
 * which the tensors' dtypes have to bear out).
 * @throws ModelError naming key and method
 */
export function refuseQuantisedWeights(config: Fields): void {
  for (const key of ["quantization_config", "compression_config"]) {
    const quantization = config.object(key);
    if (quantization && !cacheOnly(quantization))
      throw config.fail(key, `quantised checkpoints (${describe(quantization.raw("quant_method") ?? "method not named")}) are not supported, expected bf16, f16 or f32 weights (a quantised KV cache alone is fine)`);
  }
}

/**
 * Whether a quantization_config of compressed-tensors or ModelOpt says a scheme for the KV cache and nothing else.
 * https://github.com/vllm-project/compressed-tensors/pull/135 (no groups, or groups without targets)
 */
function cacheOnly(quantization: Fields): boolean {
  const method = quantization.raw("quant_method");
  if (method !== "compressed-tensors" && method !== "modelopt") return false;
  if (!isObject(quantization.raw("kv_cache_scheme")) && typeof quantization.raw("kv_cache_quant_algo") !== "string") return false;
  // Sparse or rotated weights need work in the forward pass.
  if (["quant_algo", "sparsity_config", "transform_config"].some((key) => !empty(quantization.raw(key)))) return false;
  const groups = quantization.raw("config_groups");
  return empty(groups) || (isObject(groups) && Object.values(groups).every((group) => isObject(group) && GROUP_PARTS.every((part) => empty(group[part]))));
}

const empty = (value: unknown): boolean => value === undefined || value === null || (typeof value === "object" && Object.keys(value).length === 0);
