import { type Stats, statSync } from "node:fs";
import { resolve } from "node:path";
import { OpenFile } from "./files.ts";
import { openGguf } from "./gguf-model.ts";
import { openHfDirectory } from "./hf-directory.ts";
import { type LoadedModel, ModelError } from "./types.ts";

export * from "./types.ts";

/**
 * Reads what a model is, without its weights: a Hugging Face directory or a .gguf file.
 * Everything a later stage relies on has been checked: shapes, dtypes, byte ranges, rope type, token ids.
 * @throws ModelError (rejects) for everything that is missing, malformed or not supported.
 */
export async function openModel(path: string): Promise<LoadedModel> {
  const notAModel = () => new ModelError(path, "", "not a model directory or .gguf file");
  let stat: Stats;
  try {
    stat = statSync(path);
  } catch (error) {
    if (error instanceof Error && "code" in error && error.code === "EACCES") throw new ModelError(path, "", "cannot be read: permission denied");
    throw notAModel();
  }
  const absolute = resolve(path);
  if (stat.isDirectory()) return openHfDirectory(absolute);
  if (!stat.isFile() || !(/\.gguf$/i.test(path) || hasGgufMagic(absolute))) throw notAModel();
  return openGguf(absolute);
}

function hasGgufMagic(path: string): boolean {
  const file = OpenFile.open(path);
  try {
    return file.size >= 4 && file.read(0, 4, "magic").toString("latin1") === "GGUF";
  } finally {
    file.close();
  }
}
