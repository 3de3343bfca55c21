// Generated from native/layerscale.h by scripts/abi-gen.ts. Do not edit: run `bun scripts/abi-gen.ts`.

export const LS_ABI_VERSION = 5;
export const LS_PAGE_TOKENS = 16;
export const LS_MAX_LOGPROBS = 20;
export const LS_MAX_LAYERS = 1024;
export const LS_MAX_HEAD_DIM = 512;
export const LS_PLAN_HEADER_WORDS = 8;
export const LS_PLAN_ROW_WORDS = 8;
export const LS_ROW_SAMPLE = 1;
export const LS_RESULT_HEADER_WORDS = 8;
export const LS_RESULT_ROW_WORDS = 4;
export const LS_KV_LAYOUT_BYTES = 128;
export const LS_KV_DIGEST_BYTES = 32;
export const LS_KV_MAX_KEY_BYTES = 64;
export const LS_KV_EVENT_WORDS = 9;

export const ls_status = {
  LS_OK: 0,
  LS_INVALID: -1,
  LS_NO_MEMORY: -2,
  LS_IO: -3,
  LS_NO_PAGES: -4,
  LS_NO_SLOTS: -5,
  LS_UNSUPPORTED: -6,
  LS_STATE: -7,
  LS_INTERNAL: -8,
  LS_LAYOUT: -9,
} as const;

export const ls_dtype = {
  LS_DTYPE_F32: 0,
  LS_DTYPE_F16: 1,
  LS_DTYPE_BF16: 2,
  LS_DTYPE_Q8_0: 3,
  LS_DTYPE_Q4_0: 4,
  LS_DTYPE_Q4_1: 5,
} as const;

export const ls_kv_dtype = {
  LS_KV_F32: 0,
  LS_KV_BF16: 2,
  LS_KV_E4M3: 6,
  LS_KV_E5M2: 7,
} as const;

export const ls_rope_style = {
  LS_ROPE_HALF: 0,
  LS_ROPE_INTERLEAVED: 1,
} as const;

export const ls_role = {
  LS_ROLE_EMBEDDING: 1,
  LS_ROLE_FINAL_NORM: 2,
  LS_ROLE_LM_HEAD: 3,
  LS_ROLE_ATTN_NORM: 16,
  LS_ROLE_Q: 17,
  LS_ROLE_K: 18,
  LS_ROLE_V: 19,
  LS_ROLE_O: 20,
  LS_ROLE_Q_BIAS: 21,
  LS_ROLE_K_BIAS: 22,
  LS_ROLE_V_BIAS: 23,
  LS_ROLE_O_BIAS: 24,
  LS_ROLE_Q_NORM: 25,
  LS_ROLE_K_NORM: 26,
  LS_ROLE_FFN_NORM: 27,
  LS_ROLE_GATE: 28,
  LS_ROLE_UP: 29,
  LS_ROLE_DOWN: 30,
} as const;

export const ls_event = {
  LS_EVENT_STORED: 1,
  LS_EVENT_REMOVED: 2,
  LS_EVENT_CLEARED: 3,
} as const;

export const ls_kv_end = {
  LS_KV_DONE: 0,
  LS_KV_REFUSED: 1,
  LS_KV_UNKNOWN: 2,
  LS_KV_USED: 3,
  LS_KV_EXPIRED: 4,
  LS_KV_DROPPED: 5,
  LS_KV_RESET: 6,
  LS_KV_TIMEOUT: 7,
  LS_KV_CORRUPT: 8,
  LS_KV_NO_ROUTE: 9,
  LS_KV_AUTH: 10,
} as const;

export const ls_config = {
  size: 96,
  fields: {
    struct_size: { offset: 0, type: "u32" },
    hidden: { offset: 4, type: "u32" },
    layers: { offset: 8, type: "u32" },
    heads: { offset: 12, type: "u32" },
    kv_heads: { offset: 16, type: "u32" },
    head_dim: { offset: 20, type: "u32" },
    intermediate: { offset: 24, type: "u32" },
    vocab: { offset: 28, type: "u32" },
    rope_style: { offset: 32, type: "u32" },
    qkv_bias: { offset: 36, type: "u32" },
    o_bias: { offset: 40, type: "u32" },
    qk_norm: { offset: 44, type: "u32" },
    tied_embeddings: { offset: 48, type: "u32" },
    max_context: { offset: 52, type: "u32" },
    max_seqs: { offset: 56, type: "u32" },
    max_batch_tokens: { offset: 60, type: "u32" },
    kv_dtype: { offset: 64, type: "u32" },
    prefix_cache: { offset: 68, type: "u32" },
    threads: { offset: 72, type: "u32" },
    device_index: { offset: 76, type: "u32" },
    ranks: { offset: 80, type: "u32" },
    rms_eps: { offset: 84, type: "f32" },
    attn_scale: { offset: 88, type: "f32" },
    rope_scale: { offset: 92, type: "f32" },
  },
} as const;

export const ls_pool_stats_t = {
  size: 32,
  fields: {
    struct_size: { offset: 0, type: "u32" },
    total: { offset: 4, type: "u32" },
    free: { offset: 8, type: "u32" },
    cached: { offset: 12, type: "u32" },
    held: { offset: 16, type: "u32" },
    open_seqs: { offset: 20, type: "u32" },
    evictions_lo: { offset: 24, type: "u32" },
    evictions_hi: { offset: 28, type: "u32" },
  },
} as const;

export const ls_memory_t = {
  size: 64,
  fields: {
    struct_size: { offset: 0, type: "u32" },
    known: { offset: 4, type: "u32" },
    total_lo: { offset: 8, type: "u32" },
    total_hi: { offset: 12, type: "u32" },
    used_before_lo: { offset: 16, type: "u32" },
    used_before_hi: { offset: 20, type: "u32" },
    weights_lo: { offset: 24, type: "u32" },
    weights_hi: { offset: 28, type: "u32" },
    workspace_lo: { offset: 32, type: "u32" },
    workspace_hi: { offset: 36, type: "u32" },
    graphs_lo: { offset: 40, type: "u32" },
    graphs_hi: { offset: 44, type: "u32" },
    free_lo: { offset: 48, type: "u32" },
    free_hi: { offset: 52, type: "u32" },
    page_bytes_lo: { offset: 56, type: "u32" },
    page_bytes_hi: { offset: 60, type: "u32" },
  },
} as const;

export const ls_kv_config = {
  size: 36,
  fields: {
    struct_size: { offset: 0, type: "u32" },
    hold_ms: { offset: 4, type: "u32" },
    connection_ms: { offset: 8, type: "u32" },
    request_ms: { offset: 12, type: "u32" },
    connect_ms: { offset: 16, type: "u32" },
    idle_ms: { offset: 20, type: "u32" },
    max_connections: { offset: 24, type: "u32" },
    ranks: { offset: 28, type: "u32" },
    key_bytes: { offset: 32, type: "u32" },
  },
} as const;

export const ls_kv_stats_t = {
  size: 56,
  fields: {
    struct_size: { offset: 0, type: "u32" },
    staged: { offset: 4, type: "u32" },
    staged_bytes_lo: { offset: 8, type: "u32" },
    staged_bytes_hi: { offset: 12, type: "u32" },
    filling: { offset: 16, type: "u32" },
    filling_bytes_lo: { offset: 20, type: "u32" },
    filling_bytes_hi: { offset: 24, type: "u32" },
    connections: { offset: 28, type: "u32" },
    turned_away: { offset: 32, type: "u32" },
    pulls: { offset: 36, type: "u32" },
    stage_layers: { offset: 40, type: "u32" },
    stage_layers_early: { offset: 44, type: "u32" },
    stage_wait_micros_lo: { offset: 48, type: "u32" },
    stage_wait_micros_hi: { offset: 52, type: "u32" },
  },
} as const;

export const ls_kv_source = {
  size: 20,
  fields: {
    struct_size: { offset: 0, type: "u32" },
    port: { offset: 4, type: "u32" },
    id_lo: { offset: 8, type: "u32" },
    id_hi: { offset: 12, type: "u32" },
    layout_bytes: { offset: 16, type: "u32" },
  },
} as const;

/** Argument and return types as bun:ffi names them. */
export const symbols = {
  ls_abi_version: { args: [], returns: "u32" },
  ls_last_error: { args: ["ptr", "u32"], returns: "i32" },
  ls_device_info: { args: ["ptr", "u32"], returns: "i32" },
  ls_engine_create: { args: ["ptr", "ptr", "ptr"], returns: "i32" },
  ls_engine_destroy: { args: ["ptr"], returns: "void" },
  ls_weights_map: { args: ["ptr", "ptr", "u64"], returns: "i32" },
  ls_weights_set: { args: ["ptr", "u32", "u32", "u64", "u64", "u32", "u32", "u32"], returns: "i32" },
  ls_kv_scales: { args: ["ptr", "ptr", "u32"], returns: "i32" },
  ls_weights_finish: { args: ["ptr"], returns: "i32" },
  ls_load_progress: { args: ["ptr"], returns: "i32" },
  ls_memory: { args: ["ptr", "ptr"], returns: "i32" },
  ls_pool_create: { args: ["ptr", "u32"], returns: "i32" },
  ls_pool_stats: { args: ["ptr", "ptr"], returns: "i32" },
  ls_pool_check: { args: ["ptr"], returns: "i32" },
  ls_seq_open: { args: ["ptr", "ptr", "u32", "u32", "u32", "ptr"], returns: "i32" },
  ls_seq_close: { args: ["ptr", "i32", "u32"], returns: "i32" },
  ls_step_submit: { args: ["ptr", "ptr", "u32"], returns: "i32" },
  ls_step_wait: { args: ["ptr", "ptr", "u32"], returns: "i32" },
  ls_cache_clear: { args: ["ptr"], returns: "i32" },
  ls_events_drain: { args: ["ptr", "ptr", "u32"], returns: "i32" },
  ls_kv_start: { args: ["ptr", "ptr", "ptr", "ptr", "ptr"], returns: "i32" },
  ls_kv_layout: { args: ["ptr", "ptr"], returns: "i32" },
  ls_kv_stats: { args: ["ptr", "ptr"], returns: "i32" },
  ls_kv_stage: { args: ["ptr", "i32", "u32"], returns: "i32" },
  ls_kv_publish: { args: ["ptr", "i32", "ptr"], returns: "i32" },
  ls_kv_release: { args: ["ptr", "u32", "u32"], returns: "i32" },
  ls_seq_open_pull: { args: ["ptr", "ptr", "u32", "u32", "u32", "ptr", "ptr", "ptr", "ptr"], returns: "i32" },
  ls_kv_drop: { args: ["ptr", "ptr", "u32", "u32", "u32"], returns: "i32" },
  ls_kv_events: { args: ["ptr", "ptr", "u32"], returns: "i32" },
} as const;
