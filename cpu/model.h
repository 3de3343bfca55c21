// Weights by role and the forward pass of the Llama family (Llama, Qwen2 with qkv bias, Qwen3 with q/k norm).
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "kv_memory.h"
#include "linear.h"
#include "ops.h"
#include "thread_pool.h"

namespace ls::cpu {

// Where the time of forward passes went, in nanoseconds; kept only while a profile is set.
struct Profile {
  enum Op { embed, norm, qkv, rope_kv, attention, out_proj, gate_up, silu, down, head, kCount };
  static constexpr const char *kNames[kCount] = {"embed", "norm", "qkv", "rope+kv", "attention", "o", "gate,up", "silu", "down", "head"};
  std::array<uint64_t, kCount> ns{};
  bool cpu_time = false;  // time of the calling thread instead of wall time: for measurements on a busy machine, with one thread
};

class Model {
 public:
  // inv_freq: head_dim/2 values, copied.
  Model(const ls_config &config, const float *inv_freq, const OpsKernels &ops, const AttentionKernels &attention);

  // Keeps the view; shapes were checked by the caller. LS_INVALID for an unknown id.
  Status set(uint32_t id, const TensorView &view);
  // Prepares every matrix for the active ISA. LS_INVALID naming the first missing tensor.
  Status finish(ThreadPool &pool, std::atomic<int32_t> &permille);

  // Writes K and V of every token of the batch and returns the final-norm hidden state of the last token of each sampling row, in row order:
  // (sampling rows, hidden), valid until the next call. Null when no row samples. Page ids and token ids are in range.
  const float *forward(ThreadPool &pool, const StepBatch &batch, const KvMemory &memory);
  // logits (count, vocab) of hidden states (count, hidden).
  void head(ThreadPool &pool, const float *hidden, uint32_t count, float *logits);

  void set_profile(Profile *profile) { profile_ = profile; }

 private:
  struct Layer {
    std::vector<float> attn_norm, ffn_norm, q_norm, k_norm, q_bias, k_bias, v_bias, o_bias;
    LinearPtr q, k, v, o, gate, up, down;
  };
  // Consecutive tokens of one sequence inside one page: the unit of K/V stores, so that one thread owns a page.
  struct Span {
    uint32_t row, count, page, slot;  // row of the batch's token matrix, tokens, page id, first place in the page
  };
  class Timer;

  void plan(ThreadPool &pool, const StepBatch &batch);
  void embed(ThreadPool &pool, const StepBatch &batch);
  void norm(ThreadPool &pool, const float *x, const float *weight, float *y, uint32_t rows);
  void rotate_and_store(ThreadPool &pool, const Layer &layer, uint32_t index, const KvMemory &memory, bool with_q);
  void rotate(const Layer &layer, float *q, uint32_t token);
  void feed_forward(ThreadPool &pool, const Layer &layer, float *x, uint32_t rows);
  void last_layer(ThreadPool &pool, const Layer &layer, const KvMemory &memory, LayerHook *hook);

  ls_config config_;
  std::vector<float> inv_freq_;
  const OpsKernels &ops_;
  std::vector<TensorView> views_;  // by tensor id until finish()
  std::vector<Layer> layers_;
  std::vector<float> final_norm_;
  LinearPtr embedding_, lm_head_;
  Profile *profile_ = nullptr;

  // Of the current step.
  uint32_t tokens_ = 0;
  std::vector<Span> spans_;
  std::vector<uint32_t> positions_;      // of each token
  std::vector<uint32_t> sampled_;        // token rows that sample
  std::vector<AttentionSequence> sequences_, sampled_sequences_;
  Attention attention_, sampled_attention_;
  Buffer<float> x_, h_, q_, k_, v_, mixed_, gate_, up_, cos_, sin_, sampled_x_;
};

}  // namespace ls::cpu
