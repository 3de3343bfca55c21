import type { ModelSpec } from "../config/model-spec.ts";
import { logger } from "../telemetry/log.ts";
import type { Architecture } from "./architectures/decoder.ts";
import { ARCHITECTURES, unsupportedArchitecture } from "./architectures/index.ts";
import { Fields } from "./fields.ts";
import { describe, isObject, type JsonObject } from "./files.ts";
import { refuseQuantisedWeights } from "./quantization.ts";
import { MAX_HEAD_DIM, MAX_LAYERS } from "./roles.ts";
import { ropeFromConfig } from "./rope.ts";

const log = logger("layerscale::model");

/** Ceilings that keep every product of shapes far inside 2^53 and a lying file from asking for memory. */
export const LIMITS = { hidden: 1 << 18, heads: 4096, intermediate: 1 << 20, vocab: 1 << 24, positions: 2 ** 30 };

/** A parsed config.json; keys of a nested `text_config` count where the top level is silent. */
export function configFields(file: string, json: JsonObject): Fields {
  const nested = json.text_config;
  return new Fields(file, isObject(nested) ? { ...nested, ...json } : json);
}

/**
 * The spec of a parsed config.json. tiedEmbeddings is the flag's
 * word; the tensors decide with it (see tieEmbeddings).
 * @throws ModelError naming key, value and what is supported.
 */
export function specFromConfig(file: string, json: JsonObject): ModelSpec {
  const config = configFields(file, json);
  const architecture = findArchitecture(config);
  refuseUnsupported(config, architecture);

  const hidden = config.int("hidden_size", 1, LIMITS.hidden);
  const layers = config.int("num_hidden_layers", 1, MAX_LAYERS);
  const heads = config.int("num_attention_heads", 1, LIMITS.heads);
  const kvHeads = config.isNull("num_key_value_heads") ? heads
    : config.int("num_key_value_heads", 1, LIMITS.heads, architecture.defaults.kvHeads ?? heads);
  if (heads % kvHeads !== 0) throw config.fail("num_key_value_heads", `${kvHeads} does not divide num_attention_heads ${heads}`);
  const headDim = readHeadDim(config, architecture, hidden, heads);
  checkLayerTypes(config, layers);
  const maxContext = config.int("max_position_embeddings", 1, LIMITS.positions, architecture.defaults.maxContext);
  const attentionBias = config.bool("attention_bias", false);
  const bias = (rule: boolean | "attention_bias") => (rule === "attention_bias" ? attentionBias : rule);
  return {
    architecture: architecture.name,
    hidden,
    layers,
    heads,
    kvHeads,
    headDim,
    intermediate: config.int("intermediate_size", 1, LIMITS.intermediate),
    vocab: config.int("vocab_size", 1, LIMITS.vocab),
    rmsEps: config.number("rms_norm_eps", 0, 1, 1e-6),
    maxContext,
    rope: ropeFromConfig(config, headDim, maxContext),
    qkvBias: bias(architecture.qkvBias),
    oBias: bias(architecture.oBias),
    qkNorm: architecture.qkNorm,
    tiedEmbeddings: config.bool("tie_word_embeddings", false),
  };
}

function findArchitecture(config: Fields): Architecture {
  const classes = config.strings("architectures");
  const modelType = config.string("model_type");
  const supported = ARCHITECTURES.map((architecture) => architecture.hfClass);
  if (classes && classes.length > 0) {
    const found = ARCHITECTURES.find((architecture) => architecture.hfClass === classes[0]);
    if (!found) throw config.fail("architectures", unsupportedArchitecture(classes[0]!, supported));
    if (modelType !== null && modelType !== found.modelType)
      throw config.fail("model_type", `${describe(modelType)} disagrees with architectures ${describe(classes)}, expected "${found.modelType}"`);
    return found;
  }
  if (modelType === null) throw config.fail("architectures", `missing, expected one of ${supported.join(", ")}`);
  const found = ARCHITECTURES.find((architecture) => architecture.modelType === modelType);
  if (!found) throw config.fail("model_type", unsupportedArchitecture(modelType, ARCHITECTURES.map((architecture) => architecture.modelType)));
  return found;
}

function refuseUnsupported(config: Fields, architecture: Architecture): void {
  refuseQuantisedWeights(config);
  const activation = config.string("hidden_act") ?? "silu";
  if (activation !== "silu") throw config.fail("hidden_act", `${describe(activation)} is not supported, expected "silu"`);
  if (config.bool("mlp_bias", false)) throw config.fail("mlp_bias", "true is not supported, expected false");
  const window = config.optionalInt("sliding_window", 0, LIMITS.positions);
  if (!architecture.slidingWindow) {
    if (window !== null) log.warn("sliding_window has no meaning for this architecture and is ignored", { file: config.file, sliding_window: window });
  } else if (config.bool("use_sliding_window", false)) {
    throw config.fail("use_sliding_window", "true is not supported: sliding window attention, expected false");
  }
}

function readHeadDim(config: Fields, architecture: Architecture, hidden: number, heads: number): number {
  const fallback = config.isNull("head_dim") ? null : architecture.defaults.headDim;
  if (!config.has("head_dim") && fallback === null && hidden % heads !== 0)
    throw config.fail("head_dim", `missing, and hidden_size ${hidden} is not a multiple of num_attention_heads ${heads}`);
  const headDim = config.has("head_dim") ? config.int("head_dim", 2, MAX_HEAD_DIM) : (fallback ?? hidden / heads);
  if (headDim % 2 !== 0 || headDim > MAX_HEAD_DIM) throw config.fail("head_dim", `${headDim}, expected an even number up to ${MAX_HEAD_DIM}`);
  return headDim;
}

function checkLayerTypes(config: Fields, layers: number): void {
  const types = config.strings("layer_types");
  if (!types) return;
  if (types.length !== layers) throw config.fail("layer_types", `${types.length} entries, expected num_hidden_layers ${layers}`);
  const other = types.findIndex((type) => type !== "full_attention");
  if (other >= 0) throw config.fail(`layer_types[${other}]`, `${describe(types[other])} is not supported, expected "full_attention"`);
}
