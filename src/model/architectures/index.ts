import type { Architecture } from "./decoder.ts";
import { llama } from "./llama.ts";
import { qwen2 } from "./qwen2.ts";
import { qwen3 } from "./qwen3.ts";

export const ARCHITECTURES: readonly Architecture[] = [llama, qwen2, qwen3];

const RECURRENT = /mamba|rwkv|xlstm|jamba|zamba|bamba|recurrent|hybrid|falcon_?-?h1|falconh1|lfm2|next|qwen35|qwen3_?5|retnet|plamo2|nemotron_?h/i;

/** The name of an architecture that keeps recurrent state. */
export const isRecurrentName = (name: string): boolean => RECURRENT.test(name);

/** Why `name` is not served, for an error line. */
export function unsupportedArchitecture(name: string, supported: readonly string[]): string {
  const kind = isRecurrentName(name) ? " (recurrent or hybrid)" : "";
  return `unsupported architecture ${JSON.stringify(name.slice(0, 80))}${kind}, expected one of ${supported.join(", ")}`;
}
