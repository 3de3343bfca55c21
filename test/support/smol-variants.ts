/** SmolLM2 in other forms, made from the default model once and kept under LAYERSCALE_TEST_MODELS. */
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readFileSync, renameSync, rmSync, statSync } from "node:fs";
import { join } from "node:path";
import { convert } from "../../scripts/models/convert.ts";

/** Targets of scripts/models/convert.ts; "q4_1" is the default model itself. */
export type SmolVariant = "hf-bf16" | "hf-f16" | "hf-f32" | "f32" | "f16" | "bf16" | "q8_0" | "q4_0" | "q4_1";

function required(name: string): string {
  const value = process.env[name];
  if (!value) throw new Error(`${name} is not set; npm test sets it`);
  return value;
}

/** Path of the directory or .gguf file. The first call for a variant takes seconds and up to 540 MB of disk. */
export async function smolVariant(variant: SmolVariant): Promise<string> {
  const source = required("LAYERSCALE_TEST_GGUF");
  if (variant === "q4_1") return source;
  const home = required("LAYERSCALE_TEST_MODELS");
  const path = join(home, `smollm2-${version(source)}-${variant}${variant.startsWith("hf-") ? "" : ".gguf"}`);
  if (existsSync(path)) return path;
  mkdirSync(home, { recursive: true });
  const part = `${path}.part-${process.pid}`;
  try {
    await convert(source, part, variant);
    // Two test processes may make the same variant: the first to finish wins.
    if (!existsSync(path)) renameSync(part, path);
  } finally {
    rmSync(part, { recursive: true, force: true });
  }
  return path;
}

/** Changes with the converter and the source file, so that an old variant is not taken for a new one. */
function version(source: string): string {
  const hash = createHash("sha256").update(String(statSync(source).size));
  for (const file of ["convert.ts", "quantize.ts", "writers.ts"]) hash.update(readFileSync(join(import.meta.dir, "../../scripts/models", file)));
  return hash.digest("hex").slice(0, 12);
}
