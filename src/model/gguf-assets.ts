import { basename, join } from "node:path";
import type { ModelSpec } from "../config/model-spec.ts";
import { ARCHITECTURES } from "./architectures/index.ts";
import { writeFileSet } from "./cache-files.ts";
import { Fields } from "./fields.ts";
import type { JsonObject } from "./files.ts";
import type { GgufFile } from "./gguf.ts";
import { type GgufTokenizer, tokenizerFromGguf } from "./gguf-tokenizer.ts";
import type { ModelAssets } from "./types.ts";

/** Raised when the files derived from a GGUF change, so that a cache written by an older release is not taken for this one's. */
const DERIVATION = 1;

/** Tokenizer, template and settings of a GGUF. The files for a model card are written by materialize() only. */
export function ggufAssets(gguf: GgufFile, spec: ModelSpec): { assets: ModelAssets; eosTokenIds: number[] } {
  const tokenizer = tokenizerFromGguf(gguf, spec.vocab);
  const chatTemplate = new Fields(gguf.path, gguf.metadata).string("tokenizer.chat_template");
  const tokenizerConfig = {
    ...tokenizer.tokenizerConfig,
    model_max_length: spec.maxContext,
    ...(chatTemplate === null ? {} : { chat_template: chatTemplate }),
  };
  const assets: ModelAssets = {
    tokenizerJson: tokenizer.tokenizerJson,
    tokenizerConfig,
    chatTemplate,
    files: () => null,
    materialize(dir) {
      const text = (value: unknown) => JSON.stringify(value, null, 1) + "\n";
      const directory = writeFileSet(gguf.path, "gguf", cacheName(gguf), {
        "config.json": text(configJson(gguf, spec, tokenizer)),
        "tokenizer.json": JSON.stringify(tokenizer.tokenizerJson),
        "tokenizer_config.json": text(tokenizerConfig),
        "generation_config.json": text(tokenIds(tokenizer)),
      }, dir);
      return {
        config: join(directory, "config.json"),
        tokenizer: join(directory, "tokenizer.json"),
        tokenizerConfig: join(directory, "tokenizer_config.json"),
        chatTemplate: null,
        generationConfig: join(directory, "generation_config.json"),
      };
    },
  };
  return { assets, eosTokenIds: tokenizer.eosTokenIds };
}

/** Unique per header (names, shapes and metadata) and file length; the readable part is for people who look into the cache. */
function cacheName(gguf: GgufFile): string {
  const readable = basename(gguf.path).replace(/\.gguf$/i, "").replace(/[^A-Za-z0-9._-]/g, "_").slice(0, 80);
  return `${readable}-${gguf.headerHash.slice(0, 16)}-${DERIVATION}`;
}

/** An id alone where there is one, as most configs have it; a list otherwise. */
function tokenIds(tokenizer: GgufTokenizer): JsonObject {
  const { bosTokenId, padTokenId, eosTokenIds } = tokenizer;
  return {
    ...(bosTokenId === null ? {} : { bos_token_id: bosTokenId }),
    ...(eosTokenIds.length === 0 ? {} : { eos_token_id: eosTokenIds.length === 1 ? eosTokenIds[0] : eosTokenIds }),
    ...(padTokenId === null ? {} : { pad_token_id: padTokenId }),
  };
}

/** config.json as the model's own class would write it; readers of a model card take architecture, context and token ids from it. */
function configJson(gguf: GgufFile, spec: ModelSpec, tokenizer: GgufTokenizer): JsonObject {
  const architecture = ARCHITECTURES.find((candidate) => candidate.name === spec.architecture)!;
  const meta = new Fields(gguf.path, gguf.metadata, `${architecture.ggufName}.`);
  const linear = meta.string("rope.scaling.type") === "linear" ? meta.optionalNumber("rope.scaling.factor", 0, 1e6) : null;
  return {
    architectures: [architecture.hfClass],
    model_type: architecture.modelType,
    hidden_size: spec.hidden,
    intermediate_size: spec.intermediate,
    num_hidden_layers: spec.layers,
    num_attention_heads: spec.heads,
    num_key_value_heads: spec.kvHeads,
    head_dim: spec.headDim,
    vocab_size: spec.vocab,
    max_position_embeddings: spec.maxContext,
    // The file has a float32; seven digits bring back the decimal it was made from.
    rms_norm_eps: Number(spec.rmsEps.toPrecision(7)),
    rope_theta: meta.number("rope.freq_base", 1, 1e15, 10000),
    rope_scaling: linear ? { rope_type: "linear", factor: linear } : null,
    hidden_act: "silu",
    ...(architecture.qkvBias === "attention_bias" ? { attention_bias: spec.qkvBias } : {}),
    tie_word_embeddings: spec.tiedEmbeddings,
    ...tokenIds(tokenizer),
  };
}
