// What tiny random models of the Llama family consist of, for tests of every device. Options has heads, kv_heads, head_dim, hidden, layers,
// intermediate, vocab, qkv_bias, o_bias, qk_norm and tied.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "layerscale.h"

namespace ls::test {

// add(tensor id, rows, cols, scale, offset) for every tensor, in one order: values are to be normal * scale + offset. qk_scale: of q and k.
template <class Options, class Add>
void tiny_weights(const Options &o, float qk_scale, Add &&add) {
  const uint32_t q = o.heads * o.head_dim, kv = o.kv_heads * o.head_dim;
  add(LS_ROLE_EMBEDDING, o.vocab, o.hidden, 0.4f, 0.0f);
  add(LS_ROLE_FINAL_NORM, 1, o.hidden, 0.2f, 1.0f);
  if (!o.tied) add(LS_ROLE_LM_HEAD, o.vocab, o.hidden, 0.3f, 0.0f);
  for (uint32_t l = 0; l < o.layers; ++l) {
    const uint32_t b = l * 256;
    add(b + LS_ROLE_ATTN_NORM, 1, o.hidden, 0.2f, 1.0f);
    add(b + LS_ROLE_FFN_NORM, 1, o.hidden, 0.2f, 1.0f);
    add(b + LS_ROLE_Q, q, o.hidden, qk_scale, 0.0f);
    add(b + LS_ROLE_K, kv, o.hidden, qk_scale, 0.0f);
    add(b + LS_ROLE_V, kv, o.hidden, 0.25f, 0.0f);
    add(b + LS_ROLE_O, o.hidden, q, 0.1f, 0.0f);
    add(b + LS_ROLE_GATE, o.intermediate, o.hidden, 0.2f, 0.0f);
    add(b + LS_ROLE_UP, o.intermediate, o.hidden, 0.2f, 0.0f);
    add(b + LS_ROLE_DOWN, o.hidden, o.intermediate, 0.1f, 0.0f);
    if (o.qkv_bias) add(b + LS_ROLE_Q_BIAS, 1, q, 0.5f, 0.0f), add(b + LS_ROLE_K_BIAS, 1, kv, 0.5f, 0.0f), add(b + LS_ROLE_V_BIAS, 1, kv, 0.5f, 0.0f);
    if (o.o_bias) add(b + LS_ROLE_O_BIAS, 1, o.hidden, 0.3f, 0.0f);
    if (o.qk_norm) add(b + LS_ROLE_Q_NORM, 1, o.head_dim, 0.2f, 1.0f), add(b + LS_ROLE_K_NORM, 1, o.head_dim, 0.2f, 1.0f);
  }
}

// The shapes of such a model; limits and types of the KV cache are the caller's.
template <class Options>
ls_config tiny_config(const Options &o) {
  ls_config c{};
  c.struct_size = sizeof c;
  c.hidden = o.hidden, c.layers = o.layers, c.heads = o.heads, c.kv_heads = o.kv_heads, c.head_dim = o.head_dim, c.intermediate = o.intermediate, c.vocab = o.vocab;
  c.qkv_bias = o.qkv_bias, c.o_bias = o.o_bias, c.qk_norm = o.qk_norm, c.tied_embeddings = o.tied, c.threads = 2;
  c.rms_eps = 1e-5f, c.attn_scale = 1.0f / std::sqrt(static_cast<float>(o.head_dim)), c.rope_scale = 1.25f;
  return c;
}

// Frequencies of a base of 100: angles that matter within the few positions of a test.
inline std::vector<float> tiny_inv_freq(uint32_t head_dim) {
  std::vector<float> all;
  for (uint32_t i = 0; i < head_dim / 2; ++i) all.push_back(std::pow(100.0f, -2.0f * static_cast<float>(i) / static_cast<float>(head_dim)));
  return all;
}

}  // namespace ls::test
