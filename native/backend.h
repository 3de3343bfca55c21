// What a device must do. The host core (engine.cpp, page_pool, prefix_cache) owns slots, pages and plans; a Backend owns weights, KV memory and arithmetic.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
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

// One sequence in a step. tokens: len ids; the first is -1 where the device must know it (carry_row). pages: page ids covering [0, start+len).
struct StepRow {
  int32_t slot = 0;
  uint32_t start = 0, len = 0;
  const int32_t *tokens = nullptr;
  int32_t carry_row = -1;  // >= 0 on a device that queues steps: the first token is what this row of the step before samples
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

// Told by a device while it runs a step, on the thread that runs it or waits for it: K and V of `layer` are in place for every row. Layers come in order.
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

// Brings KV of another engine into pages of a device, page by page. Used by one thread at a time; no submitted step uses the pages.
class KvWriter {
 public:
  virtual ~KvWriter() = default;  // nothing is written any more once it is gone
  // Where one layer of page `index` of the table is put, page_bytes of it. At most kKvWriterPages different ones wait for their arrived().
  virtual uint8_t *page(uint32_t layer, uint32_t index) = 0;
  // All of it is there.
  virtual void arrived(uint32_t layer, uint32_t index) = 0;
  // Returns when all that arrived is in the pages.
  virtual Status flush() = 0;
};
constexpr uint32_t kKvWriterPages = 64;

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
  // Of an fp8 cache, {k, v} of each layer, checked by the core; before finish_weights, else all are 1.
  virtual Status set_kv_scales(const float *scales) {
    (void)scales;
    return Status::fail(LS_UNSUPPORTED, "this device has no fp8 cache");
  }
  // All tensors are set. Repacks; permille goes 0..1000.
  virtual Status finish_weights(std::atomic<int32_t> &permille) = 0;
  // After finish_weights. A device whose memory is the host's leaves it at 0.
  virtual Status memory(ls_memory_t &out) {
    (void)out;
    return Status::good();
  }
  // Reserves KV memory; touched lazily so that a large pool costs nothing until used.
  virtual Status create_pool(uint32_t pages) = 0;
  virtual KvFormat kv_format() const { return {}; }
  // KV pages once the pool exists, from any thread: transfers write pages that no submitted step uses, and stage pages after their
  // layer_stored(). A device whose pages are host memory says where one layer of a page is, page_bytes of it; others override the next two.
  virtual uint8_t *kv_page(uint32_t layer, int32_t page) {
    (void)layer, (void)page;
    return nullptr;
  }
  // Calls take(i, one layer of pages[i]) for all of them.
  virtual Status kv_read(uint32_t layer, const int32_t *pages, uint32_t count, const std::function<void(uint32_t, const uint8_t *)> &take) {
    for (uint32_t i = 0; i < count; ++i) take(i, kv_page(layer, pages[i]));
    return Status::good();
  }
  // For these pages, whose ids are copied. Null: out of memory.
  virtual std::unique_ptr<KvWriter> kv_writer(const std::vector<int32_t> &pages);

  // Runs the forward pass and samples. Called by the engine thread only; blocks.
  virtual Status run(const StepBatch &batch, StepOutput &out) = 0;
  // A device that works while its host does something else queues steps: submit() and wait() are called instead of run(), by the engine
  // thread, each step once, in order, two at most between. The batch lives until its wait() has returned; its hook, when there is one, is
  // called by wait(). What submit() queued runs to its end also when nobody waits for it.
  virtual bool queues() const { return false; }
  virtual Status submit(const StepBatch &batch) {
    (void)batch;
    return Status::good();
  }
  virtual Status wait(const StepBatch &batch, StepOutput &out) { return run(batch, out); }
};

// Implemented once per device library.
Status make_backend(const ls_config &config, const float *inv_freq, std::unique_ptr<Backend> &out);
Status device_info_json(std::string &json);

}  // namespace ls
