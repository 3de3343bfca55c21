/**
 * Every field that Dynamo 1.5.0 may put into a request body, and what becomes of it here. A field that is not listed comes from a later
 * release: it is tolerated and named once in the log.
 *
 * - applied: read by parseRequest
 * - refused: asks for something this engine does not do; REFUSALS says which values are neutral
 * - frontend: the frontend has acted on it already, or will on the answer
 * - router: chose this worker; says nothing about the answer
 * - roles: travels between prefill and decode workers
 * - trace: bookkeeping for logs and traces of others
 */
export type FieldUse = "applied" | "refused" | "frontend" | "router" | "roles" | "trace";

export type FieldSection = "request" | "stop_conditions" | "sampling_options" | "output_options" | "routing";

export const WIRE_FIELDS: Readonly<Record<FieldSection, Readonly<Record<string, FieldUse>>>> = {
  request: {
    model: "applied",
    token_ids: "applied",
    stop_conditions: "applied",
    sampling_options: "applied",
    output_options: "applied",
    eos_token_ids: "applied",
    routing: "applied",
    _HEALTH_CHECK: "applied",
    // One of them asks for a whole run; the rest are the frontend's.
    annotations: "applied",
    prompt_embeds: "refused",
    multi_modal_data: "refused",
    multi_modal_uuids: "refused",
    encoder_result: "refused",
    // Only beside multimodal data, which is refused.
    mm_routing_info: "router",
    mm_processor_kwargs: "frontend",
    media_io_kwargs: "frontend",
    mdc_sum: "router",
    router_config_override: "router",
    router: "router",
    prefill_result: "roles",
    bootstrap_info: "roles",
    extra_args: "frontend",
    // Tells a guided decoder when thinking ends; there is none.
    require_reasoning: "frontend",
    migration_link: "trace",
    agent_context: "trace",
    request_timestamp_ms: "trace",
  },
  stop_conditions: {
    max_tokens: "applied",
    stop: "applied",
    stop_token_ids: "applied",
    stop_token_ids_visible: "applied",
    stop_token_ids_hidden: "applied",
    ignore_eos: "applied",
    min_tokens: "refused",
    max_thinking_tokens: "refused",
  },
  sampling_options: {
    temperature: "applied",
    top_p: "applied",
    seed: "applied",
    n: "refused",
    best_of: "refused",
    presence_penalty: "refused",
    frequency_penalty: "refused",
    repetition_penalty: "refused",
    top_k: "refused",
    min_p: "refused",
    use_beam_search: "refused",
    length_penalty: "refused",
    guided_decoding: "refused",
    include_stop_str_in_output: "frontend",
  },
  output_options: {
    logprobs: "applied",
    skip_special_tokens: "applied",
    prompt_logprobs: "refused",
    formatted_prompt: "frontend",
    return_tokens_as_token_ids: "frontend",
  },
  routing: {
    priority: "applied",
    cache_salt: "applied",
    lora_name: "refused",
    dp_rank: "refused",
    backend_instance_id: "router",
    prefill_worker_id: "router",
    decode_worker_id: "router",
    prefill_dp_rank: "router",
    expected_output_tokens: "router",
    // Moves a request inside the router's queue, before it is sent.
    priority_jump: "router",
    strict_priority: "router",
    allowed_worker_ids: "router",
    routing_constraints: "router",
  },
};

/** Calls `unknown` with the path of each field that is not listed. */
export function unknownFields(request: Record<string, unknown>, unknown: (path: string) => void): void {
  for (const [section, known] of Object.entries(WIRE_FIELDS)) {
    const holder = section === "request" ? request : request[section];
    if (typeof holder !== "object" || holder === null || Array.isArray(holder)) continue;
    for (const key of Object.keys(holder)) if (!Object.hasOwn(known, key)) unknown(section === "request" ? key : `${section}.${key}`);
  }
}
