import { statSync } from "node:fs";
import { join } from "node:path";
import { isRecurrentName } from "./architectures/index.ts";
import { isFile, isObject, type JsonObject, readJsonFile } from "./files.ts";
import { readGguf } from "./gguf.ts";

const MAX_CONFIG_BYTES = 4 << 20;
/** Settings that only models with recurrent layers have, in config.json and, behind the architecture's name, in a GGUF's metadata. */
const RECURRENT_KEYS = /^(linear_(num|key|value|conv)_\w+|full_attention_interval|mamba_\w+|ssm_\w+|attn_layer_(period|offset)|time_mix\w*|layers_block_type|hybrid_override_pattern|[\w-]+\.(ssm|wkv)\.\w+|[\w-]+\.full_attention_interval)$/;
const LAYER_LISTS = ["layer_types", "layers_block_type", "block_types"];
const ATTENTION = /^(full|sliding|chunked|local|global)?_?attention$|^(hybrid_)?attn$/;

/**
 * What tells that a model has recurrent layers beside attention: "field = value" of its configuration; null = nothing does. What cannot be
 * read is for openModel to refuse.
 */
export function recurrentLayers(path: string): string | null {
  try {
    if (statSync(path).isDirectory()) {
      const config = join(path, "config.json");
      return isFile(config) ? inConfig(readJsonFile(config, MAX_CONFIG_BYTES)) : null;
    }
    const { metadata } = readGguf(path);
    return byName("general.architecture", metadata["general.architecture"]) ?? byKey(metadata);
  } catch {
    return null;
  }
}

function inConfig(json: JsonObject): string | null {
  const nested = json.text_config;
  const config: JsonObject = isObject(nested) ? { ...nested, ...json } : json;
  const classes = Array.isArray(config.architectures) ? config.architectures : [];
  for (const [field, value] of [["architectures", classes[0]], ["model_type", config.model_type]] as const) {
    const found = byName(field, value);
    if (found !== null) return found;
  }
  for (const field of LAYER_LISTS) {
    const layers = config[field];
    const other = Array.isArray(layers) ? layers.find((layer) => typeof layer === "string" && !ATTENTION.test(layer)) : undefined;
    if (other !== undefined) return `${field} has ${JSON.stringify(other)}`;
  }
  return byKey(config);
}

const byName = (field: string, value: unknown): string | null => (typeof value === "string" && isRecurrentName(value) ? `${field} = ${JSON.stringify(value.slice(0, 80))}` : null);

function byKey(settings: JsonObject): string | null {
  const key = Object.keys(settings).find((name) => RECURRENT_KEYS.test(name) && settings[name] !== null);
  return key === undefined ? null : `${key} = ${JSON.stringify(settings[key])?.slice(0, 80)}`;
}
