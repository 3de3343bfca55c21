import type { Architecture } from "./decoder.ts";

export const llama: Architecture = {
  name: "llama",
  hfClass: "LlamaForCausalLM",
  modelType: "llama",
  ggufName: "llama",
  // The GGUF converter interleaves the two halves of each head of q and k, so pairs are (2i, 2i+1) there.
  ggufRope: "interleaved",
  qkvBias: "attention_bias",
  oBias: "attention_bias",
  qkNorm: false,
  defaults: { maxContext: 2048, kvHeads: null, headDim: null },
  slidingWindow: false,
};
