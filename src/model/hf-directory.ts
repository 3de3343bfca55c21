import { createHash } from "node:crypto";
import { existsSync } from "node:fs";
import { basename, join, resolve } from "node:path";
import type { ModelSpec } from "../config/model-spec.ts";
import { writeFileSet } from "./cache-files.ts";
import { configFields, specFromConfig } from "./config.ts";
import { describe, isFile, isObject, type JsonObject, OpenFile, readJsonFile, whyNoFile } from "./files.ts";
import { generationDefaults, type NamedJson } from "./generation-config.ts";
import { findKvScales, readKvScales } from "./kv-scales.ts";
import { readSafetensorsDirectory } from "./safetensors.ts";
import { tieEmbeddings } from "./tied-embeddings.ts";
import { type CardFiles, type LoadedModel, type ModelAssets, ModelError } from "./types.ts";
import { dominantDtype, planWeights } from "./weights.ts";

const MAX_CONFIG_BYTES = 4 << 20;
const MAX_TOKENIZER_BYTES = 128 << 20;
const MAX_TEMPLATE_BYTES = 4 << 20;

/**
 * A Hugging Face model directory: config.json, safetensors (single or sharded), tokenizer.json, and optionally tokenizer_config.json,
 * chat_template.jinja, generation_config.json. Reads headers and settings, no weights (but for a head that may equal its tied embedding).
 * @throws ModelError
 */
export function openHfDirectory(directory: string): LoadedModel {
  const configPath = join(directory, "config.json");
  if (!isFile(configPath)) throw new ModelError(configPath, "", `${whyNoFile(configPath)}: not a Hugging Face model directory (a GGUF model is given as its .gguf file)`);
  const config: NamedJson = { path: configPath, json: readJsonFile(configPath, MAX_CONFIG_BYTES) };
  const flagged = specFromConfig(configPath, config.json);
  const stored = readSafetensorsDirectory(directory);
  const { tied, skip } = tieEmbeddings(flagged, stored, configPath);
  const spec: ModelSpec = { ...flagged, tiedEmbeddings: tied };
  const scales = findKvScales(stored, spec.layers);
  const weights = planWeights(spec, stored, "hf", directory, new Set([...skip, ...scales.map(({ tensor }) => tensor.name)]));

  const tokenizerJson = readTokenizer(join(directory, "tokenizer.json"));
  const tokenizerConfig = optionalJson(join(directory, "tokenizer_config.json"));
  const generation = optionalJson(join(directory, "generation_config.json"));
  return {
    name: modelName(directory),
    path: directory,
    format: "hf",
    spec,
    weights,
    kvScales: () => readKvScales(scales, spec.layers, configFields(configPath, config.json)),
    dtype: dominantDtype(weights),
    assets: directoryAssets(directory, tokenizerJson, tokenizerConfig, generation !== null),
    generation: generationDefaults(spec.vocab, config, generation, tokenizerConfig, tokenizerJson),
  };
}

/** Whether a directory's settings are those of a model that can be served, before its weights are there. @throws ModelError */
export function checkSettings(directory: string): void {
  const config = join(directory, "config.json");
  specFromConfig(config, readJsonFile(config, MAX_CONFIG_BYTES));
  readTokenizer(join(directory, "tokenizer.json"));
}

/** A snapshot directory of the hub's cache (models--org--name/snapshots/<commit>) carries the model's name further up. */
function modelName(directory: string): string {
  const snapshot = /(?:^|\/)models--([^/]+)\/snapshots\/[^/]+$/.exec(directory);
  return snapshot ? snapshot[1]!.replace("--", "/") : basename(directory);
}

function optionalJson(path: string): NamedJson | null {
  return existsSync(path) ? { path, json: readJsonFile(path, MAX_CONFIG_BYTES) } : null;
}

/** Stored padding and truncation belong to training batches: applied to a prompt they would pad or cut it. */
function readTokenizer(path: string): JsonObject {
  if (!isFile(path)) throw new ModelError(path, "", `${whyNoFile(path)}: expected a fast tokenizer (tokenizer.json); tokenizer.model alone is not supported`);
  const json = readJsonFile(path, MAX_TOKENIZER_BYTES);
  if (!isObject(json.model)) throw new ModelError(path, "model", `expected an object, found ${describe(json.model)}`);
  return { ...json, padding: null, truncation: null };
}

function directoryAssets(directory: string, tokenizerJson: JsonObject, tokenizerConfig: NamedJson | null, hasGeneration: boolean): ModelAssets {
  const templatePath = join(directory, "chat_template.jinja");
  const hasTemplateFile = isFile(templatePath);
  const files = (tokenizerConfigPath: string): CardFiles => ({
    config: resolve(directory, "config.json"),
    tokenizer: resolve(directory, "tokenizer.json"),
    tokenizerConfig: tokenizerConfigPath,
    chatTemplate: hasTemplateFile ? resolve(templatePath) : null,
    generationConfig: hasGeneration ? resolve(directory, "generation_config.json") : null,
  });
  return {
    tokenizerJson,
    tokenizerConfig: tokenizerConfig?.json ?? {},
    chatTemplate: hasTemplateFile ? readTemplate(templatePath) : templateOfConfig(directory, tokenizerConfig),
    files: () => (tokenizerConfig ? files(resolve(tokenizerConfig.path)) : null),
    materialize(dir) {
      if (tokenizerConfig) return files(resolve(tokenizerConfig.path));
      const key = createHash("sha256").update(resolve(directory)).digest("hex").slice(0, 16);
      const written = writeFileSet(directory, "hf", `${basename(directory)}-${key}`, { "tokenizer_config.json": "{}\n" }, dir);
      return files(join(written, "tokenizer_config.json"));
    },
  };
}

function readTemplate(path: string): string {
  const file = OpenFile.open(path);
  try {
    if (file.size > MAX_TEMPLATE_BYTES) throw new ModelError(path, "", `${file.size} bytes, expected at most ${MAX_TEMPLATE_BYTES}`);
    return new TextDecoder("utf-8", { fatal: true }).decode(file.read(0, file.size, ""));
  } catch (error) {
    if (error instanceof ModelError) throw error;
    throw new ModelError(path, "", "not valid UTF-8");
  } finally {
    file.close();
  }
}

/** tokenizer_config.json's template (of a list of named ones, "default"), else the older chat_template.json. */
function templateOfConfig(directory: string, tokenizerConfig: NamedJson | null): string | null {
  const legacy = optionalJson(join(directory, "chat_template.json"));
  for (const source of [tokenizerConfig, legacy]) {
    if (!source) continue;
    const value = source.json.chat_template;
    if (value === undefined || value === null) continue;
    if (typeof value === "string") return value;
    const named: unknown[] = Array.isArray(value) ? value : [];
    const found = named.find((entry) => isObject(entry) && entry.name === "default" && typeof entry.template === "string");
    if (isObject(found)) return found.template as string;
    throw new ModelError(source.path, "chat_template", `expected a string or a list with a template named "default", found ${describe(value)}`);
  }
  return null;
}
