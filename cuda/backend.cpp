// The CUDA device behind native/backend.h: a group of ranks, the packing of steps, and KV for transfers.
#include <new>

#include "group.h"
#include "kv_access.h"

namespace ls {
namespace {

using namespace cuda;

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(std::unique_ptr<Group> group) : group_(std::move(group)), packer_(group_->limits()), kv_(*group_) {}

  Status set_tensor(uint32_t id, const TensorView &view) override {
    for (uint32_t r = 0; r < group_->ranks(); ++r)
      if (Status status = group_->rank(r).weights().set(id, view); !status.ok()) return status;
    return Status::good();
  }

  Status finish_weights(std::atomic<int32_t> &permille) override { return group_->load(permille); }

  Status memory(ls_memory_t &out) override {
    const auto split = [](uint64_t value, uint32_t &lo, uint32_t &hi) { lo = static_cast<uint32_t>(value), hi = static_cast<uint32_t>(value >> 32); };
    const RankMemory *tightest = nullptr;
    for (uint32_t r = 0; r < group_->ranks(); ++r) {
      const RankMemory &one = group_->rank(r).memory();
      if (tightest == nullptr || one.free_now < tightest->free_now) tightest = &one;
    }
    out.known = 1;
    split(tightest->total, out.total_lo, out.total_hi);
    split(tightest->total - tightest->free_at_start, out.used_before_lo, out.used_before_hi);
    split(tightest->weights, out.weights_lo, out.weights_hi);
    split(tightest->workspace, out.workspace_lo, out.workspace_hi);
    split(tightest->graphs, out.graphs_lo, out.graphs_hi);
    split(tightest->free_now, out.free_lo, out.free_hi);
    split(group_->page_bytes() / group_->ranks() * group_->layers(), out.page_bytes_lo, out.page_bytes_hi);
    return Status::good();
  }

  Status create_pool(uint32_t pages) override { return group_->create_pool(pages); }

  KvFormat kv_format() const override { return {group_->page_bytes(), group_->rank(0).kv_layout().format_id()}; }
  Status kv_read(uint32_t layer, const int32_t *pages, uint32_t count, const std::function<void(uint32_t, const uint8_t *)> &take) override { return kv_.read(layer, pages, count, take); }
  std::unique_ptr<KvWriter> kv_writer(const std::vector<int32_t> &pages) override { return kv_.writer(pages); }

  bool queues() const override { return true; }

  Status submit(const StepBatch &batch) override {
    const uint32_t slot = submitted_ % kStepsInFlight;
    StepShape &shape = shapes_[slot];
    if (Status status = packer_.pack(batch, group_->rank(0).buckets(), group_->plan_buffer(slot), shape); !status.ok()) return status;
    group_->launch(shape, slot, batch.hook != nullptr);
    ++submitted_;
    return Status::good();
  }

  Status wait(const StepBatch &batch, StepOutput &out) override {
    const uint32_t slot = waited_++ % kStepsInFlight;
    std::function<void(uint32_t)> stored;
    if (batch.hook != nullptr) stored = [hook = batch.hook](uint32_t layer) { hook->layer_stored(layer); };
    if (Status status = group_->wait(slot, stored); !status.ok()) return status;
    out.rows.resize(batch.rows.size());
    const SampleResult *result = group_->results(slot);
    for (size_t r = 0; r < batch.rows.size(); ++r) {
      RowOutput &row = out.rows[r];
      row.token = -1;
      row.logprob = 0;
      row.top.clear();
      if (!batch.rows[r].sample) continue;
      if (result->broken != 0)
        return Status::fail(LS_INTERNAL, "logits of slot " + std::to_string(batch.rows[r].slot) + " at position " + std::to_string(batch.rows[r].start + batch.rows[r].len) + " (row " + std::to_string(r) + ") are not finite");
      row.token = result->token;
      row.logprob = result->logprob;
      for (uint32_t i = 0; i < std::min<uint32_t>(result->n_top, LS_MAX_LOGPROBS); ++i) row.top.emplace_back(result->top[i].token, result->top[i].logprob);
      ++result;
    }
    return Status::good();
  }

  Status run(const StepBatch &batch, StepOutput &out) override {
    Status status = submit(batch);
    return status.ok() ? wait(batch, out) : status;
  }

 private:
  std::unique_ptr<Group> group_;
  StepPacker packer_;
  KvAccess kv_;  // its memory goes before the group's
  std::array<StepShape, kStepsInFlight> shapes_;
  uint64_t submitted_ = 0, waited_ = 0;
};

// Printable ASCII without what JSON would need escaped.
std::string plain(const std::string &text) {
  std::string out;
  for (const char c : text)
    if (c >= ' ' && c < 127 && c != '"' && c != '\\') out += c;
  return out;
}

// Whether the architectures of cuda.cmake cover a device. The driver would know better, but asking it takes memory on every GPU.
bool covered(int major, int minor) { return major == 8 || (major == 9 && minor == 0) || major == 10 || major >= 12; }

std::string device_json(int index) {
  DeviceProperties p;
  std::string json = "{\"index\":" + std::to_string(index);
  if (Status status = device_properties(index, p); !status.ok()) return json + ",\"error\":\"" + plain(status.text) + "\"}";
  json += ",\"name\":\"" + plain(p.name) + "\",\"uuid\":\"" + plain(p.uuid) + "\",\"capability\":\"" + std::to_string(p.major) + "." + std::to_string(p.minor) + "\",\"memory\":" + std::to_string(p.total_bytes) +
          ",\"multiprocessors\":" + std::to_string(p.multiprocessors);
  return json + (covered(p.major, p.minor) ? "}" : ",\"error\":\"the library has no code for its architecture; it has 8.x, 9.0, 10.x, 12.0 and later\"}");
}

}  // namespace

Status make_backend(const ls_config &config, const float *inv_freq, std::unique_ptr<Backend> &out) {
  std::unique_ptr<Group> group;
  if (Status status = Group::create(config, inv_freq, group); !status.ok()) return status;
  out = std::make_unique<CudaBackend>(std::move(group));
  return Status::good();
}

// Never fails: a machine without a usable GPU is described, too.
Status device_info_json(std::string &json) {
  const DriverVersions versions = driver_versions();
  int count = 0;
  const Status status = device_count(count);
  std::string devices;
  for (int i = 0; i < count; ++i) devices += (i > 0 ? "," : "") + device_json(i);
  json = "{\"device\":\"cuda\",\"isa\":\"cuda\",\"isas\":[\"cuda\"],\"threads\":0,\"name\":\"CUDA\",\"queues\":true,\"driver\":" + std::to_string(versions.driver) + ",\"runtime\":" + std::to_string(versions.runtime) + ",\"devices\":[" + devices + "]" +
         (status.ok() ? "}" : ",\"error\":\"" + plain(status.text) + "\"}");
  return Status::good();
}

}  // namespace ls
