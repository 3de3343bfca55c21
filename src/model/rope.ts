import type { RopeSpec } from "../config/model-spec.ts";
import type { Fields } from "./fields.ts";

/** Rotary embedding as a file describes it, before it becomes frequencies. */
export type RopeScaling =
  | { type: "default" }
  | { type: "linear"; factor: number }
  | { type: "llama3"; factor: number; lowFreqFactor: number; highFreqFactor: number; originalMaxPositions: number };

const f32 = Math.fround;

/**
 * base^(-2i/headDim) with the scaling applied: headDim/2 values, radians per position.
 * Every operation is rounded to float32 in the order of the reference implementation, which computes in float32.
 */
export function inverseFrequencies(headDim: number, base: number, scaling: RopeScaling): number[] {
  const out: number[] = [];
  for (let i = 0; i < headDim; i += 2) out.push(f32(1 / f32(Math.pow(f32(base), f32(i / headDim)))));
  if (scaling.type === "linear") return out.map((freq) => f32(freq / f32(scaling.factor)));
  if (scaling.type === "llama3") return out.map((freq) => llama3(freq, scaling));
  return out;
}

/** Long wavelengths are divided by the factor, short ones kept, those between blended. */
function llama3(freq: number, s: Extract<RopeScaling, { type: "llama3" }>): number {
  const lowWavelength = f32(s.originalMaxPositions / s.lowFreqFactor);
  const highWavelength = f32(s.originalMaxPositions / s.highFreqFactor);
  const wavelength = f32(f32(2 * Math.PI) / freq);
  if (wavelength < highWavelength) return freq;
  if (wavelength > lowWavelength) return f32(freq / f32(s.factor));
  const smooth = f32(f32(f32(s.originalMaxPositions / wavelength) - f32(s.lowFreqFactor)) / f32(s.highFreqFactor - s.lowFreqFactor));
  return f32(f32(f32(f32(1 - smooth) * freq) / f32(s.factor)) + f32(smooth * freq));
}

const MAX_BASE = 1e15;
const MAX_FACTOR = 1e6;
const MAX_POSITIONS = 2 ** 30;
/** Base of the reference's configuration classes when a config names none. */
const DEFAULT_BASE = 10000;

/**
 * Rotary settings of a config.json: `rope_scaling` beside `rope_theta` (old) or `rope_parameters` (new), possibly nested by layer type.
 * @throws ModelError for a type other than default, linear and llama3, and for partial rotation.
 */
export function ropeFromConfig(config: Fields, headDim: number, maxPositions: number): RopeSpec {
  let parameters = filled(config, "rope_scaling") ?? filled(config, "rope_parameters");
  if (parameters?.has("sliding_attention")) throw parameters.fail("sliding_attention", "sliding window attention is not supported");
  parameters = parameters?.object("full_attention") ?? parameters;
  for (const fields of [config, parameters]) {
    const partial = fields?.optionalNumber("partial_rotary_factor", 0, 1e6) ?? 1;
    if (fields && partial !== 1) throw fields.fail("partial_rotary_factor", `${partial} is not supported, expected 1`);
  }
  // The type may stand in a dict that leaves rope_theta to the top level.
  const holder = parameters?.has("rope_theta") ? parameters : config;
  const base = holder.number("rope_theta", 1, MAX_BASE, DEFAULT_BASE);
  return { style: "half", invFreq: inverseFrequencies(headDim, base, scalingFromConfig(config, parameters, maxPositions)), scale: 1 };
}

/** An object with at least one key: an empty one is written for "no scaling". */
function filled(config: Fields, key: string): Fields | null {
  const fields = config.object(key);
  return fields?.isEmpty() ? null : fields;
}

function scalingFromConfig(config: Fields, parameters: Fields | null, maxPositions: number): RopeScaling {
  if (!parameters) return { type: "default" };
  const key = parameters.has("rope_type") ? "rope_type" : "type";
  const type = parameters.string(key) ?? "default";
  if (parameters.has("mrope_section")) throw parameters.fail("mrope_section", "multimodal rotary embedding is not supported");
  switch (type) {
    case "default":
      return { type };
    case "linear":
      return { type, factor: parameters.number("factor", 1, MAX_FACTOR) };
    case "llama3": {
      // The reference prefers the top-level key, then the dict's, then the context length.
      const original = config.has("original_max_position_embeddings") ? config : parameters;
      const scaling: RopeScaling = {
        type,
        factor: parameters.number("factor", 1, MAX_FACTOR),
        lowFreqFactor: parameters.number("low_freq_factor", 1e-6, MAX_FACTOR),
        highFreqFactor: parameters.number("high_freq_factor", 1e-6, MAX_FACTOR),
        originalMaxPositions: original.int("original_max_position_embeddings", 1, MAX_POSITIONS, maxPositions),
      };
      if (scaling.highFreqFactor <= scaling.lowFreqFactor)
        throw parameters.fail("high_freq_factor", `${scaling.highFreqFactor}, expected above low_freq_factor ${scaling.lowFreqFactor}`);
      return scaling;
    }
    default:
      throw parameters.fail(key, `unsupported rope type ${JSON.stringify(type.slice(0, 40))}, expected default, linear or llama3`);
  }
}

/** Rotary settings of a GGUF; factors are the values of its rope_freqs.weight tensor (headDim/2), or null. */
export function ropeFromGguf(meta: Fields, headDim: number, style: RopeSpec["style"], factors: number[] | null): RopeSpec {
  const dimensions = meta.int("rope.dimension_count", 1, 1 << 16, headDim);
  if (dimensions !== headDim) throw meta.fail("rope.dimension_count", `${dimensions} of ${headDim}: partial rotation is not supported`);
  const base = meta.number("rope.freq_base", 1, MAX_BASE, DEFAULT_BASE);
  for (const key of ["rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier"]) {
    const value = meta.optionalNumber(key, -MAX_FACTOR, MAX_FACTOR);
    if (value !== null && value !== 0 && value !== 1) throw meta.fail(key, `${value} is not supported`);
  }
  const type = meta.string("rope.scaling.type") ?? (meta.has("rope.scaling.factor") || meta.has("rope.scale_linear") ? "linear" : "none");
  let scaling: RopeScaling = { type: "default" };
  if (type === "linear") {
    const key = meta.has("rope.scaling.factor") ? "rope.scaling.factor" : "rope.scale_linear";
    const factor = meta.number(key, 0, MAX_FACTOR, 1);
    // 0 is written for "no scaling".
    if (factor !== 0) scaling = { type: "linear", factor };
  } else if (type !== "none") {
    throw meta.fail("rope.scaling.type", `unsupported rope type ${JSON.stringify(type.slice(0, 40))}, expected none or linear`);
  }
  const invFreq = inverseFrequencies(headDim, base, scaling);
  return { style, invFreq: factors ? invFreq.map((freq, i) => f32(freq / (factors[i] ?? 1))) : invFreq, scale: 1 };
}
