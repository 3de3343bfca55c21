import type { KvScale } from "../config/model-spec.ts";
import type { Fields } from "./fields.ts";
import { describe, isObject, OpenFile } from "./files.ts";
import type { StoredTensor, StoredTensors } from "./safetensors.ts";
import { ModelError } from "./types.ts";

type Side = keyof KvScale;

/**
 * Names of a layer's scales behind `model.layers.N.self_attn.`, and whose they are. The sources: compressed-tensors since 0.9 and AutoFP8
 * (k_scale), vLLM's own state (attn.k_scale), ModelOpt (k_proj.k_scale), Quark and older compressed-tensors (k_proj.output_scale), older AutoFP8
 * (kv_scale, one for both). They all mean: element = stored element * scale.
 */
const SIDES: Record<string, readonly Side[]> = {
  k_scale: ["k"], "attn.k_scale": ["k"], "k_proj.k_scale": ["k"], "k_proj.output_scale": ["k"],
  v_scale: ["v"], "attn.v_scale": ["v"], "v_proj.v_scale": ["v"], "v_proj.output_scale": ["v"],
  kv_scale: ["k", "v"],
};
const NAME = /^model\.layers\.(0|[1-9]\d*)\.self_attn\.(.+)$/;

interface Found {
  tensor: StoredTensor;
  layer: number;
  sides: readonly Side[];
}

/** The tensors of a checkpoint that are scales of its KV cache, in layers that the model has. By name alone: nothing is read. */
export function findKvScales(stored: StoredTensors, layers: number): Found[] {
  const found: Found[] = [];
  for (const tensor of stored.tensors.values()) {
    const [, layer, name] = NAME.exec(tensor.name) ?? [];
    if (name === undefined || !Object.hasOwn(SIDES, name) || Number(layer) >= layers) continue;
    found.push({ tensor, layer: Number(layer), sides: SIDES[name]! });
  }
  return found;
}

/**
 * Scales of every layer for an fp8 cache; null = the checkpoint has none, so that they are all 1.
 * @param config of the checkpoint, whose quantization_config may say what its scales are for
 * @throws ModelError naming the tensor: no scalar (shape [] or [1]) of F32, F16 or BF16, not finite and above 0, one of K and V without the other, not all
 * layers, two names with different values; or the field of config.json that says that the scales are not those of an fp8 cache
 */
export function readKvScales(found: readonly Found[], layers: number, config: Fields): KvScale[] | null {
  if (found.length === 0) return null;
  refuseOtherCache(config);
  const read: Record<Side, { value: number; tensor: StoredTensor } | undefined>[] = Array.from({ length: layers }, () => ({ k: undefined, v: undefined }));
  for (const { tensor, layer, sides } of found) {
    const value = readScalar(tensor);
    for (const side of sides) {
      const other = read[layer]![side];
      if (other !== undefined && other.value !== value) throw fail(tensor, `is ${value}, but "${other.tensor.name}" is ${other.value}: expected one scale for ${side.toUpperCase()} of layer ${layer}`);
      read[layer]![side] ??= { value, tensor };
    }
  }
  return read.map(({ k, v }, layer) => {
    if (k !== undefined && v !== undefined) return { k: k.value, v: v.value };
    const there = k ?? v;
    if (there !== undefined) throw fail(there.tensor, `is ${there.value}, but layer ${layer} has no scale for ${k === undefined ? "K" : "V"}: expected both`);
    const [first] = found;
    throw fail(first!.tensor, `layer ${first!.layer} has a scale, but layer ${layer} has none: expected scales for all ${layers} layers, or for none`);
  });
}

const fail = (tensor: StoredTensor, problem: string): ModelError => new ModelError(tensor.path, `tensor "${tensor.name}"`, problem);

function readScalar(tensor: StoredTensor): number {
  const { type, shape } = tensor;
  const decode = Object.hasOwn(DECODE, type) ? DECODE[type] : undefined;
  if (decode === undefined) throw fail(tensor, `dtype ${type} is not supported for a scale, expected F32, F16 or BF16`);
  if (shape.length > 1 || (shape.length === 1 && shape[0] !== 1)) throw fail(tensor, `shape [${shape.join(", ")}], expected one scale for the whole layer: [] or [1]`);
  const file = OpenFile.open(tensor.path);
  let value: number;
  try {
    const bytes = file.read(tensor.offset, tensor.bytes, `tensor "${tensor.name}"`);
    value = decode(new DataView(bytes.buffer, bytes.byteOffset, bytes.length));
  } finally {
    file.close();
  }
  if (!Number.isFinite(value) || value <= 0) throw fail(tensor, `is ${Object.is(value, -0) ? "-0" : value}, expected a finite number above 0`);
  return value;
}

const DECODE: Record<string, (view: DataView) => number> = {
  F32: (view) => view.getFloat32(0, true),
  F16: (view) => view.getFloat16(0, true),
  BF16(view) {
    const wide = new DataView(new ArrayBuffer(4));
    wide.setUint32(0, view.getUint16(0, true) << 16);
    return wide.getFloat32(0);
  },
};

/** Scales measured for 8-bit integers, or for more values than one a layer, mean something else. Silence is fp8. */
function refuseOtherCache(config: Fields): void {
  for (const key of ["quantization_config", "compression_config"]) {
    const quantization = config.object(key);
    if (quantization === null) continue;
    const algorithm = quantization.string("kv_cache_quant_algo");
    if (algorithm !== null && algorithm !== "FP8") throw quantization.fail("kv_cache_quant_algo", `${describe(algorithm)} is not supported for an fp8 cache, expected "FP8"`);
    const scheme = quantization.raw("kv_cache_scheme");
    if (!isObject(scheme)) continue;
    for (const [field, expected] of Object.entries({ type: "float", num_bits: 8, strategy: "tensor", symmetric: true, dynamic: false })) {
      const value = scheme[field] ?? expected;
      if (value !== expected) throw quantization.fail(`kv_cache_scheme.${field}`, `${describe(value)} is not supported for an fp8 cache, expected ${describe(expected)}`);
    }
  }
}
