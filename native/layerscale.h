/* layerscale.h: the whole ABI between the TypeScript engine and a native device library (KV transfer: layerscale_transfer.h).
 *
 * One ABI, one library per device (liblayerscale_cpu.so, liblayerscale_cuda.so). The TypeScript symbol table, enums and
 * struct offsets (src/engine/native/abi.gen.ts) are generated from it; the check fails when they are stale.
 *
 * Rules
 *  1. Every fallible call returns LS_OK (or a count >= 0) or a negative ls_status; ls_last_error has the text, per thread.
 *  2. Handles are opaque; sequences (slots), pages and files are small ints. No struct points into caller memory after a call returns.
 *  3. Structs begin with struct_size, and ls_abi_version() is checked first.
 *  4. Hot data is int32 words, little-endian; floats are bit-cast.
 *  5. Only ls_weights_finish and ls_step_wait may block; only the engine thread calls them. ls_load_progress, ls_pool_stats and
 *     ls_kv_stats may be called from any thread.
 *  6. Page metadata changes at submit/open/close only, under one mutex; device work is FIFO, so early frees are safe. Transfer threads
 *     write only pages of a sequence opened for a pull, from the completion of the steps submitted before until its end or close.
 *  7. The library never exits the process and never writes to stdout or stderr.
 */
#ifndef LAYERSCALE_H
#define LAYERSCALE_H
#include <stdint.h>

#define LS_ABI_VERSION 5u
#define LS_PAGE_TOKENS 16   /* tokens per KV page = one Dynamo block */
#define LS_MAX_LOGPROBS 20  /* alternatives per sampled token */
#define LS_MAX_LAYERS 1024
#define LS_MAX_HEAD_DIM 512

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#define LS_API __attribute__((visibility("default")))
#else
#define LS_API
#endif

typedef enum ls_status {
  LS_OK = 0,
  LS_INVALID = -1,      /* an argument is out of range; nothing changed */
  LS_NO_MEMORY = -2,    /* host or device memory */
  LS_IO = -3,           /* a file cannot be opened, mapped, or is shorter than promised */
  LS_NO_PAGES = -4,     /* free + evictable pages do not cover the plan; nothing changed */
  LS_NO_SLOTS = -5,     /* max_seqs sequences are open */
  LS_UNSUPPORTED = -6,  /* this machine or library cannot do it (CPU below AVX2, forced ISA absent, dtype) */
  LS_STATE = -7,        /* called out of order (step before weights, wait without submit) */
  LS_INTERNAL = -8,     /* a broken invariant; the engine must be stopped */
  LS_LAYOUT = -9        /* KV of another layout: the text names the field and both values; nothing was allocated */
} ls_status;

typedef enum ls_dtype {
  LS_DTYPE_F32 = 0,
  LS_DTYPE_F16 = 1,
  LS_DTYPE_BF16 = 2,
  LS_DTYPE_Q8_0 = 3, /* 32 weights: f16 d, i8[32];           w = d*q       (34 bytes) */
  LS_DTYPE_Q4_0 = 4, /* 32 weights: f16 d, u4[32];           w = d*(q-8)   (18 bytes) low nibbles are weights 0..15 */
  LS_DTYPE_Q4_1 = 5  /* 32 weights: f16 d, f16 m, u4[32];    w = d*q + m   (20 bytes) low nibbles are weights 0..15 */
} ls_dtype;

/* Elements of the KV cache. The CPU has the first two, a GPU the last three. */
typedef enum ls_kv_dtype {
  LS_KV_F32 = 0,
  LS_KV_BF16 = 2,
  LS_KV_E4M3 = 6, /* fp8 */
  LS_KV_E5M2 = 7  /* fp8 */
} ls_kv_dtype;

/* Rotary position embedding: which two elements of a head form a pair. */
typedef enum ls_rope_style {
  LS_ROPE_HALF = 0,        /* (i, i + head_dim/2): Hugging Face layout */
  LS_ROPE_INTERLEAVED = 1  /* (2i, 2i+1): q/k rows of GGUF files of arch "llama" */
} ls_rope_style;

/* tensor id = layer * 256 + role; the three global roles use layer 0. Matrices are (rows = outputs, cols = inputs), row-major. */
typedef enum ls_role {
  LS_ROLE_EMBEDDING = 1,   /* (vocab, hidden) */
  LS_ROLE_FINAL_NORM = 2,  /* (1, hidden) */
  LS_ROLE_LM_HEAD = 3,     /* (vocab, hidden); absent when tied */
  LS_ROLE_ATTN_NORM = 16,  /* (1, hidden) */
  LS_ROLE_Q = 17,          /* (heads*head_dim, hidden) */
  LS_ROLE_K = 18,          /* (kv_heads*head_dim, hidden) */
  LS_ROLE_V = 19,          /* (kv_heads*head_dim, hidden) */
  LS_ROLE_O = 20,          /* (hidden, heads*head_dim) */
  LS_ROLE_Q_BIAS = 21,     /* (1, heads*head_dim) */
  LS_ROLE_K_BIAS = 22,     /* (1, kv_heads*head_dim) */
  LS_ROLE_V_BIAS = 23,     /* (1, kv_heads*head_dim) */
  LS_ROLE_O_BIAS = 24,     /* (1, hidden) */
  LS_ROLE_Q_NORM = 25,     /* (1, head_dim) */
  LS_ROLE_K_NORM = 26,     /* (1, head_dim) */
  LS_ROLE_FFN_NORM = 27,   /* (1, hidden) */
  LS_ROLE_GATE = 28,       /* (intermediate, hidden) */
  LS_ROLE_UP = 29,         /* (intermediate, hidden) */
  LS_ROLE_DOWN = 30        /* (hidden, intermediate) */
} ls_role;

typedef struct ls_engine ls_engine;

/* Shapes and limits, fixed for the life of an engine. All counts > 0 unless said otherwise. */
typedef struct ls_config {
  uint32_t struct_size;
  uint32_t hidden;          /* width of the residual stream */
  uint32_t layers;          /* <= LS_MAX_LAYERS */
  uint32_t heads;           /* query heads, a multiple of kv_heads */
  uint32_t kv_heads;
  uint32_t head_dim;        /* even, <= LS_MAX_HEAD_DIM */
  uint32_t intermediate;
  uint32_t vocab;
  uint32_t rope_style;      /* ls_rope_style */
  uint32_t qkv_bias;        /* 0 | 1 */
  uint32_t o_bias;          /* 0 | 1 */
  uint32_t qk_norm;         /* 0 | 1: RMSNorm over each head of q and k before rope */
  uint32_t tied_embeddings; /* 0 | 1: the head is the embedding matrix */
  uint32_t max_context;     /* tokens a sequence may hold */
  uint32_t max_seqs;        /* slots */
  uint32_t max_batch_tokens;/* tokens in one step */
  uint32_t kv_dtype;        /* ls_kv_dtype */
  uint32_t prefix_cache;    /* 0 | 1 */
  uint32_t threads;         /* compute threads; 0 = one per core this process may use */
  uint32_t device_index;    /* GPU ordinal, of the first rank; 0 on the CPU */
  uint32_t ranks;           /* tensor-parallel ranks, on this and the GPUs after it; 0 or 1 = one device */
  float rms_eps;
  float attn_scale;         /* multiplies q.k, usually head_dim^-0.5 */
  float rope_scale;         /* multiplies cos and sin, 1 unless the rope type says otherwise */
} ls_config;

/* Page accounting; free + cached + held == total always. */
typedef struct ls_pool_stats_t {
  uint32_t struct_size;
  uint32_t total;
  uint32_t free;    /* never used or given back */
  uint32_t cached;  /* in the prefix cache, held by no sequence: evictable */
  uint32_t held;    /* referenced by at least one open sequence (shared cached pages count here once) */
  uint32_t open_seqs;
  uint32_t evictions_lo; /* pages evicted since start, 64 bit in two words */
  uint32_t evictions_hi;
} ls_pool_stats_t;

LS_API uint32_t ls_abi_version(void);

/* Copies the text of the last failure on this thread, NUL-terminated, cut to capacity. Returns its full length in bytes. */
LS_API int32_t ls_last_error(char *text, uint32_t capacity);

/* JSON about library and machine: {"device":"cpu","isa":"avx2","isas":["avx2"],"threads":2,"name":"…"}; usable before any engine exists.
 * LS_UNSUPPORTED on a machine below the library's minimum or when LAYERSCALE_CPU_ISA names an ISA that is absent or unknown.
 * Returns the length. */
LS_API int32_t ls_device_info(char *json, uint32_t capacity);

/* inv_freq: head_dim/2 floats, radians per position, computed by the caller for its rope type. Copied. */
LS_API int32_t ls_engine_create(const ls_config *config, const float *inv_freq, ls_engine **out);
/* Safe with sequences open and with a step submitted but not waited for. NULL is fine. */
LS_API void ls_engine_destroy(ls_engine *engine);

/* Maps a weight file read-only and private. Returns a file index >= 0. LS_IO when it is shorter than expected_bytes. */
LS_API int32_t ls_weights_map(ls_engine *engine, const char *path, uint64_t expected_bytes);
/* Places one tensor: bytes [offset, offset+bytes) of a mapped file. Checks role, shape, dtype and range. */
LS_API int32_t ls_weights_set(ls_engine *engine, uint32_t tensor_id, uint32_t file, uint64_t offset, uint64_t bytes, uint32_t dtype, uint32_t rows, uint32_t cols);
/* Scales of an fp8 cache, {k, v} of each layer: a stored element stands for element * scale. Finite and above 0; without this call all are 1.
 * Copied; before ls_weights_finish. layers: that of the config. LS_INVALID naming layer and value, LS_UNSUPPORTED for a kv_dtype without scales. */
LS_API int32_t ls_kv_scales(ls_engine *engine, const float *scales, uint32_t layers);
/* Repacks where the device wants it; LS_INVALID naming the first missing tensor. Blocks. */
LS_API int32_t ls_weights_finish(ls_engine *engine);
/* 0..1000 of ls_weights_finish, from any thread. */
LS_API int32_t ls_load_progress(ls_engine *engine);

/* Memory of the device after ls_weights_finish, in bytes; of several devices the one that has least room for pages. */
typedef struct ls_memory_t {
  uint32_t struct_size;
  uint32_t known;          /* 0: the device's memory is the host's, and all below is 0 */
  uint32_t total_lo;
  uint32_t total_hi;
  uint32_t used_before_lo; /* by others, when the engine was created */
  uint32_t used_before_hi;
  uint32_t weights_lo;
  uint32_t weights_hi;
  uint32_t workspace_lo;   /* buffers of a step, whatever its size */
  uint32_t workspace_hi;
  uint32_t graphs_lo;      /* captured steps; taken by ls_pool_create */
  uint32_t graphs_hi;
  uint32_t free_lo;        /* now, before the graphs */
  uint32_t free_hi;
  uint32_t page_bytes_lo;  /* of one KV page over all layers, on one device */
  uint32_t page_bytes_hi;
} ls_memory_t;
LS_API int32_t ls_memory(ls_engine *engine, ls_memory_t *out);

/* Reserves the KV pool: pages of LS_PAGE_TOKENS tokens over all layers. Once per engine, after ls_weights_finish. */
LS_API int32_t ls_pool_create(ls_engine *engine, uint32_t pages);
LS_API int32_t ls_pool_stats(ls_engine *engine, ls_pool_stats_t *out);
/* Walks every structure of pool and prefix cache; LS_INTERNAL with the first broken invariant. For tests and idle checks. */
LS_API int32_t ls_pool_check(ls_engine *engine);

/* Opens a sequence and attaches the longest cached prefix of tokens, capped at the last full page boundary <= count-1.
 * domain (two words of a 64-bit id) separates caches that must not share. out: [slot, cached_tokens, start].
 * start >= cached_tokens is where computing begins: when a cached page continues the prefix with the same next tokens, that head of it
 * is copied into a page of the sequence (the one page that opening takes; none is taken when none is free or evictable). */
LS_API int32_t ls_seq_open(ls_engine *engine, const int32_t *tokens, uint32_t count, uint32_t domain_lo, uint32_t domain_hi, int32_t *out);
/* Ends a sequence: the pages of its first `commit` computed tokens enter the prefix cache (0 = none), the rest are freed. A last page
 * that is not full serves as the source of copies only: it is never attached and never told in events. commit is cut to what was computed. */
LS_API int32_t ls_seq_close(ls_engine *engine, int32_t slot, uint32_t commit);

/* Submits a step. Accepted whole or refused whole (LS_NO_PAGES, LS_INVALID): a refused plan changes nothing.
 * plan words: [rows, tokens, step, 0, 0, 0, 0, 0], then per row
 *   [slot, start, len, flags | n_logprobs << 8, temperature(f32), top_p(f32), seed_lo, seed_hi], then all token ids, row after row.
 *   start must equal the tokens computed so far for the slot; a slot appears once. Token -1 = the token this slot sampled in the step before.
 *   flags: LS_ROW_SAMPLE. At most two steps may be submitted and not yet waited for. */
#define LS_PLAN_HEADER_WORDS 8
#define LS_PLAN_ROW_WORDS 8
#define LS_ROW_SAMPLE 1u
LS_API int32_t ls_step_submit(ls_engine *engine, const int32_t *plan, uint32_t words);
/* Completes the oldest submitted step. Returns the words written:
 *   [rows, step, free, cached, held, total, micros, 0], then per row of the plan, in its order,
 *   [slot, token | -1 when not sampled, logprob(f32), n_top], then n_top pairs [token, logprob(f32)] by falling logprob.
 *   Logprobs are those of the unscaled distribution (before temperature and top_p). */
#define LS_RESULT_HEADER_WORDS 8
#define LS_RESULT_ROW_WORDS 4
LS_API int32_t ls_step_wait(ls_engine *engine, int32_t *result, uint32_t capacity);

/* Drops every evictable page (an LS_EVENT_CLEARED follows). Pages held by open sequences leave the tree and are freed on close. */
LS_API int32_t ls_cache_clear(ls_engine *engine);
/* Takes prefix-cache events, oldest first, whole events only; returns the words written (0 = none).
 *   [LS_EVENT_STORED, page, parent page | -1, domain_lo, domain_hi, 16 token ids]
 *   [LS_EVENT_REMOVED, page]   [LS_EVENT_CLEARED]
 *   A child is removed before its parent. Events are kept only while prefix_cache is on. */
typedef enum ls_event {
  LS_EVENT_STORED = 1,
  LS_EVENT_REMOVED = 2,
  LS_EVENT_CLEARED = 3
} ls_event;
LS_API int32_t ls_events_drain(ls_engine *engine, int32_t *words, uint32_t capacity);

#include "layerscale_transfer.h"

#ifdef __cplusplus
}
#endif
#endif
