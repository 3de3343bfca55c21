#include "fake_backend.h"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <memory>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <utility>

namespace ls {
namespace test {

uint64_t extend_hash(uint64_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint32_t>(token)) * 0x100000001b3u;
  return hash ^ (hash >> 29);
}

static int32_t token_of(uint64_t hash, uint32_t vocab) { return static_cast<int32_t>((hash >> 7) % vocab); }

int32_t next_token(std::span<const int32_t> tokens, uint32_t vocab) {
  uint64_t hash = kEmptyHash;
  for (const int32_t token : tokens) hash = extend_hash(hash, token);
  return token_of(hash, vocab);
}

static std::shared_ptr<FakeDevice> latest = std::make_shared<FakeDevice>();
FakeDevice &device() { return *latest; }
Status &next_make_status() {
  static Status status;
  return status;
}

namespace {

constexpr int32_t kNeverWritten = -7;

class FakeBackend : public Backend {
 public:
  explicit FakeBackend(std::shared_ptr<FakeDevice> device) : device_(std::move(device)) {}
  ~FakeBackend() override { device_->alive = false; }

  Status set_tensor(uint32_t id, const TensorView &view) override {
    device_->tensors[id] = view;
    return Status::good();
  }

  Status finish_weights(std::atomic<int32_t> &permille) override {
    permille = 500;
    if (device_->finish_gate) device_->finish_gate->wait(false);
    return std::exchange(device_->finish_status, Status::good());
  }

  Status create_pool(uint32_t pages) override {
    if (!device_->pool_status.ok()) return std::exchange(device_->pool_status, Status::good());
    pages_ = pages;
    device_->memory.assign(size_t{pages} * LS_PAGE_TOKENS * device_->config.layers, kNeverWritten);
    return Status::good();
  }

  Status set_kv_scales(const float *scales) override {
    device_->kv_scales.assign(scales, scales + size_t{2} * device_->config.layers);
    return Status::good();
  }

  KvFormat kv_format() const override { return {device_->movable ? sizeof(int32_t) * LS_PAGE_TOKENS : 0, 7}; }
  uint8_t *kv_page(uint32_t layer, int32_t index) override { return reinterpret_cast<uint8_t *>(page(layer, index)); }

  Status run(const StepBatch &batch, StepOutput &out) override {
    FakeDevice &d = *device_;
    ++d.runs;
    d.last_rows = batch.rows;
    if (std::exchange(d.run_throws, false)) throw std::runtime_error("injected");
    if (!d.run_status.ok()) return std::exchange(d.run_status, Status::good());
    if (std::string text = inspect(batch); !text.empty()) return Status::fail(LS_INTERNAL, "fake device: " + text);
    for (uint32_t layer = 0; layer < d.config.layers; ++layer) {
      for (const PageCopy &copy : batch.copies) std::copy_n(page(layer, copy.from), LS_PAGE_TOKENS, page(layer, copy.to));
      for (const StepRow &row : batch.rows)
        for (uint32_t i = 0; i < row.len; ++i) at(row, layer, row.start + i) = row.tokens[i] ^ static_cast<int32_t>(layer << kLayerShift);
      if (batch.hook) batch.hook->layer_stored(layer);
      if (d.on_layer) d.on_layer(layer);
    }
    for (const StepRow &row : batch.rows) {
      RowOutput result;
      uint64_t hash = kEmptyHash;
      for (uint32_t i = 0; i < row.start + row.len; ++i) {
        const int32_t token = at(row, 0, i);
        if (token == kNeverWritten) return Status::fail(LS_INTERNAL, "fake device: slot " + std::to_string(row.slot) + " reads token " + std::to_string(i) + " that nobody wrote");
        for (uint32_t layer = 1; layer < d.config.layers; ++layer)
          if (at(row, layer, i) != (token ^ static_cast<int32_t>(layer << kLayerShift)))
            return Status::fail(LS_INTERNAL, "fake device: slot " + std::to_string(row.slot) + " reads token " + std::to_string(i) + ", and its layers disagree");
        hash = extend_hash(hash, token);
      }
      if (row.sample) {
        result.token = token_of(hash, d.config.vocab);
        result.logprob = -0.5f - static_cast<float>(row.slot);
        for (uint32_t i = 0; i < row.n_logprobs; ++i) result.top.emplace_back(static_cast<int32_t>((static_cast<uint32_t>(result.token) + i) % d.config.vocab), -0.5f - static_cast<float>(i));
      }
      out.rows.push_back(std::move(result));
    }
    tamper(out);
    return Status::good();
  }

 protected:
  uint8_t *bytes_of(uint32_t layer, int32_t index) { return reinterpret_cast<uint8_t *>(page(layer, index)); }
  size_t page_bytes() const { return sizeof(int32_t) * LS_PAGE_TOKENS; }

 private:
  static constexpr uint32_t kLayerShift = 20;
  std::shared_ptr<FakeDevice> device_;
  uint32_t pages_ = 0;

  int32_t *page(uint32_t layer, int32_t page) { return device_->memory.data() + (size_t{layer} * pages_ + static_cast<size_t>(page)) * LS_PAGE_TOKENS; }
  int32_t &at(const StepRow &row, uint32_t layer, uint32_t position) { return page(layer, row.pages[position / LS_PAGE_TOKENS])[position % LS_PAGE_TOKENS]; }

  // What must hold of any batch: pages cover the row exactly, and nobody else touches a page that a row writes.
  std::string inspect(const StepBatch &batch) const {
    const FakeDevice &d = *device_;
    std::unordered_map<int32_t, const StepRow *> user, writer;
    uint32_t sum = 0;
    for (const StepRow &row : batch.rows) {
      const std::string name = "slot " + std::to_string(row.slot);
      sum += row.len;
      if (row.page_count != (row.start + row.len + LS_PAGE_TOKENS - 1) / LS_PAGE_TOKENS) return name + " has " + std::to_string(row.page_count) + " pages";
      for (uint32_t i = 0; i < row.len; ++i)
        if (row.tokens[i] < 0 || static_cast<uint32_t>(row.tokens[i]) >= d.config.vocab) return name + " has token " + std::to_string(row.tokens[i]);
      for (uint32_t p = 0; p < row.page_count; ++p) {
        const int32_t page = row.pages[p];
        if (page < 0 || static_cast<uint32_t>(page) >= pages_) return name + " has page " + std::to_string(page);
        const bool writes = p >= row.start / LS_PAGE_TOKENS;
        const auto [first, fresh] = user.emplace(page, &row);
        if (!fresh && (writes || writer.contains(page) || first->second == &row)) return name + " shares page " + std::to_string(page) + ", which is written";
        if (writes) writer.emplace(page, &row);
      }
    }
    return sum == batch.tokens ? "" : "batch.tokens is wrong";
  }

  void tamper(StepOutput &out) {
    using Tamper = FakeDevice::Tamper;
    const int32_t outside = static_cast<int32_t>(device_->config.vocab);
    switch (std::exchange(device_->tamper, Tamper::none)) {
      case Tamper::none: return;
      case Tamper::token_outside: out.rows[0].token = outside; return;
      case Tamper::missing_row: out.rows.pop_back(); return;
      case Tamper::too_many_top: out.rows[0].top.resize(LS_MAX_LOGPROBS + 1); return;
      case Tamper::top_outside: out.rows[0].top.assign(1, {outside, 0.0f}); return;
    }
  }
};

// The same as a device that queues steps and whose pages are not host memory: a step is what it was when it was submitted, carries are its own
// affair, and KV passes through other memory.
class QueuedFake final : public FakeBackend {
 public:
  using FakeBackend::FakeBackend;
  bool queues() const override { return true; }

  Status submit(const StepBatch &batch) override {
    Queued &queued = queue_.emplace_back();
    queued.batch = batch;
    for (StepRow &row : queued.batch.rows) {
      queued.tokens.emplace_back(row.tokens, row.tokens + row.len);
      queued.pages.emplace_back(row.pages, row.pages + row.page_count);
      row.tokens = queued.tokens.back().data();
      row.pages = queued.pages.back().data();
    }
    return Status::good();
  }

  Status wait(const StepBatch &batch, StepOutput &out) override {
    if (queue_.empty()) return Status::fail(LS_INTERNAL, "fake device: nothing is queued");
    Queued queued = std::move(queue_.front());
    queue_.pop_front();
    for (size_t r = 0; r < queued.batch.rows.size(); ++r) {
      const int32_t carry = queued.batch.rows[r].carry_row;
      if ((queued.tokens[r][0] < 0) != (carry >= 0)) return Status::fail(LS_INTERNAL, "fake device: a carry without its row, or a row without its carry");
      if (carry >= 0) queued.tokens[r][0] = last_.at(static_cast<size_t>(carry));
    }
    if (queued.batch.hook != batch.hook) return Status::fail(LS_INTERNAL, "fake device: the hook came after submit");
    Status status = run(queued.batch, out);
    last_.clear();
    for (const RowOutput &row : out.rows) last_.push_back(row.token);
    return status;
  }

  uint8_t *kv_page(uint32_t, int32_t) override { return nullptr; }
  Status kv_read(uint32_t layer, const int32_t *pages, uint32_t count, const std::function<void(uint32_t, const uint8_t *)> &take) override {
    std::vector<uint8_t> bounce(page_bytes());
    for (uint32_t i = 0; i < count; ++i) {
      std::copy_n(bytes_of(layer, pages[i]), bounce.size(), bounce.begin());
      take(i, bounce.data());
    }
    return Status::good();
  }
  std::unique_ptr<KvWriter> kv_writer(const std::vector<int32_t> &pages) override { return std::make_unique<Writer>(*this, pages); }

 private:
  struct Queued {
    StepBatch batch;
    std::deque<std::vector<int32_t>> tokens, pages;  // of each row
  };
  // What has arrived reaches the pages at the flush: nothing may look at them before.
  class Writer final : public KvWriter {
   public:
    Writer(QueuedFake &fake, std::vector<int32_t> pages) : fake_(fake), pages_(std::move(pages)) {}
    ~Writer() override { flush(); }
    uint8_t *page(uint32_t layer, uint32_t index) override {
      std::vector<uint8_t> &landing = landing_[{layer, index}];
      landing.resize(fake_.page_bytes());
      return landing.data();
    }
    void arrived(uint32_t layer, uint32_t index) override { arrived_.push_back({layer, index}); }
    Status flush() override {
      for (const auto &place : arrived_) std::copy_n(landing_.at(place).data(), fake_.page_bytes(), fake_.bytes_of(place.first, pages_[place.second]));
      arrived_.clear();
      return Status::good();
    }

   private:
    QueuedFake &fake_;
    const std::vector<int32_t> pages_;
    std::map<std::pair<uint32_t, uint32_t>, std::vector<uint8_t>> landing_;
    std::vector<std::pair<uint32_t, uint32_t>> arrived_;
  };
  std::deque<Queued> queue_;
  std::vector<int32_t> last_;  // tokens of the step before
};

}  // namespace
}  // namespace test

Status make_backend(const ls_config &config, const float *inv_freq, std::unique_ptr<Backend> &out) {
  if (!test::next_make_status().ok()) return std::exchange(test::next_make_status(), Status::good());
  test::latest = std::make_shared<test::FakeDevice>();
  test::latest->config = config;
  test::latest->inv_freq.assign(inv_freq, inv_freq + config.head_dim / 2);
  test::latest->alive = true;
  if (std::getenv("LS_FAKE_QUEUES") != nullptr) out = std::make_unique<test::QueuedFake>(test::latest);
  else out = std::make_unique<test::FakeBackend>(test::latest);
  return Status::good();
}

Status device_info_json(std::string &json) {
  json = R"({"device":"fake","isa":"none","isas":[],"threads":1,"name":"fäke"})";
  return Status::good();
}

}  // namespace ls
