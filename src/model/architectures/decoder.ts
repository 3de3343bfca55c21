import type { ModelSpec } from "../../config/model-spec.ts";
import type { RoleName } from "../roles.ts";

/** One tensor a model must have: its place in the network and its name in either file format. */
export interface TensorSlot {
  role: RoleName;
  layer: number;
  hf: string;
  gguf: string;
  /** Outputs; 1 for a vector. */
  rows: number;
  /** Inputs; the length of a vector. */
  cols: number;
  /** Norm weights and biases: stored with one dimension, never quantised. */
  vector: boolean;
}

/** What differs between the supported decoder-only transformers. */
export interface Architecture {
  name: ModelSpec["architecture"];
  /** `architectures` and `model_type` of config.json. */
  hfClass: string;
  modelType: string;
  /** `general.architecture` of a GGUF, and how its converter lays out rows of q and k. */
  ggufName: string;
  ggufRope: ModelSpec["rope"]["style"];
  /** Which biases: always, never, or as config.json's `attention_bias` says. */
  qkvBias: boolean | "attention_bias";
  oBias: boolean | "attention_bias";
  qkNorm: boolean;
  /** The configuration class's own values for keys that config.json leaves out. */
  defaults: {
    maxContext: number;
    /** null = as many as heads. */
    kvHeads: number | null;
    /** null = hidden / heads. */
    headDim: number | null;
  };
  /** Reads `use_sliding_window`; without it a set `sliding_window` has no meaning for the class. */
  slidingWindow: boolean;
}

interface LayerPart {
  role: RoleName;
  hf: string;
  gguf: string;
  shape: (spec: ModelSpec) => [rows: number, cols: number];
  vector?: boolean;
  when?: (spec: ModelSpec) => boolean;
}

const LAYER_PARTS: LayerPart[] = [
  { role: "attnNorm", hf: "input_layernorm.weight", gguf: "attn_norm.weight", vector: true, shape: (s) => [1, s.hidden] },
  { role: "q", hf: "self_attn.q_proj.weight", gguf: "attn_q.weight", shape: (s) => [s.heads * s.headDim, s.hidden] },
  { role: "k", hf: "self_attn.k_proj.weight", gguf: "attn_k.weight", shape: (s) => [s.kvHeads * s.headDim, s.hidden] },
  { role: "v", hf: "self_attn.v_proj.weight", gguf: "attn_v.weight", shape: (s) => [s.kvHeads * s.headDim, s.hidden] },
  { role: "o", hf: "self_attn.o_proj.weight", gguf: "attn_output.weight", shape: (s) => [s.hidden, s.heads * s.headDim] },
  { role: "qBias", hf: "self_attn.q_proj.bias", gguf: "attn_q.bias", vector: true, shape: (s) => [1, s.heads * s.headDim], when: (s) => s.qkvBias },
  { role: "kBias", hf: "self_attn.k_proj.bias", gguf: "attn_k.bias", vector: true, shape: (s) => [1, s.kvHeads * s.headDim], when: (s) => s.qkvBias },
  { role: "vBias", hf: "self_attn.v_proj.bias", gguf: "attn_v.bias", vector: true, shape: (s) => [1, s.kvHeads * s.headDim], when: (s) => s.qkvBias },
  { role: "oBias", hf: "self_attn.o_proj.bias", gguf: "attn_output.bias", vector: true, shape: (s) => [1, s.hidden], when: (s) => s.oBias },
  { role: "qNorm", hf: "self_attn.q_norm.weight", gguf: "attn_q_norm.weight", vector: true, shape: (s) => [1, s.headDim], when: (s) => s.qkNorm },
  { role: "kNorm", hf: "self_attn.k_norm.weight", gguf: "attn_k_norm.weight", vector: true, shape: (s) => [1, s.headDim], when: (s) => s.qkNorm },
  { role: "ffnNorm", hf: "post_attention_layernorm.weight", gguf: "ffn_norm.weight", vector: true, shape: (s) => [1, s.hidden] },
  { role: "gate", hf: "mlp.gate_proj.weight", gguf: "ffn_gate.weight", shape: (s) => [s.intermediate, s.hidden] },
  { role: "up", hf: "mlp.up_proj.weight", gguf: "ffn_up.weight", shape: (s) => [s.intermediate, s.hidden] },
  { role: "down", hf: "mlp.down_proj.weight", gguf: "ffn_down.weight", shape: (s) => [s.hidden, s.intermediate] },
];

/** Names of the three tensors outside the layers. */
export const EMBEDDING = { hf: "model.embed_tokens.weight", gguf: "token_embd.weight" };
export const FINAL_NORM = { hf: "model.norm.weight", gguf: "output_norm.weight" };
export const LM_HEAD = { hf: "lm_head.weight", gguf: "output.weight" };

/** Every tensor that a model of this spec has, the head left out when it is tied to the embedding. */
export function requiredTensors(spec: ModelSpec): TensorSlot[] {
  const slots: TensorSlot[] = [
    { role: "embedding", layer: 0, ...EMBEDDING, rows: spec.vocab, cols: spec.hidden, vector: false },
    { role: "finalNorm", layer: 0, ...FINAL_NORM, rows: 1, cols: spec.hidden, vector: true },
  ];
  if (!spec.tiedEmbeddings) slots.push({ role: "lmHead", layer: 0, ...LM_HEAD, rows: spec.vocab, cols: spec.hidden, vector: false });
  for (let layer = 0; layer < spec.layers; layer++)
    for (const part of LAYER_PARTS) {
      if (part.when && !part.when(spec)) continue;
      const [rows, cols] = part.shape(spec);
      slots.push({ role: part.role, layer, hf: `model.layers.${layer}.${part.hf}`, gguf: `blk.${layer}.${part.gguf}`, rows, cols, vector: part.vector ?? false });
    }
  return slots;
}
