#include "weights.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

namespace ls::cuda {
namespace {

constexpr size_t kChunkBytes = size_t{4} << 20;  // packed and uploaded at a time; each thread has two of them

struct RoleName {
  uint32_t role;
  const char *name;
};
constexpr RoleName kRoleNames[] = {
    {LS_ROLE_EMBEDDING, "embedding"}, {LS_ROLE_FINAL_NORM, "final norm"}, {LS_ROLE_LM_HEAD, "lm head"}, {LS_ROLE_ATTN_NORM, "attention norm"}, {LS_ROLE_Q, "q"}, {LS_ROLE_K, "k"},
    {LS_ROLE_V, "v"}, {LS_ROLE_O, "o"}, {LS_ROLE_Q_BIAS, "q bias"}, {LS_ROLE_K_BIAS, "k bias"}, {LS_ROLE_V_BIAS, "v bias"}, {LS_ROLE_O_BIAS, "o bias"}, {LS_ROLE_Q_NORM, "q norm"},
    {LS_ROLE_K_NORM, "k norm"}, {LS_ROLE_FFN_NORM, "ffn norm"}, {LS_ROLE_GATE, "gate"}, {LS_ROLE_UP, "up"}, {LS_ROLE_DOWN, "down"}};

std::string tensor_name(uint32_t id) {
  for (const RoleName &r : kRoleNames)
    if (r.role == id % 256) return std::string(r.name) + (id % 256 >= LS_ROLE_ATTN_NORM ? " of layer " + std::to_string(id / 256) : "");
  return "tensor " + std::to_string(id);
}

float half_value(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, mantissa = bits & 1023u;
  float value;
  if (exponent == 0) {
    value = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -value : value;
  }
  const uint32_t word = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  std::memcpy(&value, &word, 4);
  return value;
}

uint16_t word16(const uint8_t *at) {
  uint16_t value;
  std::memcpy(&value, at, 2);
  return value;
}

float element(const TensorView &view, uint32_t i) {
  const uint32_t block = i / 32, in = i % 32;
  const auto nibble = [in](const uint8_t *quants) { return static_cast<float>(in < 16 ? quants[in] & 15 : quants[in - 16] >> 4); };
  switch (view.dtype) {
    case LS_DTYPE_F32: {
      float value;
      std::memcpy(&value, view.data + size_t{i} * 4, 4);
      return value;
    }
    case LS_DTYPE_F16: return half_value(word16(view.data + size_t{i} * 2));
    case LS_DTYPE_BF16: {
      const uint32_t bits = static_cast<uint32_t>(word16(view.data + size_t{i} * 2)) << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    }
    case LS_DTYPE_Q8_0: {
      const uint8_t *at = view.data + size_t{block} * 34;
      return half_value(word16(at)) * static_cast<float>(static_cast<int8_t>(at[2 + in]));
    }
    case LS_DTYPE_Q4_0: {
      const uint8_t *at = view.data + size_t{block} * 18;
      return half_value(word16(at)) * (nibble(at + 2) - 8);
    }
    case LS_DTYPE_Q4_1: {
      const uint8_t *at = view.data + size_t{block} * 20;
      return half_value(word16(at)) * nibble(at + 4) + half_value(word16(at + 2));
    }
  }
  return 0;
}

// Packs and uploads pieces of matrices; one per thread.
class Uploader {
 public:
  Status init() {
    if (Status status = stream_create(stream_.out()); !status.ok()) return status;
    for (int i = 0; i < 2; ++i) {
      if (Status status = buffers_[i].alloc(kChunkBytes); !status.ok()) return status;
      if (Status status = event_create(events_[i].out()); !status.ok()) return status;
    }
    return Status::good();
  }
  // The buffer is free again when its upload before has ended.
  Status upload(const TensorView &view, const WeightSlice &slice, uint32_t first, uint32_t count, size_t tile_bytes, uint8_t *to) {
    const int at = next_;
    next_ ^= 1;
    if (Status status = event_sync(events_[at].get()); !status.ok()) return status;
    uint8_t *buffer = buffers_[at].as<uint8_t>();
    linear_pack(view, slice, first, count, buffer);
    if (Status status = copy_async(to + first * tile_bytes, buffer, count * tile_bytes, stream_.get()); !status.ok()) return status;
    return event_record(events_[at].get(), stream_.get());
  }
  Status finish() { return stream_ ? stream_sync(stream_.get()) : Status::good(); }

 private:
  OwnedStream stream_;
  HostMemory buffers_[2];
  OwnedEvent events_[2];
  int next_ = 0;
};

}  // namespace

std::vector<float> vector_values(const TensorView &view, uint32_t first, uint32_t count) {
  std::vector<float> values(count);
  for (uint32_t i = 0; i < count; ++i) values[i] = element(view, first + i);
  return values;
}

Weights::Weights(const ls_config &config, uint32_t rank, uint32_t ranks) : config_(config), rank_(rank), ranks_(ranks), views_(size_t{config.layers} * 256), layers_(config.layers) {}

Status Weights::set(uint32_t id, const TensorView &view) {
  if (id >= views_.size()) return Status::fail(LS_INVALID, "tensor id " + std::to_string(id) + " is outside the model's " + std::to_string(config_.layers) + " layers");
  views_[id] = view;
  return Status::good();
}

std::vector<Weights::Matrix> Weights::matrices() {
  const uint32_t hidden = config_.hidden, q = config_.heads * config_.head_dim / ranks_, kv = config_.kv_heads * config_.head_dim / ranks_, wide = config_.intermediate / ranks_;
  std::vector<Matrix> all;
  all.push_back({config_.tied_embeddings ? LS_ROLE_EMBEDDING : LS_ROLE_LM_HEAD, {0, config_.vocab, 0, hidden}, &head_});
  for (uint32_t l = 0; l < config_.layers; ++l) {
    Layer &layer = layers_[l];
    const uint32_t b = l * 256;
    const auto bias = [&](uint32_t wanted, uint32_t role) { return wanted ? b + role : 0u; };
    all.push_back({b + LS_ROLE_Q, {rank_ * q, q, 0, hidden}, &layer.q, bias(config_.qkv_bias, LS_ROLE_Q_BIAS), rank_ * q});
    all.push_back({b + LS_ROLE_K, {rank_ * kv, kv, 0, hidden}, &layer.k, bias(config_.qkv_bias, LS_ROLE_K_BIAS), rank_ * kv});
    all.push_back({b + LS_ROLE_V, {rank_ * kv, kv, 0, hidden}, &layer.v, bias(config_.qkv_bias, LS_ROLE_V_BIAS), rank_ * kv});
    // The bias of a sum over ranks is added by one of them.
    all.push_back({b + LS_ROLE_O, {0, hidden, rank_ * q, q}, &layer.o, rank_ == 0 ? bias(config_.o_bias, LS_ROLE_O_BIAS) : 0u, 0});
    all.push_back({b + LS_ROLE_GATE, {rank_ * wide, wide, 0, hidden}, &layer.gate});
    all.push_back({b + LS_ROLE_UP, {rank_ * wide, wide, 0, hidden}, &layer.up});
    all.push_back({b + LS_ROLE_DOWN, {0, hidden, rank_ * wide, wide}, &layer.down});
  }
  return all;
}

std::vector<Weights::Vector> Weights::vectors() {
  std::vector<Vector> all{{LS_ROLE_FINAL_NORM, 0, config_.hidden, &final_norm_}};
  for (uint32_t l = 0; l < config_.layers; ++l) {
    Layer &layer = layers_[l];
    all.push_back({l * 256 + LS_ROLE_ATTN_NORM, 0, config_.hidden, &layer.attn_norm});
    all.push_back({l * 256 + LS_ROLE_FFN_NORM, 0, config_.hidden, &layer.ffn_norm});
    if (!config_.qk_norm) continue;
    all.push_back({l * 256 + LS_ROLE_Q_NORM, 0, config_.head_dim, &layer.q_norm});
    all.push_back({l * 256 + LS_ROLE_K_NORM, 0, config_.head_dim, &layer.k_norm});
  }
  return all;
}

Status Weights::check() const {
  auto &self = const_cast<Weights &>(*this);  // the lists hold places to fill, nothing is filled here
  const auto missing = [](uint32_t id) { return Status::fail(LS_INVALID, "the " + tensor_name(id) + " tensor is missing"); };
  if (views_[LS_ROLE_EMBEDDING].data == nullptr) return missing(LS_ROLE_EMBEDDING);
  for (const Matrix &m : self.matrices()) {
    if (views_[m.id].data == nullptr) return missing(m.id);
    if (m.bias != 0 && views_[m.bias].data == nullptr) return missing(m.bias);
    if (Status status = linear_check(views_[m.id].dtype, m.slice); !status.ok()) return Status::fail(status.code, "the " + tensor_name(m.id) + " tensor on rank " + std::to_string(rank_) + ": " + status.text);
  }
  for (const Vector &v : self.vectors())
    if (views_[v.id].data == nullptr) return missing(v.id);
  return Status::good();
}

Status Weights::take(size_t bytes, void **out) {
  DeviceMemory memory;
  if (Status status = memory.alloc(bytes); !status.ok()) return status;
  *out = memory.as<void>();
  bytes_ += bytes;
  memory_.push_back(std::move(memory));
  return Status::good();
}

Status Weights::upload_vector(uint32_t id, uint32_t first, uint32_t count, const float **out) {
  const std::vector<float> values = vector_values(views_[id], first, count);
  void *memory = nullptr;
  if (Status status = take(values.size() * sizeof(float), &memory); !status.ok()) return status;
  *out = static_cast<const float *>(memory);
  return copy_now(memory, values.data(), values.size() * sizeof(float));
}

Status Weights::load(int device, uint32_t threads, std::atomic<int32_t> &permille) {
  if (Status status = check(); !status.ok()) return status;
  for (const Vector &v : vectors())
    if (Status status = upload_vector(v.id, v.first, v.count, v.out); !status.ok()) return status;
  if (!tied()) {
    const TensorView &view = views_[LS_ROLE_EMBEDDING];
    void *memory = nullptr;
    if (Status status = take(view.bytes, &memory); !status.ok()) return status;
    embedding_ = memory;
    if (Status status = copy_now(memory, view.data, view.bytes); !status.ok()) return status;
  }
  struct Piece {
    const TensorView *view;
    WeightSlice slice;
    uint32_t first, count;
    size_t tile_bytes;
    uint8_t *to;
  };
  std::vector<Piece> pieces;
  uint64_t total = 0;
  for (const Matrix &m : matrices()) {
    const TensorView &view = views_[m.id];
    *m.out = {view.dtype, m.slice.rows, m.slice.cols, nullptr, nullptr};
    const size_t bytes = linear_bytes(view.dtype, m.slice.rows, m.slice.cols), tile_bytes = linear_tile_bytes(view.dtype, m.slice.cols);
    void *memory = nullptr;
    if (Status status = take(bytes, &memory); !status.ok()) return status;
    m.out->data = memory;
    if (m.bias != 0)
      if (Status status = upload_vector(m.bias, m.bias_first, m.slice.rows, &m.out->bias); !status.ok()) return status;
    if (tile_bytes > kChunkBytes) return Status::fail(LS_UNSUPPORTED, "the " + tensor_name(m.id) + " tensor has " + std::to_string(m.slice.cols) + " inputs, more than the loader takes");
    const uint32_t tiles = linear_tiles(m.slice.rows), step = static_cast<uint32_t>(kChunkBytes / tile_bytes);
    for (uint32_t first = 0; first < tiles; first += step) pieces.push_back({&view, m.slice, first, std::min(step, tiles - first), tile_bytes, static_cast<uint8_t *>(memory)});
    total += bytes;
  }

  std::atomic<size_t> next{0};
  std::atomic<uint64_t> done{0};
  std::mutex mutex;
  Status failure;
  const auto work = [&] {
    Uploader uploader;
    Status status = use_device(device);
    if (status.ok()) status = uploader.init();
    for (size_t i; status.ok() && (i = next++) < pieces.size();) {
      const Piece &p = pieces[i];
      status = uploader.upload(*p.view, p.slice, p.first, p.count, p.tile_bytes, p.to);
      permille.store(static_cast<int32_t>((done += p.count * p.tile_bytes) * 999 / total), std::memory_order_relaxed);
    }
    if (Status ended = uploader.finish(); status.ok()) status = std::move(ended);
    if (status.ok()) return;
    next = pieces.size();
    const std::lock_guard lock(mutex);
    if (failure.ok()) failure = std::move(status);
  };
  std::vector<std::thread> helpers;
  for (uint32_t i = 1; i < threads; ++i) helpers.emplace_back(work);
  work();
  for (std::thread &helper : helpers) helper.join();
  return failure;
}

}  // namespace ls::cuda
