// What a device must do. The host core (engine.cpp, page_pool, prefix_cache) owns slots, pages and plans; a Backend owns weights, KV memory and arithmetic.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "layerscale.h"

namespace ls {

// Result of a fallible call: LS_OK or a negative ls_status with its text.
struct Status {
  int32_t code = LS_OK;
  std::string text;
  bool ok() const { return code == LS_OK; }
  static Status good() { return {}; }
  static Status fail(int32_t code, std::string text) { return {code, std::move(text)}; }
};

// Bytes of one tensor inside a mapped file; they outlive the engine's backend. (rows, cols) row-major, quantised blocks run along cols.
struct TensorView {
  const uint8_t *data = nullptr;
  uint64_t bytes = 0;
  ls_dtype dtype = LS_DTYPE_F32;
  uint32_t rows = 0, cols = 0;
};

// One sequence in a step. tokens: len ids (never -1 here: the core resolved carries). pages: page ids covering [0, start+len).
struct StepRow {
  int32_t slot = 0;
  uint32_t start = 0, len = 0;
  const int32_t *tokens = nullptr;
  const int32_t *pages = nullptr;
  uint32_t page_count = 0;
  bool sample = false;
  uint32_t n_logprobs = 0;
  float temperature = 0, top_p = 1;
  uint64_t seed = 0;
};

// KV of a whole page, over all layers.
struct PageCopy {
  int32_t from = 0, to = 0;
};

// Told by a device while it runs a step, on the thread that runs it: K and V of `layer` are in place for every row. Layers come in order.
class LayerHook {
 public:
  virtual ~LayerHook() = default;
  virtual void layer_stored(uint32_t layer) = 0;
};

// How a device keeps one layer of one page, as bytes that another engine of the same format can take over.
struct KvFormat {
  uint64_t page_bytes = 0;  // 0 = KV of this device cannot be moved
  uint32_t id = 0;          // arrangement of the elements, including their dtype
};

struct StepBatch {
  uint32_t step = 0;
  uint32_t tokens = 0;  // sum of len
  LayerHook *hook = nullptr;  // null: nobody wants to know
  std::vector<PageCopy> copies;  // done in this order, before any row
  std::vector<StepRow> rows;
};

struct RowOutput {
  int32_t token = -1;  // -1 when not sampled
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;  // n_logprobs entries, falling
};

struct StepOutput {
  std::vector<RowOutput> rows;  // same order as the batch
};

class Backend {
 public:
  virtual ~Backend() = default;
  // id as in ls_role; shape, dtype and range are already checked against the config by the core.
  virtual Status set_tensor(uint32_t id, const TensorView &view) = 0;
  // All tensors are set. Repacks; permille goes 0..1000.
  virtual Status finish_weights(std::atomic<int32_t> &permille) = 0;
  // Reserves KV memory; touched lazily so that a large pool costs nothing until used.
  virtual Status create_pool(uint32_t pages) = 0;
  virtual KvFormat kv_format() const { return {}; }
  // Host memory of one layer of one page, page_bytes of it, once the pool exists. From any thread: transfers write pages that no submitted
  // step uses, and stage pages after their layer_stored().
  virtual uint8_t *kv_page(uint32_t layer, int32_t page) {
    (void)layer, (void)page;
    return nullptr;
  }
  // Runs the forward pass and samples. Called by the engine thread only; blocks.
  virtual Status run(const StepBatch &batch, StepOutput &out) = 0;
};

// Implemented once per device library.
Status make_backend(const ls_config &config, const float *inv_freq, std::unique_ptr<Backend> &out);
Status device_info_json(std::string &json);

}  // namespace ls
