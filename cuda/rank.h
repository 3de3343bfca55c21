// One device of a group: its shard of the weights and of the KV pages, its buffers, and the forward pass of the Llama family (Llama, Qwen2 with
// qkv bias, Qwen3 with q/k norm) as launches on one stream. Calls come from one thread, which has the device in use.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "kernels/all_reduce.h"
#include "kernels/kv_layout.h"
#include "kernels/sampling.h"
#include "memory.h"
#include "nccl.h"
#include "step_plan.h"
#include "weights.h"

namespace ls::cuda {

// Bytes on one device.
struct RankMemory {
  uint64_t total = 0, free_at_start = 0;
  uint64_t weights = 0, workspace = 0, graphs = 0;
  uint64_t free_now = 0;
};

constexpr uint32_t kStepsInFlight = 2;

class Rank {
 public:
  Rank(const ls_config &config, const float *inv_freq, const PlanLimits &limits, int device, uint32_t rank, uint32_t ranks);
  ~Rank();
  Rank(const Rank &) = delete;
  Rank &operator=(const Rank &) = delete;

  int device() const { return device_; }
  Weights &weights() { return weights_; }
  const KvLayout &kv_layout() const { return layout_; }
  const RankMemory &memory() const { return memory_; }

  // {k, v} of each layer of an fp8 cache; before load().
  void set_kv_scales(const float *scales);
  // Streams and events. First.
  Status open();
  // Sums over the ranks are made by it from now on, instead of through peer memory. After open(); the difference to then is its memory here.
  Status use_nccl(NcclGroup *nccl);
  // Weights and buffers; then what graphs take is measured on a pool of one page.
  Status load(uint32_t threads, std::atomic<int32_t> &permille);
  // The exchange area of all ranks of a group, once all have loaded: pointers by rank. Null with NCCL.
  void *reduce_area() const { return reduce_area_.as<void>(); }
  Status join(const std::vector<void *> &areas);
  Status measure_graphs();
  // Graphs go before the communicator whose calls they hold. Nothing runs any more.
  void drop_graphs() {
    use_device(device_);
    graphs_.clear();
  }
  // KV memory, and the graphs of decode steps. Once.
  Status create_pool(uint32_t pages);
  const std::vector<uint32_t> &buckets() const { return buckets_; }

  // Queues a step whose plan lies in page-locked memory, which is read until the step's end. results: page-locked, for rank 0; null elsewhere.
  Status launch(const StepShape &shape, const int32_t *plan, SampleResult *results, uint32_t slot, bool layer_events);
  // Any thread, after launch() of this slot has returned: waits until K and V of a layer are stored, or the whole step is done.
  Status wait_layer(uint32_t layer) const { return event_sync(layer_events_[layer].get()); }
  Status wait_step(uint32_t slot) const { return event_sync(done_[slot].get()); }
  Status drain() { return stream_ ? stream_sync(stream_.get()) : Status::good(); }
  // 0, or 1 + the rank that this one has waited for in vain.
  int32_t silent_rank() const { return reduce_error_ ? *reduce_error_.as<volatile int32_t>() : 0; }

  // One layer of one page in device memory.
  uint8_t *page(uint32_t layer, int32_t page) const { return pool_.as<uint8_t>() + (size_t{layer} * pages_ + static_cast<size_t>(page)) * layout_.page_bytes(); }
  uint32_t pages() const { return pages_; }

 private:
  const ls_config config_;
  const PlanLimits limits_;
  const int device_;
  const uint32_t rank_, ranks_;
  const uint32_t heads_, kv_heads_, wide_;  // of this rank
  std::vector<float> inv_freq_host_;
  KvLayout layout_;
  std::vector<KvScales> scales_;  // by layer
  Weights weights_;
  RankMemory memory_;
  OwnedStream stream_;
  std::array<OwnedEvent, kStepsInFlight> done_;
  std::vector<OwnedEvent> layer_events_;

  // (tokens, …) of a step. x_, part_, table_, logits_ f32, the others bf16.
  DeviceMemory plan_, x_, h_, q_, k_, v_, mixed_, gate_, up_, act_, table_, part_, last_, logits_, results_, carry_, scratch_, partial_, inv_freq_, layers_;
  DeviceMemory reduce_area_;
  HostMemory reduce_error_;
  AllReduce group_;
  NcclGroup *nccl_ = nullptr;
  DeviceMemory pool_;
  uint32_t pages_ = 0;
  std::vector<uint32_t> buckets_;
  std::vector<OwnedGraph> graphs_;  // by bucket

  Status allocate();
  Status place_pool(uint32_t pages);
  Status capture_graphs();
  Status copy_pages(const StepShape &shape);
  Status load_kernels();
  Status forward(const StepShape &shape, bool layer_events);
  void attention(const StepShape &shape, uint32_t layer);
  Status project(const void *x, uint32_t rows, const Linear &w);
  void head(const StepShape &shape);
};

// Sizes of decode steps that get a graph, rising, up to `rows`.
std::vector<uint32_t> graph_buckets(uint32_t rows);

}  // namespace ls::cuda
