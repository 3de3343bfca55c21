#include "stager.h"

#include <pthread.h>

#include <utility>

namespace ls::kv {

Stager::~Stager() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Stager::start() {
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "ls-kv-stage");
}

Status Stager::copy_layer(std::span<const StageJob> jobs, uint32_t layer) {
  for (const StageJob &job : jobs) {
    if (job.staged->abandoned.load(std::memory_order_relaxed)) continue;
    const auto take = [&](uint32_t i, const uint8_t *from) { job.staged->fill(layer, job.first + i, from); };
    if (Status status = backend_.kv_read(layer, job.table + job.first, job.end - job.first, take); !status.ok()) return status;
  }
  return Status::good();
}

Status Stager::copy_now(const StageJob &job) {
  Status status;
  for (uint32_t layer = 0; layer < layers_ && status.ok(); ++layer) status = copy_layer({&job, 1}, layer);
  return status;
}

void Stager::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || claimed_ < available_; });
    if (stop_) return;
    const uint32_t layer = claimed_++;
    const std::span<const StageJob> jobs = jobs_;
    lock.unlock();
    Status status = copy_layer(jobs, layer);
    lock.lock();
    if (!status.ok() && failure_.ok()) failure_ = std::move(status);
    if (!finishing_) ++early_layers_;
    if (++done_ == claimed_) changed_.notify_all();
  }
}

void Stager::begin(std::span<const StageJob> jobs) {
  const std::lock_guard lock(mutex_);
  jobs_ = jobs;
  available_ = claimed_ = done_ = 0;
  finishing_ = false;
  failure_ = {};
}

void Stager::layer_stored(uint32_t layer) {
  {
    const std::lock_guard lock(mutex_);
    available_ = layer + 1;
  }
  changed_.notify_all();
}

// The engine thread takes its share of what is left.
Status Stager::finish(bool ok) {
  const auto begin = Clock::now();
  std::unique_lock lock(mutex_);
  finishing_ = true;
  available_ = ok ? layers_ : claimed_;
  while (claimed_ < available_) {
    const uint32_t layer = claimed_++;
    lock.unlock();
    Status status = copy_layer(jobs_, layer);
    lock.lock();
    if (!status.ok() && failure_.ok()) failure_ = std::move(status);
    ++done_;
  }
  changed_.wait(lock, [this] { return done_ == claimed_; });
  jobs_ = {};
  staged_layers_ += done_;
  // available_ stays equal to claimed_: the thread sleeps until the next step.
  wait_micros_ += static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin).count());
  return std::exchange(failure_, {});
}

}  // namespace ls::kv
