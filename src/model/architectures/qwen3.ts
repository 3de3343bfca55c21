import type { Architecture } from "./decoder.ts";

export const qwen3: Architecture = {
  name: "qwen3",
  hfClass: "Qwen3ForCausalLM",
  modelType: "qwen3",
  ggufName: "qwen3",
  ggufRope: "half",
  qkvBias: "attention_bias",
  oBias: "attention_bias",
  qkNorm: true,
  defaults: { maxContext: 32768, kvHeads: 32, headDim: 128 },
  slidingWindow: true,
};
