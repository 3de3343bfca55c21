#include "stager.h"

#include <pthread.h>

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

void Stager::copy_layer(std::span<const StageJob> jobs, uint32_t layer) {
  for (const StageJob &job : jobs) {
    if (job.staged->abandoned.load(std::memory_order_relaxed)) continue;
    for (uint32_t page = job.first; page < job.end; ++page) job.staged->fill(layer, page, backend_.kv_page(layer, job.table[page]));
  }
}

void Stager::copy_now(const StageJob &job) {
  for (uint32_t layer = 0; layer < layers_; ++layer) copy_layer({&job, 1}, layer);
}

void Stager::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || claimed_ < available_; });
    if (stop_) return;
    const uint32_t layer = claimed_++;
    const std::span<const StageJob> jobs = jobs_;
    lock.unlock();
    copy_layer(jobs, layer);
    lock.lock();
    if (!finishing_) ++early_layers_;
    if (++done_ == claimed_) changed_.notify_all();
  }
}

void Stager::begin(std::span<const StageJob> jobs) {
  const std::lock_guard lock(mutex_);
  jobs_ = jobs;
  available_ = claimed_ = done_ = 0;
  finishing_ = false;
}

void Stager::layer_stored(uint32_t layer) {
  {
    const std::lock_guard lock(mutex_);
    available_ = layer + 1;
  }
  changed_.notify_all();
}

// The engine thread takes its share of what is left.
void Stager::finish(bool ok) {
  const auto begin = Clock::now();
  std::unique_lock lock(mutex_);
  finishing_ = true;
  available_ = ok ? layers_ : claimed_;
  while (claimed_ < available_) {
    const uint32_t layer = claimed_++;
    lock.unlock();
    copy_layer(jobs_, layer);
    lock.lock();
    ++done_;
  }
  changed_.wait(lock, [this] { return done_ == claimed_; });
  jobs_ = {};
  staged_layers_ += done_;
  // available_ stays equal to claimed_: the thread sleeps until the next step.
  wait_micros_ += static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin).count());
}

}  // namespace ls::kv
