// The CPU device behind native/backend.h: thread pool, model, KV memory and sampler put together.
#include <cpuid.h>

#include <cstring>
#include <new>

#include "isa.h"
#include "kv_memory.h"
#include "model.h"
#include "sampler.h"
#include "thread_pool.h"

namespace ls {
namespace {

using namespace cpu;

constexpr uint32_t kHeadRows = 64;  // rows of logits in memory at a time

class CpuBackend final : public Backend {
 public:
  CpuBackend(const ls_config &config, const float *inv_freq, Isa isa)
      : config_(config), pool_(config.threads), memory_(config.layers, config.kv_heads, config.head_dim, static_cast<ls_dtype>(config.kv_dtype)),
        model_(config, inv_freq, ops_for(isa), attention_for(isa)), sampler_(config.vocab, ops_for(isa)) {}

  Status set_tensor(uint32_t id, const TensorView &view) override { return model_.set(id, view); }

  Status finish_weights(std::atomic<int32_t> &permille) override {
    try {
      return model_.finish(pool_, permille);
    } catch (const std::bad_alloc &) {
      return Status::fail(LS_NO_MEMORY, "not enough memory to prepare the weights");
    }
  }

  Status create_pool(uint32_t pages) override { return memory_.reserve(pages); }

  KvFormat kv_format() const override { return {memory_.page_bytes(), memory_.dtype() == LS_DTYPE_BF16 ? 2u : 1u}; }
  uint8_t *kv_page(uint32_t layer, int32_t page) override { return memory_.layer(layer) + static_cast<size_t>(page) * memory_.page_bytes(); }

  Status run(const StepBatch &batch, StepOutput &out) override {
    try {
      return step(batch, out);
    } catch (const std::bad_alloc &) {
      return Status::fail(LS_NO_MEMORY, "not enough memory for a step of " + std::to_string(batch.tokens) + " tokens");
    }
  }

 private:
  Status step(const StepBatch &batch, StepOutput &out) {
    out.rows.resize(batch.rows.size());
    sampling_.clear();
    for (uint32_t i = 0; i < batch.rows.size(); ++i) {
      const StepRow &row = batch.rows[i];
      if (row.len == 0) return Status::fail(LS_INTERNAL, "row " + std::to_string(i) + " has no tokens");
      out.rows[i].token = -1;
      out.rows[i].logprob = 0;
      out.rows[i].top.clear();
      if (row.sample) sampling_.push_back(i);
    }
    for (const PageCopy &copy : batch.copies) memory_.copy(static_cast<uint32_t>(copy.from), static_cast<uint32_t>(copy.to));
    if (batch.rows.empty()) return Status::good();
    const float *hidden = model_.forward(pool_, batch, memory_);
    const uint32_t total = static_cast<uint32_t>(sampling_.size());
    for (uint32_t first = 0; first < total; first += kHeadRows) {
      const uint32_t count = total - first < kHeadRows ? total - first : kHeadRows;
      float *logits = logits_.ensure(static_cast<size_t>(count) * config_.vocab);
      model_.head(pool_, hidden + static_cast<size_t>(first) * config_.hidden, count, logits);
      rows_.resize(count);
      chosen_.resize(count);
      for (uint32_t i = 0; i < count; ++i) {
        const StepRow &row = batch.rows[sampling_[first + i]];
        rows_[i] = {logits + static_cast<size_t>(i) * config_.vocab, row.temperature, row.top_p, row.seed, row.start + row.len, row.n_logprobs, row.slot};
      }
      Status status = sampler_.run(pool_, rows_.data(), count, chosen_.data());
      if (!status.ok()) return status;
      for (uint32_t i = 0; i < count; ++i) std::swap(out.rows[sampling_[first + i]], chosen_[i]);
    }
    return Status::good();
  }

  ls_config config_;
  ThreadPool pool_;
  KvMemory memory_;
  Model model_;
  Sampler sampler_;
  std::vector<uint32_t> sampling_;  // batch rows that sample
  std::vector<SampleRow> rows_;
  std::vector<RowOutput> chosen_;
  Buffer<float> logits_;
};

// The CPU's own name from CPUID, control characters and quotes dropped, spaces at the ends cut.
std::string cpu_name() {
  uint32_t words[12] = {};
  uint32_t a, b, c, d;
  if (!__get_cpuid(0x80000000u, &a, &b, &c, &d) || a < 0x80000004u) return "x86-64";
  for (uint32_t i = 0; i < 3; ++i) __get_cpuid(0x80000002u + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3]);
  char raw[sizeof(words) + 1] = {};
  std::memcpy(raw, words, sizeof(words));
  std::string name;
  for (const char *p = raw; *p; ++p)
    if (*p >= ' ' && *p < 127 && *p != '"' && *p != '\\' && !(*p == ' ' && (name.empty() || name.back() == ' '))) name += *p;
  while (!name.empty() && name.back() == ' ') name.pop_back();
  return name.empty() ? "x86-64" : name;
}

}  // namespace

Status make_backend(const ls_config &config, const float *inv_freq, std::unique_ptr<Backend> &out) {
  if (config.kv_dtype != LS_DTYPE_F32 && config.kv_dtype != LS_DTYPE_BF16)
    return Status::fail(LS_UNSUPPORTED, "kv_dtype " + std::to_string(config.kv_dtype) + " is not supported on the CPU, expected f32 or bf16");
  if (config.ranks > 1) return Status::fail(LS_UNSUPPORTED, std::to_string(config.ranks) + " tensor-parallel ranks are not supported on the CPU, expected 1");
  if (!config.kv_heads || config.heads % config.kv_heads || !config.head_dim || config.head_dim % 2 || config.head_dim > LS_MAX_HEAD_DIM)
    return Status::fail(LS_INVALID, "heads " + std::to_string(config.heads) + ", kv_heads " + std::to_string(config.kv_heads) + ", head_dim " + std::to_string(config.head_dim) +
                                        ": expected heads a multiple of kv_heads and an even head_dim of at most " + std::to_string(LS_MAX_HEAD_DIM));
  Isa isa;
  Status status = detect_isa(isa);
  if (!status.ok()) return status;
  try {
    out = std::make_unique<CpuBackend>(config, inv_freq, isa);
  } catch (const std::bad_alloc &) {
    return Status::fail(LS_NO_MEMORY, "not enough memory to create the CPU engine");
  }
  return Status::good();
}

Status device_info_json(std::string &json) {
  Isa isa;
  Status status = detect_isa(isa);
  if (!status.ok()) return status;
  std::string isas;
  for (Isa one : available_isas()) isas += (isas.empty() ? "\"" : ",\"") + std::string(isa_name(one)) + "\"";
  json = "{\"device\":\"cpu\",\"isa\":\"" + std::string(isa_name(isa)) + "\",\"isas\":[" + isas + "],\"threads\":" + std::to_string(ThreadPool::default_threads()) + ",\"name\":\"" + cpu_name() + "\"}";
  return Status::good();
}

}  // namespace ls
