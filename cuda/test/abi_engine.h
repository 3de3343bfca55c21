// Engines of two libraries through the ABI, with tiny random models: the CUDA device, which is linked into the test over the simulator, and
// the CPU device, which is loaded from the build folder.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "layerscale.h"

namespace ls::test {

using Tokens = std::vector<int32_t>;

// The calls of one library.
struct Api {
  decltype(&ls_last_error) last_error;
  decltype(&ls_engine_create) engine_create;
  decltype(&ls_engine_destroy) engine_destroy;
  decltype(&ls_weights_map) weights_map;
  decltype(&ls_weights_set) weights_set;
  decltype(&ls_kv_scales) kv_scales;
  decltype(&ls_weights_finish) weights_finish;
  decltype(&ls_memory) memory;
  decltype(&ls_pool_create) pool_create;
  decltype(&ls_pool_check) pool_check;
  decltype(&ls_seq_open) seq_open;
  decltype(&ls_seq_close) seq_close;
  decltype(&ls_step_submit) step_submit;
  decltype(&ls_step_wait) step_wait;
};
const Api &cuda_api();
const Api &cpu_api();

struct TinyOptions {
  uint32_t heads = 6, kv_heads = 2, head_dim = 16, hidden = 48, layers = 3, intermediate = 80, vocab = 300;
  bool qkv_bias = false, o_bias = false, qk_norm = false, tied = true, interleaved = false;
  uint32_t weights = LS_DTYPE_BF16;  // LS_DTYPE_F32, F16, BF16, Q8_0, Q4_0 or Q4_1 of matrices; vectors are f32
  uint32_t max_context = 512, max_seqs = 8, max_batch_tokens = 256;
  // By layer, empty = 1: K and V are so many times larger, q and o so many times smaller. The model says the same, whatever they are.
  std::vector<float> k_gain = {}, v_gain = {};
};

// Weights in a file of their own.
class TinyModel {
 public:
  explicit TinyModel(const TinyOptions &options, uint64_t seed = 1);
  ~TinyModel();
  TinyModel(const TinyModel &) = delete;
  TinyModel &operator=(const TinyModel &) = delete;
  ls_config config(uint32_t kv_dtype, uint32_t ranks = 1) const;

  struct Tensor {
    uint32_t id, dtype, rows, cols;
    uint64_t offset, bytes;
  };
  std::vector<Tensor> tensors;
  std::vector<float> inv_freq;
  std::string path;
  uint64_t bytes = 0;
  TinyOptions options;
};

struct Row {
  int32_t slot = 0;
  uint32_t start = 0;
  Tokens tokens;
  bool sample = true;
  uint32_t n_logprobs = 0;
  float temperature = 0, top_p = 1;
  uint64_t seed = 0;
};
struct Sampled {
  int32_t token = -1;
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;
};

// An engine that is ready to serve; kv_scales: {k, v} of each layer, empty = not set. Everything that fails throws with the library's text.
class AbiEngine {
 public:
  AbiEngine(const Api &api, const TinyModel &model, uint32_t kv_dtype, uint32_t pages = 64, uint32_t ranks = 1, const std::vector<float> &kv_scales = {});
  ~AbiEngine();
  AbiEngine(const AbiEngine &) = delete;
  AbiEngine &operator=(const AbiEngine &) = delete;

  struct Opened {
    int32_t slot;
    uint32_t cached, start;
  };
  Opened open(const Tokens &tokens);
  void close(int32_t slot, uint32_t commit = 0);
  void submit(const std::vector<Row> &rows);
  std::vector<Sampled> wait();
  std::vector<Sampled> step(const std::vector<Row> &rows) {
    submit(rows);
    return wait();
  }
  // The whole sequence in chunks, the last token samples.
  Sampled prompt(int32_t slot, const Tokens &tokens, uint32_t start, uint32_t chunk, const Row &sampling);
  void check();
  ls_engine *handle() const { return engine_; }

 private:
  const Api &api_;
  ls_engine *engine_ = nullptr;
  std::vector<int32_t> result_;
  int32_t call(int32_t code, const char *what) const;
};

Tokens random_tokens(uint32_t count, uint32_t vocab, uint64_t seed);
// Text of the last failure on this thread.
std::string last_error(const Api &api);

}  // namespace ls::test
