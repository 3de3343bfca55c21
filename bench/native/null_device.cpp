// A device that computes nothing: every sampled row gets a fixed token at once. With it, the cost of everything above the device
// (scheduler, threads, protocols, frontend) can be measured alone. Environment:
//   LAYERSCALE_NULL_STEP_US   a step takes this many microseconds (default 0)
//   LAYERSCALE_NULL_TOKEN     the token (default 1000)
//   LAYERSCALE_NULL_TRACE     file for one record per sampled token: i32 first prompt token, i32 position, i64 ns of CLOCK_MONOTONIC
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"

namespace ls {
namespace {

int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void sleep_until(int64_t ns) {
  const timespec at{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) == EINTR) {
  }
}

struct TraceRecord {
  int32_t tag, position;
  int64_t ns;
};
static_assert(sizeof(TraceRecord) == 16);

class NullBackend final : public Backend {
 public:
  explicit NullBackend(const ls_config &config) : vocab_(static_cast<int32_t>(config.vocab)), tags_(config.max_seqs, -1) {
    if (const char *text = std::getenv("LAYERSCALE_NULL_STEP_US")) step_ns_ = std::strtoll(text, nullptr, 10) * 1000;
    if (const char *text = std::getenv("LAYERSCALE_NULL_TOKEN")) token_ = static_cast<int32_t>(std::strtol(text, nullptr, 10)) % vocab_;
    if (const char *path = std::getenv("LAYERSCALE_NULL_TRACE")) trace_.reset(std::fopen(path, "wb"));
  }

  Status set_tensor(uint32_t, const TensorView &) override { return Status::good(); }
  Status finish_weights(std::atomic<int32_t> &permille) override {
    permille = 1000;
    return Status::good();
  }
  Status create_pool(uint32_t) override { return Status::good(); }

  Status run(const StepBatch &batch, StepOutput &out) override {
    if (step_ns_ > 0) sleep_until(monotonic_ns() + step_ns_);
    const int64_t now = trace_ ? monotonic_ns() : 0;
    records_.clear();
    for (const StepRow &row : batch.rows) {
      RowOutput result;
      const uint32_t position = row.start + row.len;
      if (row.start == 0) tags_[static_cast<size_t>(row.slot)] = row.tokens[0];
      if (row.sample) {
        result.token = token_;
        result.logprob = -0.5f;
        for (uint32_t i = 0; i < row.n_logprobs; ++i) result.top.emplace_back((result.token + static_cast<int32_t>(i)) % vocab_, -0.5f - static_cast<float>(i));
        if (trace_) records_.push_back({tags_[static_cast<size_t>(row.slot)], static_cast<int32_t>(position), now});
      }
      out.rows.push_back(std::move(result));
    }
    if (trace_ && !records_.empty()) {
      std::fwrite(records_.data(), sizeof(TraceRecord), records_.size(), trace_.get());
      std::fflush(trace_.get());
    }
    return Status::good();
  }

 private:
  struct Close {
    void operator()(std::FILE *file) const { std::fclose(file); }
  };
  const int32_t vocab_;
  int32_t token_ = 1000 % vocab_;
  int64_t step_ns_ = 0;
  std::unique_ptr<std::FILE, Close> trace_;
  std::vector<int32_t> tags_;  // first prompt token of the sequence in each slot
  std::vector<TraceRecord> records_;
};

}  // namespace

Status make_backend(const ls_config &config, const float *, std::unique_ptr<Backend> &out) {
  out = std::make_unique<NullBackend>(config);
  return Status::good();
}

Status device_info_json(std::string &json) {
  json = R"({"device":"cpu","isa":"null","isas":["null"],"threads":1,"name":"null device"})";
  return Status::good();
}

}  // namespace ls
