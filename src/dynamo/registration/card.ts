import { basename } from "node:path";
import type { DisaggregationMode, WorkerOptions } from "../../config/engine-config.ts";
import type { EngineInfo } from "../../engine/types.ts";
import type { CardFiles } from "../../model/types.ts";
import { type CheckedFile, checkFile } from "./checksum.ts";
import { slug } from "./slug.ts";

export interface CardInput {
  servedName: string;
  /** --model: an absolute path, or a repo of the hub as it was asked for, where a frontend that cannot reach the files looks for them; part of the checksum that makes workers one group. */
  sourcePath: string;
  files: CardFiles;
  /** Tokens the model was trained for. */
  architecturalContext: number;
  engine: Pick<EngineInfo, "contextLength" | "pages" | "pageTokens" | "maxNumSeqs" | "maxBatchTokens">;
  options: Pick<WorkerOptions, "disaggregationMode" | "endpointTypes" | "customJinjaTemplate" | "toolCallParser" | "reasoningParser" | "excludeToolsWhenToolChoiceNone">;
  stableRoutingId: string | null;
  /** The worker tells the router what its prefix cache holds. */
  publishesKvEvents: boolean;
  /** URL of a file on the system server; null = the card names paths. */
  url: ((fileName: string) => string) | null;
}

export interface ModelCard {
  card: Record<string, unknown>;
  /** File name -> absolute path, as the URLs name them. */
  served: Map<string, string>;
}

const MODEL_TYPES: Record<string, string> = { chat: "Chat", completions: "Completions" };

/** What a role is called in the card, and which other role must be there for the model to be served. */
const ROLES: Record<DisaggregationMode, { worker_type: string; needs: string[][] }> = {
  agg: { worker_type: "aggregated", needs: [] },
  prefill: { worker_type: "prefill", needs: [["decode"]] },
  decode: { worker_type: "decode", needs: [["prefill"]] },
};

/** A prefill worker answers no client, so no route of the frontend names it. */
function modelType({ disaggregationMode, endpointTypes }: CardInput["options"]): string {
  return disaggregationMode === "prefill" ? "Prefill" : endpointTypes.map((type) => MODEL_TYPES[type] ?? type).join(" | ");
}

/**
 * The record by which the frontend builds tokenizer, template and router settings of a model.
 * @throws Error when a file cannot be read
 */
export async function modelCard(input: CardInput): Promise<ModelCard> {
  const { files, engine, options } = input;
  const served = new Map<string, string>();
  const checked = async (path: string): Promise<CheckedFile> => {
    const file = await checkFile(path);
    if (!input.url) return file;
    const name = basename(path);
    const other = served.get(name);
    if (other !== undefined && other !== path) throw new Error(`model card: two files named ${name}: ${other} and ${path}`);
    served.set(name, path);
    return { ...file, path: input.url(name) };
  };
  const template = options.customJinjaTemplate ?? files.chatTemplate;
  const card = {
    display_name: input.servedName,
    slug: slug(input.servedName),
    source_path: input.sourcePath,
    model_info: { hf_config_json: await checked(files.config) },
    tokenizer: { hf_tokenizer_json: await checked(files.tokenizer) },
    prompt_formatter: { hf_tokenizer_config_json: await checked(files.tokenizerConfig) },
    ...(template === null ? {} : { chat_template_file: { hf_chat_template: { is_custom: options.customJinjaTemplate !== null, file: await checked(template) } } }),
    ...(files.generationConfig === null ? {} : { gen_config: { hf_generation_config_json: await checked(files.generationConfig) } }),
    architectural_max_context_length: input.architecturalContext,
    context_length: engine.contextLength,
    kv_cache_block_size: engine.pageTokens,
    migration_limit: 0,
    model_type: modelType(options),
    model_input: "Tokens",
    ...ROLES[options.disaggregationMode],
    runtime_config: {
      context_length: engine.contextLength,
      total_kv_blocks: engine.pages,
      max_num_seqs: engine.maxNumSeqs,
      max_num_batched_tokens: engine.maxBatchTokens,
      ...(options.toolCallParser === null ? {} : { tool_call_parser: options.toolCallParser }),
      ...(options.reasoningParser === null ? {} : { reasoning_parser: options.reasoningParser }),
      tool_call_arguments_format: "json_string",
      structural_tag_mode: "off",
      structural_tag_scope: "auto",
      structural_tag_schema: "auto",
      exclude_tools_when_tool_choice_none: options.excludeToolsWhenToolChoiceNone,
      data_parallel_start_rank: 0,
      data_parallel_size: 1,
      // As Dynamo's own decode workers: routers place the decode part by load, and need no index of what they hold.
      enable_local_indexer: input.publishesKvEvents && options.disaggregationMode !== "decode",
      kv_event_publishing_enabled: input.publishesKvEvents,
      enable_eagle: false,
      ...(input.stableRoutingId === null ? {} : { stable_routing_id: input.stableRoutingId }),
    },
    media_decoder: null,
    media_fetcher: null,
  };
  return { card, served };
}
