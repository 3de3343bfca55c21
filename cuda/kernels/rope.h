// Rotary position embedding: angles once a step, then q and k of every layer with the norm per head in front and the KV write behind.
#pragma once
#include <cstdint>

#include "../../native/layerscale.h"
#include "../runtime.h"
#include "element.h"
#include "kv_layout.h"

namespace ls::cuda {

// table[t][i] = {cos, sin} of the angle positions[t] * inv_freq[i] (rounded to f32, as the reference has it), times rope_scale.
//   positions (tokens)   inv_freq (head_dim / 2)   table (tokens, head_dim / 2, 2) f32
void rope_table(Stream stream, const int32_t *positions, const float *inv_freq, uint32_t tokens, uint32_t head_dim, float rope_scale, float *table);

// One token after the other: q = rope(norm(q)) into a matrix of its own, k = rope(norm(k)) and v into the pages.
struct QkvPrepare {
  const void *q = nullptr, *k = nullptr, *v = nullptr;  // rows of heads * head_dim and kv_heads * head_dim elements, q_ld and kv_ld elements apart;
  uint32_t q_ld = 0, kv_ld = 0;                         // parts of one fused matrix or matrices of their own. q null: K and V only
  Element type = Element::bf16;
  void *q_out = nullptr;                                // (tokens, heads * head_dim) bf16; may be q when that is such a matrix
  const float *q_norm = nullptr, *k_norm = nullptr;     // (head_dim) or null: no norm per head
  float eps = 0;
  const float *table = nullptr;                         // of rope_table
  ls_rope_style style = LS_ROPE_HALF;
  const int32_t *places = nullptr;                      // (tokens) page * 16 + place in the page; below 0: k and v are not stored
  void *pages = nullptr;                                // of this layer, page p at p * layout.page_bytes(). k null: q only
  KvLayout layout;
  KvScales scales;
  const int32_t *index = nullptr;                       // (tokens) or null: row of `table` for token t
  uint32_t tokens = 0, heads = 0;
};
void qkv_prepare(Stream stream, const QkvPrepare &args);

}  // namespace ls::cuda
