import { join } from "node:path";
import { isObject, readJsonFile } from "../files.ts";
import { ModelError } from "../types.ts";

/** Read from a directory beside the weights; what the engine, a frontend or transformers takes from there. */
const SETTINGS = [
  "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
] as const;
export const SINGLE = "model.safetensors";
export const INDEX = "model.safetensors.index.json";
const MAX_INDEX_BYTES = 16 << 20;

/** Settings of a model directory, and the index of its weights: small files that say what else is needed. */
export function settingsOf(files: ReadonlySet<string>): string[] {
  return [...SETTINGS, ...(files.has(SINGLE) ? [] : [INDEX])].filter((name) => files.has(name));
}

/**
 * The weights of a model directory.
 * @param snapshot where the index lies
 * @throws ModelError for an index that is none
 */
export function weightsOf(files: ReadonlySet<string>, snapshot: string): string[] {
  if (files.has(SINGLE)) return [SINGLE];
  return shardsOf(join(snapshot, INDEX));
}

/** @throws ModelError */
export function shardsOf(index: string): string[] {
  const map = readJsonFile(index, MAX_INDEX_BYTES).weight_map;
  if (!isObject(map)) throw new ModelError(index, "weight_map", "expected an object");
  const shards = new Set<string>();
  for (const [tensor, shard] of Object.entries(map)) {
    if (typeof shard !== "string" || !/^[^/\\\0]+\.safetensors$/.test(shard)) throw new ModelError(index, `weight_map["${tensor}"]`, "expected the name of a .safetensors file beside the index");
    shards.add(shard);
  }
  return [...shards].sort();
}

/**
 * The .gguf file that is meant: the one asked for, else the only one.
 * @returns null for a repo that is a model directory; words for people when neither
 */
export function ggufOf(files: ReadonlySet<string>, asked: string | null): { file: string } | { problem: string } | null {
  const found = [...files].filter((name) => /\.gguf$/i.test(name)).sort();
  const some = (names: string[]) => names.slice(0, 12).join(", ") + (names.length > 12 ? `, … (${names.length})` : "");
  if (asked !== null) return files.has(asked) ? { file: asked } : { problem: `the repo has no file ${asked}; ${found.length === 0 ? "it has no .gguf file" : `its .gguf files: ${some(found)}`}` };
  if (files.has("config.json") && (files.has(SINGLE) || files.has(INDEX))) return null;
  if (found.length === 1) return { file: found[0]! };
  if (found.length > 1) return { problem: `the repo has ${found.length} .gguf files; say which, as org/name:FILE.gguf: ${some(found)}` };
  const other = [...files].find((name) => /^(pytorch_model.*\.bin|tf_model\.h5|flax_model\.msgpack)$/.test(name));
  return { problem: `the repo holds neither config.json with ${SINGLE} or ${INDEX}, nor a .gguf file${other === undefined ? "" : `; weights as ${other} are not supported`}` };
}
