import type { Architecture } from "./decoder.ts";

export const qwen2: Architecture = {
  name: "qwen2",
  hfClass: "Qwen2ForCausalLM",
  modelType: "qwen2",
  ggufName: "qwen2",
  ggufRope: "half",
  qkvBias: true,
  oBias: false,
  qkNorm: false,
  defaults: { maxContext: 32768, kvHeads: 32, headDim: null },
  slidingWindow: true,
};
