#include "group.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <string>

namespace ls::cuda {
namespace {

constexpr uint32_t kMaxLoaders = 8;  // threads that pack weights, over all ranks

Status unsupported(std::string text) { return Status::fail(LS_UNSUPPORTED, std::move(text)); }

std::string divides(const char *what, uint32_t value, uint32_t ranks) { return std::string(what) + " " + std::to_string(value) + " cannot be split over " + std::to_string(ranks) + " ranks (--tp)"; }

// Whether a model's shapes can be cut and run.
Status check_shape(const ls_config &c, uint32_t ranks) {
  if (ranks > kMaxRanks) return unsupported(std::to_string(ranks) + " ranks (--tp): expected at most " + std::to_string(kMaxRanks));
  if (c.kv_heads % ranks != 0) return unsupported(divides("kv_heads", c.kv_heads, ranks));
  if (c.intermediate % ranks != 0) return unsupported(divides("intermediate", c.intermediate, ranks));
  if (c.head_dim > kMaxHeadDim) return unsupported("head_dim " + std::to_string(c.head_dim) + ": the CUDA kernels take at most " + std::to_string(kMaxHeadDim));
  if (c.vocab > kMaxSampleVocab) return unsupported("vocab " + std::to_string(c.vocab) + ": the CUDA kernels take at most " + std::to_string(kMaxSampleVocab));
  if (c.kv_dtype == LS_KV_F32) return unsupported("kv_dtype f32 is not supported on a GPU, expected bf16, fp8 e4m3 or fp8 e5m2");
  return Status::good();
}

}  // namespace

DeviceThread::DeviceThread(int device) : thread_([this, device] { run(device); }) { pthread_setname_np(thread_.native_handle(), "ls-cuda"); }

DeviceThread::~DeviceThread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void DeviceThread::post(std::function<Status()> work) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    ++posted_;
  }
  changed_.notify_all();
}

Status DeviceThread::wait(uint64_t count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return run_ >= count; });
  return failure_;
}

void DeviceThread::run(int device) {
  Status status = use_device(device);
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!status.ok() && failure_.ok()) failure_ = status;
    changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::function<Status()> work = std::move(queue_.front());
    queue_.pop_front();
    const bool healthy = failure_.ok();
    lock.unlock();
    try {
      status = healthy ? work() : Status::good();
    } catch (const std::bad_alloc &) {
      status = Status::fail(LS_NO_MEMORY, "out of host memory");
    } catch (const std::exception &e) {
      status = Status::fail(LS_INTERNAL, e.what());
    }
    lock.lock();
    if (!status.ok() && failure_.ok()) failure_ = status;
    ++run_;
    changed_.notify_all();
  }
}

Status Group::create(const ls_config &config, const float *inv_freq, std::unique_ptr<Group> &out) {
  const uint32_t ranks = std::max(1u, config.ranks);
  if (Status status = check_shape(config, ranks); !status.ok()) return status;
  int devices = 0;
  if (Status status = device_count(devices); !status.ok()) return status;
  if (config.device_index + ranks > static_cast<uint32_t>(devices))
    return unsupported("devices " + std::to_string(config.device_index) + ".." + std::to_string(config.device_index + ranks - 1) + " are wanted, " + std::to_string(devices) + " are visible");
  std::unique_ptr<Group> group(new Group(config));
  std::vector<int> devices_of_ranks;
  for (uint32_t r = 0; r < ranks; ++r) {
    const int device = static_cast<int>(config.device_index + r);
    if (Status status = device_has_code(device); !status.ok()) return Status::fail(status.code, "GPU " + std::to_string(device) + ": " + status.text);
    group->ranks_.push_back(std::make_unique<Rank>(config, inv_freq, group->limits_, device, r, ranks));
    group->threads_.push_back(std::make_unique<DeviceThread>(device));
    devices_of_ranks.push_back(device);
  }
  group->page_bytes_ = group->ranks_[0]->kv_layout().page_bytes() * ranks;
  if (Status status = group->on_all([](Rank &rank) { return rank.open(); }); !status.ok()) return status;
  if (Status status = group->connect(devices_of_ranks); !status.ok()) return status;
  for (uint32_t slot = 0; slot < kStepsInFlight; ++slot) {
    if (Status status = group->plans_[slot].alloc(group->limits_.capacity_words() * 4); !status.ok()) return status;
    if (Status status = group->results_[slot].alloc(group->limits_.rows * sizeof(SampleResult)); !status.ok()) return status;
    group->tickets_[slot].resize(ranks);
  }
  out = std::move(group);
  return Status::good();
}

Status Group::connect(const std::vector<int> &devices) {
  const char *given = std::getenv("LAYERSCALE_ALL_REDUCE");
  const std::string wanted = given != nullptr && *given != '\0' ? given : "auto";
  if (wanted != "auto" && wanted != "peer" && wanted != "nccl") return Status::fail(LS_INVALID, "LAYERSCALE_ALL_REDUCE=\"" + wanted + "\": expected auto, peer or nccl");
  if (devices.size() < 2) return Status::good();
  std::string apart;
  for (const int from : devices)
    for (const int to : devices) {
      bool possible = true;
      if (from != to)
        if (Status status = peer_possible(from, to, possible); !status.ok()) return status;
      if (!possible && apart.empty()) apart = "GPU " + std::to_string(from) + " cannot reach the memory of GPU " + std::to_string(to);
    }
  if (wanted == "peer" && !apart.empty()) return unsupported(apart + " (--tp with LAYERSCALE_ALL_REDUCE=peer)");
  if (wanted != "nccl" && apart.empty()) {
    for (const int from : devices)
      for (const int to : devices)
        if (from != to)
          if (Status status = enable_peer(from, to); !status.ok()) return status;
    return Status::good();
  }
  if (Status status = NcclGroup::create(devices, nccl_); !status.ok()) return apart.empty() ? status : Status::fail(status.code, apart + " (--tp), and what would take its place: " + status.text);
  return on_all([this](Rank &rank) { return rank.use_nccl(nccl_.get()); });
}

// What is queued runs to its end: ranks wait for each other, so none may leave early.
Group::~Group() {
  for (const auto &thread : threads_) thread->wait(thread->posted());
  for (const auto &rank : ranks_) rank->drain();
  for (const auto &rank : ranks_) rank->drop_graphs();
  nccl_.reset();
  threads_.clear();
}

Status Group::on_all(const std::function<Status(Rank &)> &fn) {
  for (size_t r = 0; r < ranks_.size(); ++r) threads_[r]->post([&fn, rank = ranks_[r].get()] { return fn(*rank); });
  Status first;
  for (const auto &thread : threads_)
    if (Status status = thread->wait(thread->posted()); first.ok()) first = std::move(status);
  return first;
}

Status Group::load(std::atomic<int32_t> &permille) {
  const uint32_t wanted = config_.threads > 0 ? config_.threads : std::max(1u, std::thread::hardware_concurrency());
  const uint32_t each = std::max(1u, std::min(wanted, kMaxLoaders) / ranks());
  for (const auto &rank : ranks_)
    if (Status status = rank->weights().check(); !status.ok()) return status;
  std::atomic<int32_t> others{0};
  if (Status status = on_all([&](Rank &rank) { return rank.load(each, &rank == ranks_[0].get() ? permille : others); }); !status.ok()) return status;
  std::vector<void *> areas;
  for (const auto &rank : ranks_) areas.push_back(rank->reduce_area());
  return together([&](Rank &rank) {
    Status status = rank.join(areas);
    return status.ok() ? rank.measure_graphs() : status;
  });
}

Status Group::create_pool(uint32_t pages) {
  return together([pages](Rank &rank) { return rank.create_pool(pages); });
}

Status Group::together(const std::function<Status(Rank &)> &fn) {
  if (!nccl_) return on_all(fn);
  nccl_->begin();
  Status status = on_all(fn);
  nccl_->end();
  const Status failure = nccl_->failure();
  return failure.ok() ? status : failure;
}

void Group::launch(const StepShape &shape, uint32_t slot, bool layer_events) {
  if (nccl_) nccl_->begin();
  for (size_t r = 0; r < ranks_.size(); ++r) {
    threads_[r]->post([this, shape, slot, layer_events, r] { return ranks_[r]->launch(shape, plan_buffer(slot), r == 0 ? results_[slot].as<SampleResult>() : nullptr, slot, layer_events); });
    tickets_[slot][r] = threads_[r]->posted();
  }
}

// What a rank met once a sum had failed says less than that failure.
Status Group::wait(uint32_t slot, const std::function<void(uint32_t)> &stored) {
  Status status = wait_ranks(slot, stored);
  if (!nccl_) return status;
  nccl_->end();
  const Status failure = nccl_->failure();
  return failure.ok() ? status : failure;
}

Status Group::wait_ranks(uint32_t slot, const std::function<void(uint32_t)> &stored) {
  for (size_t r = 0; r < ranks_.size(); ++r)
    if (Status status = threads_[r]->wait(tickets_[slot][r]); !status.ok()) return status;
  for (uint32_t layer = 0; stored && layer < config_.layers; ++layer) {
    for (const auto &rank : ranks_)
      if (Status status = rank->wait_layer(layer); !status.ok()) return status;
    stored(layer);
  }
  for (const auto &rank : ranks_) {
    if (Status status = rank->wait_step(slot); !status.ok()) return status;
    if (const int32_t silent = rank->silent_rank(); silent != 0) return Status::fail(LS_INTERNAL, "rank " + std::to_string(silent - 1) + " was not heard from by another one (--tp)");
  }
  return Status::good();
}

}  // namespace ls::cuda
