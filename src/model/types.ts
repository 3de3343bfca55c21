import type { KvScale, ModelSpec, WeightDtype, WeightPlan } from "../config/model-spec.ts";

/** Every refusal of a model: the text names the file, the field, the value found and what was expected. One line, whatever the file says. */
export class ModelError extends Error {
  override name = "ModelError";
  constructor(
    /** The file at fault, as given or found. */
    readonly file: string,
    /** Key, tensor or header field at fault; "" when the whole file is meant. */
    readonly field: string,
    problem: string,
  ) {
    super(oneLine(field === "" ? `${file}: ${problem}` : `${file}: ${field}: ${problem}`));
  }
}

/** Names inside a file may hold anything: control characters would forge log lines, long ones would bury the message. */
function oneLine(text: string): string {
  const plain = text.replace(/[\p{Cc}\u2028\u2029]/gu, "?");
  return plain.length > 1000 ? `${plain.slice(0, 997)}...` : plain;
}

/** Absolute paths of the files that a Dynamo model card refers to. */
export interface CardFiles {
  config: string;
  tokenizer: string;
  tokenizerConfig: string;
  /** chat_template.jinja, only where the template is a file of its own. */
  chatTemplate: string | null;
  generationConfig: string | null;
}

/** Tokenizer, template and settings that belong to the weights. */
export interface ModelAssets {
  /** Parsed tokenizer.json; stored padding and truncation are already null. */
  tokenizerJson: unknown;
  tokenizerConfig: Record<string, unknown>;
  /** chat_template.jinja, else tokenizer_config.json's; null = the model has none. */
  chatTemplate: string | null;
  /** Files on disk beside the weights; null for a GGUF, which has none until materialize(). */
  files(): CardFiles | null;
  /**
   * Files on disk in any case: those beside the weights, else written into dir (created, complete or not at all, reused when present).
   * dir absent or "": layerscale/ in the user's cache directory, else in the temporary directory.
   * @throws ModelError when nothing can be written.
   */
  materialize(dir?: string): CardFiles;
}

/** What the model's own files say about generation; null or empty = silent. */
export interface GenerationDefaults {
  temperature: number | null;
  topP: number | null;
  /** Tokens that end an answer, from generation_config.json, else config.json, else tokenizer_config.json. */
  eosTokenIds: number[];
}

export interface LoadedModel {
  /** Name clients see by default: the directory's or the file's name without ".gguf". */
  name: string;
  /** Absolute. */
  path: string;
  format: "hf" | "gguf";
  spec: ModelSpec;
  weights: WeightPlan;
  /**
   * Scales of an fp8 KV cache, by layer; null = the checkpoint has none. Read only when called, since other caches have no use for them.
   * @throws ModelError naming tensor and value when they are not usable
   */
  kvScales(): KvScale[] | null;
  /** The dtype that most weight bytes have. */
  dtype: WeightDtype;
  assets: ModelAssets;
  generation: GenerationDefaults;
}
