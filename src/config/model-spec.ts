/** Shapes of a decoder-only transformer, independent of the file format it came from. Plain data: crosses to the engine Worker. */
export interface ModelSpec {
  architecture: "llama" | "qwen2" | "qwen3";
  hidden: number;
  layers: number;
  heads: number;
  kvHeads: number;
  headDim: number;
  intermediate: number;
  vocab: number;
  rmsEps: number;
  /** Tokens the model was trained for, after rope scaling (max_position_embeddings). */
  maxContext: number;
  rope: RopeSpec;
  qkvBias: boolean;
  oBias: boolean;
  qkNorm: boolean;
  tiedEmbeddings: boolean;
}

export interface RopeSpec {
  /** half: pairs (i, i + headDim/2), the Hugging Face layout · interleaved: pairs (2i, 2i+1), GGUF arch "llama". */
  style: "half" | "interleaved";
  /** headDim/2 values, radians per position, the rope type's scaling already applied. */
  invFreq: number[];
  /** Multiplies cos and sin. */
  scale: number;
}

export type WeightDtype = "f32" | "f16" | "bf16" | "q8_0" | "q4_0" | "q4_1";

/** Where one tensor's bytes are. `id` is layer * 256 + role (see native/layerscale.h). */
export interface WeightTensor {
  id: number;
  /** The name in the file, for error messages. */
  name: string;
  file: number;
  offset: number;
  bytes: number;
  dtype: WeightDtype;
  rows: number;
  cols: number;
}

/** Of one layer of an fp8 KV cache: a stored element stands for element * scale. f32 values, finite and above 0. */
export interface KvScale {
  k: number;
  v: number;
}

/** Files to map and tensors to place; everything has been checked against the spec. */
export interface WeightPlan {
  files: { path: string; bytes: number }[];
  tensors: WeightTensor[];
}
