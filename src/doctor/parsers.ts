import type { WorkerOptions } from "../config/engine-config.ts";
import { fail, type Findings, skip } from "./findings.ts";

/** Names that the frontend of Dynamo 1.5.0 takes; a test compares them with the frontend's own lists. */
export const TOOL_PARSERS: readonly string[] = [
  "deepseek-v4", "deepseek_v3", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4", "deepseekv4", "default", "gemma-4", "gemma4", "glm47", "harmony",
  "hermes", "inkling", "jamba", "kimi-k3", "kimi_k2", "kimi_k3", "llama3_json", "minimax-m3", "minimax-m3-nom", "minimax_m2", "minimax_m3",
  "minimax_m3_nom", "mistral", "muse", "muse_glimmer", "nemotron_deci", "nemotron_nano", "phi4", "pythonic", "qwen25", "qwen3_coder",
];
export const REASONING_PARSERS: readonly string[] = [
  "basic", "deepseek-v4", "deepseek_r1", "deepseek_v3", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4", "deepseekv4", "gemma-4", "gemma4", "glm45",
  "gpt_oss", "granite", "inkling", "kimi", "kimi-k3", "kimi_k25", "kimi_k3", "minimax-m3", "minimax_append_think", "minimax_m2", "minimax_m3",
  "mistral", "muse", "muse_glimmer", "nemotron3", "nemotron_deci", "nemotron_nano", "nemotron_v3", "qwen3", "step3",
];

export async function parserChecks(findings: Findings, { toolCallParser, reasoningParser }: WorkerOptions): Promise<void> {
  await findings.check("tool-parser", () => known("--dyn-tool-call-parser", toolCallParser, TOOL_PARSERS));
  await findings.check("reasoning-parser", () => known("--dyn-reasoning-parser", reasoningParser, REASONING_PARSERS));
}

function known(flag: string, name: string | null, names: readonly string[]): string {
  if (name === null) throw skip(`${flag} is not given`);
  if (!names.includes(name)) throw fail(`${flag}: the frontend of Dynamo 1.5.0 knows no parser "${name}"`, `choose one of ${names.join(", ")}`);
  return `${name} is known to the frontend of Dynamo 1.5.0`;
}
