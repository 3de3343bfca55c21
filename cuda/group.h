// The devices of one engine, rank 0 first, each with a thread that launches its work. The engine thread packs a step, hands it to all of them,
// and waits for the first: all ranks do the same work and choose the same tokens.
#pragma once
#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "rank.h"

namespace ls::cuda {

// Runs what it is given, in order, with one device in use.
class DeviceThread {
 public:
  explicit DeviceThread(int device);
  ~DeviceThread();
  DeviceThread(const DeviceThread &) = delete;
  DeviceThread &operator=(const DeviceThread &) = delete;

  // The first failure is kept, and what comes after it is not run.
  void post(std::function<Status()> work);
  // Number of what has been posted; wait(n) returns when the first n have run, with the first failure among all that ran.
  uint64_t posted() const { return posted_; }
  Status wait(uint64_t count);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<Status()>> queue_;
  uint64_t posted_ = 0, run_ = 0;
  bool stop_ = false;
  Status failure_;
  std::thread thread_;
  void run(int device);
};

class Group {
 public:
  static Status create(const ls_config &config, const float *inv_freq, std::unique_ptr<Group> &out);
  ~Group();

  uint32_t ranks() const { return static_cast<uint32_t>(ranks_.size()); }
  Rank &rank(uint32_t index) { return *ranks_[index]; }
  // Calls fn(rank) on every rank's thread and waits for all. The first failure by rank.
  Status on_all(const std::function<Status(Rank &)> &fn);
  Status load(std::atomic<int32_t> &permille);
  Status create_pool(uint32_t pages);

  // A step whose plan is in plan_buffer(slot); its results are in results(slot) once wait() has returned.
  int32_t *plan_buffer(uint32_t slot) { return plans_[slot].as<int32_t>(); }
  const SampleResult *results(uint32_t slot) const { return results_[slot].as<SampleResult>(); }
  void launch(const StepShape &shape, uint32_t slot, bool layer_events);
  // stored: called for each layer once it is stored on every rank; may be empty.
  Status wait(uint32_t slot, const std::function<void(uint32_t)> &stored);

  // The shards of one page, one after the other, are what other engines exchange.
  size_t page_bytes() const { return page_bytes_; }
  const PlanLimits &limits() const { return limits_; }
  uint32_t layers() const { return config_.layers; }

 private:
  explicit Group(const ls_config &config) : config_(config), limits_(config) {}
  // How the ranks add their parts, by LAYERSCALE_ALL_REDUCE and by what the GPUs can.
  Status connect(const std::vector<int> &devices);
  // on_all() for work in which ranks wait for each other's sums.
  Status together(const std::function<Status(Rank &)> &fn);
  const ls_config config_;
  const PlanLimits limits_;
  size_t page_bytes_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::unique_ptr<NcclGroup> nccl_;  // null: peer memory, or one rank
  std::vector<std::unique_ptr<DeviceThread>> threads_;
  std::array<HostMemory, kStepsInFlight> plans_, results_;
  std::array<std::vector<uint64_t>, kStepsInFlight> tickets_;  // by rank: what has to have run before its events mean this step
  Status wait_ranks(uint32_t slot, const std::function<void(uint32_t)> &stored);
};

}  // namespace ls::cuda
