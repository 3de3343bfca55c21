/* layerscale_transfer.h: the part of the ABI that moves KV between engines, included by layerscale.h only (its rules hold here, too).
 *
 * A prefill worker stages the KV of a prompt in host memory, a decode worker pulls it over TCP. docs/kv-transfer.md.
 * Calls come from the engine thread. Nothing here blocks on the network; what happens there is polled by ls_kv_events.
 */
#ifndef LS_TRANSFER_H
#define LS_TRANSFER_H
#ifndef LAYERSCALE_H
#error "include layerscale.h instead"
#endif
#define LS_KV_LAYOUT_BYTES 128
#define LS_KV_DIGEST_BYTES 32
#define LS_KV_MAX_KEY_BYTES 64

/* 0 in a field of milliseconds or a count = its default. */
typedef struct ls_kv_config {
  uint32_t struct_size;
  uint32_t hold_ms;         /* sender: a copy that nobody fetches is kept this long; 60000 */
  uint32_t connection_ms;   /* both sides: longest life of a connection; 60000 */
  uint32_t request_ms;      /* sender: until a request is complete; 10000 */
  uint32_t connect_ms;      /* receiver: until the connection stands; 5000 */
  uint32_t idle_ms;         /* receiver: without a byte; 10000 */
  uint32_t max_connections; /* sender; 256 */
  uint32_t ranks;           /* tensor-parallel ranks, part of the layout; 1 */
  uint32_t key_bytes;       /* pre-shared key: 16..LS_KV_MAX_KEY_BYTES; 0 = transfers are neither authenticated nor encrypted */
} ls_kv_config;

typedef struct ls_kv_stats_t {
  uint32_t struct_size;
  uint32_t staged;          /* published copies: waiting or being sent */
  uint32_t staged_bytes_lo; /* their host memory */
  uint32_t staged_bytes_hi;
  uint32_t filling;         /* copies of prompts that are being computed */
  uint32_t filling_bytes_lo;
  uint32_t filling_bytes_hi;
  uint32_t connections;     /* open at the listener */
  uint32_t turned_away;     /* connections closed to make room, since start */
  uint32_t pulls;           /* under way */
  uint32_t stage_layers;    /* layers staged by steps since start, and of these */
  uint32_t stage_layers_early; /* how many while later layers were computed */
  uint32_t stage_wait_micros_lo; /* time that steps took longer for the rest */
  uint32_t stage_wait_micros_hi;
} ls_kv_stats_t;

/* How a transfer ended. */
typedef enum ls_kv_end {
  LS_KV_DONE = 0,
  LS_KV_REFUSED = 1,  /* layout or prompt differ; the text names the field and both values */
  LS_KV_UNKNOWN = 2,  /* no such id */
  LS_KV_USED = 3,     /* the id served a transfer before */
  LS_KV_EXPIRED = 4,  /* older than hold_ms */
  LS_KV_DROPPED = 5,  /* at the wish of the receiver, or by ls_kv_release */
  LS_KV_RESET = 6,    /* the other side closed the connection or stopped */
  LS_KV_TIMEOUT = 7,  /* too slow or silent */
  LS_KV_CORRUPT = 8,  /* a checksum or the protocol is broken */
  LS_KV_NO_ROUTE = 9, /* no connection */
  LS_KV_AUTH = 10     /* one side has no key or another one */
} ls_kv_end;

/* Once, after ls_pool_create. model_digest: LS_KV_DIGEST_BYTES, of the model's configuration; with the scales of an fp8 cache (ls_kv_scales),
 * which the library digests itself, it is part of the layout that two engines must share. key: config->key_bytes. host: numeric address to
 * listen on, on a port the system picks; NULL = no listener, this engine only pulls. Returns the port, 0 without a listener.
 * LS_UNSUPPORTED when the device cannot move its KV. */
LS_API int32_t ls_kv_start(ls_engine *engine, const ls_kv_config *config, const uint8_t *model_digest, const uint8_t *key, const char *host);
/* Writes this engine's layout, LS_KV_LAYOUT_BYTES, for ls_seq_open_pull of another engine. */
LS_API int32_t ls_kv_layout(ls_engine *engine, uint8_t *out);
/* any thread */
LS_API int32_t ls_kv_stats(ls_engine *engine, ls_kv_stats_t *out);

/* Stages positions [0, tokens) of an open sequence: host memory is reserved now, steps submitted from now on copy each layer while the next
 * one is computed. LS_NO_MEMORY leaves all as it was. Closing the sequence unpublished frees the copy. */
LS_API int32_t ls_kv_stage(ls_engine *engine, int32_t slot, uint32_t tokens);
/* Once these positions are computed (LS_STATE before): copies what no step has copied and offers the copy under a random id.
 * out: [id_lo, id_hi]. The sequence may be closed at once. */
LS_API int32_t ls_kv_publish(ls_engine *engine, int32_t slot, uint32_t *out);
/* Frees a published copy, also while it is being sent. LS_INVALID when there is none under the id. */
LS_API int32_t ls_kv_release(ls_engine *engine, uint32_t id_lo, uint32_t id_hi);

/* Where a staged copy is: host a numeric address, layout that of the sender. */
typedef struct ls_kv_source {
  uint32_t struct_size;
  uint32_t port;
  uint32_t id_lo;
  uint32_t id_hi;
  uint32_t layout_bytes;
} ls_kv_source;
/* As ls_seq_open, with positions [0, count-1) from the cached prefix and from a staged copy of these. out: [slot, cached_tokens, start, pages
 * to pull]. start is count-1, since the last token is computed here. With 0 pages nothing is pulled: all is known (drop the copy).
 * Otherwise rows of the slot are refused until ls_kv_events tells that the pull is done; on any other end the sequence can only be closed.
 * LS_LAYOUT, LS_INVALID, LS_NO_SLOTS, LS_NO_PAGES: nothing was opened, and the sender was not told (ls_kv_drop). */
LS_API int32_t ls_seq_open_pull(ls_engine *engine, const int32_t *tokens, uint32_t count, uint32_t domain_lo, uint32_t domain_hi, const ls_kv_source *source, const char *host, const uint8_t *layout, int32_t *out);
/* Tells a sender, in the background and within the bounds of a connection, to drop a copy. Closing a sequence whose pull is not done and a
 * pull that fails do so themselves. */
LS_API int32_t ls_kv_drop(ls_engine *engine, const char *host, uint32_t port, uint32_t id_lo, uint32_t id_hi);
/* Takes ends of transfers, oldest first, whole events only; returns the words written (0 = none).
 *   [words, slot of the pull | -1: a staged copy, ls_kv_end, id_lo, id_hi, bytes_lo, bytes_hi, micros, text bytes, text in UTF-8 padded with zeros]
 *   micros: since the pull began, or since the copy was published. Each pull of an open sequence and each published copy ends once. */
#define LS_KV_EVENT_WORDS 9
LS_API int32_t ls_kv_events(ls_engine *engine, int32_t *words, uint32_t capacity);
#endif
