/** Reference data of test/golden (made by scripts/golden/make_golden.py). */
import { readFileSync } from "node:fs";
import { join } from "node:path";

export interface GoldenPrompt {
  tokens: number[];
  /** The reference's greedy continuation. */
  greedy: number[];
  /** Log-probability of the best minus the second best, where greedy[i] is chosen. */
  gaps: number[];
  /** For each greedy token, the 20 best (id, natural log-probability), by falling probability. */
  top: { id: number; logprob: number }[][];
}

export interface Golden {
  model: string;
  /** SHA-256 of the safetensors files (tiny models) or of the source GGUF. */
  source: string;
  reference: string;
  invFreq: number[];
  prompts: GoldenPrompt[];
}

export function readGolden(name: string): Golden {
  const json = JSON.parse(readFileSync(join(import.meta.dir, "../golden", `${name}.json`), "utf8")) as Omit<Golden, "prompts"> & {
    prompts: (Omit<GoldenPrompt, "top"> & { top: number[][] })[];
  };
  const pairs = (flat: number[]) => Array.from({ length: flat.length / 2 }, (_, i) => ({ id: flat[2 * i]!, logprob: flat[2 * i + 1]! }));
  return { ...json, prompts: json.prompts.map((prompt) => ({ ...prompt, top: prompt.top.map(pairs) })) };
}
