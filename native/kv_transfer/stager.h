// Copies the KV of a step's sequences to host memory, layer by layer, on a thread of its own while the step computes the layers after.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>

#include "backend.h"
#include "kv_transfer/staging.h"

namespace ls::kv {

// Pages [first, end) of a sequence; table: its page ids, which outlive the step.
struct StageJob {
  std::shared_ptr<Staged> staged;
  const int32_t *table = nullptr;
  uint32_t first = 0, end = 0;
};

class Stager final : public LayerHook {
 public:
  Stager(Backend &backend, uint32_t layers) : backend_(backend), layers_(layers) {}
  ~Stager() override;
  void start();

  // For one step, on the engine thread: begin, the device's layer_stored calls, finish. When finish returns, all is copied (ok) or will not
  // be (not ok), and nobody reads the pages any more. The Status is that of the device's reads.
  void begin(std::span<const StageJob> jobs);
  void layer_stored(uint32_t layer) override;
  Status finish(bool ok);
  // Copies all layers of some pages now.
  Status copy_now(const StageJob &job);

  uint32_t staged_layers() const { return staged_layers_.load(std::memory_order_relaxed); }
  uint32_t early_layers() const { return early_layers_.load(std::memory_order_relaxed); }
  uint64_t wait_micros() const { return wait_micros_.load(std::memory_order_relaxed); }

 private:
  Backend &backend_;
  const uint32_t layers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::span<const StageJob> jobs_;
  uint32_t available_ = 0, claimed_ = 0, done_ = 0;  // layers of this step: stored by the device, taken by a copier, copied
  bool finishing_ = false;  // the device is through with the step
  bool stop_ = false;
  Status failure_;  // the first of this step
  std::atomic<uint32_t> staged_layers_{0}, early_layers_{0};
  std::atomic<uint64_t> wait_micros_{0};
  std::thread thread_;
  void run();
  Status copy_layer(std::span<const StageJob> jobs, uint32_t layer);
};

}  // namespace ls::kv
