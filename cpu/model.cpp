#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <string>

namespace ls::cpu {
namespace {

constexpr uint32_t kParallelRows = 8;   // rows from which the small operations are shared out
constexpr uint32_t kFfnRows = 512;      // rows per pass of the feed-forward part: gate and up of a pass stay in the last-level cache

struct RoleName {
  uint32_t role;
  const char *name;
};
constexpr RoleName kRoleNames[] = {
    {LS_ROLE_EMBEDDING, "embedding"}, {LS_ROLE_FINAL_NORM, "final norm"}, {LS_ROLE_LM_HEAD, "lm head"}, {LS_ROLE_ATTN_NORM, "attention norm"}, {LS_ROLE_Q, "q"}, {LS_ROLE_K, "k"},
    {LS_ROLE_V, "v"}, {LS_ROLE_O, "o"}, {LS_ROLE_Q_BIAS, "q bias"}, {LS_ROLE_K_BIAS, "k bias"}, {LS_ROLE_V_BIAS, "v bias"}, {LS_ROLE_O_BIAS, "o bias"}, {LS_ROLE_Q_NORM, "q norm"},
    {LS_ROLE_K_NORM, "k norm"}, {LS_ROLE_FFN_NORM, "ffn norm"}, {LS_ROLE_GATE, "gate"}, {LS_ROLE_UP, "up"}, {LS_ROLE_DOWN, "down"}};

std::string tensor_name(uint32_t layer, uint32_t role) {
  for (const RoleName &r : kRoleNames)
    if (r.role == role) return std::string(r.name) + (role >= LS_ROLE_ATTN_NORM ? " of layer " + std::to_string(layer) : "");
  return "tensor " + std::to_string(layer * 256 + role);
}

// fn(first, count) over rows, in parallel when there are enough of them.
template <class F>
void share_rows(ThreadPool &pool, uint32_t rows, F &&fn) {
  if (rows < kParallelRows || pool.size() == 1) {
    fn(0u, rows);
    return;
  }
  const uint32_t per = std::max(2u, rows / (pool.size() * 4)), chunks = (rows + per - 1) / per;
  pool.run(chunks, [&](uint32_t i) { fn(i * per, std::min(per, rows - i * per)); });
}

AttentionShape attention_shape(const ls_config &c) { return {c.heads, c.kv_heads, c.head_dim, c.attn_scale}; }

}  // namespace

class Model::Timer {
 public:
  Timer(Profile *profile, Profile::Op op) : profile_(profile), op_(op) {
    if (profile_) start_ = now();
  }
  ~Timer() {
    if (profile_) profile_->ns[op_] += now() - start_;
  }
  Timer(const Timer &) = delete;
  Timer &operator=(const Timer &) = delete;

 private:
  uint64_t now() const {
    timespec t;
    clock_gettime(profile_->cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
  }
  Profile *profile_;
  Profile::Op op_;
  uint64_t start_ = 0;
};

Model::Model(const ls_config &config, const float *inv_freq, const OpsKernels &ops, const AttentionKernels &attention)
    : config_(config), inv_freq_(inv_freq, inv_freq + config.head_dim / 2), ops_(ops), views_(static_cast<size_t>(config.layers) * 256), layers_(config.layers),
      attention_(attention_shape(config), attention), sampled_attention_(attention_shape(config), attention) {}

Status Model::set(uint32_t id, const TensorView &view) {
  if (id >= views_.size()) return Status::fail(LS_INVALID, "tensor id " + std::to_string(id) + " is outside the model's " + std::to_string(config_.layers) + " layers");
  views_[id] = view;
  return Status::good();
}

Status Model::finish(ThreadPool &pool, std::atomic<int32_t> &permille) {
  const uint32_t total = config_.layers * 7 + 2;
  uint32_t done = 0;
  const auto missing = [](uint32_t layer, uint32_t role) { return Status::fail(LS_INVALID, "the " + tensor_name(layer, role) + " tensor is missing"); };
  const auto matrix = [&](uint32_t layer, uint32_t role, LinearPtr &out) {
    const TensorView &view = views_[layer * 256 + role];
    if (!view.data) return missing(layer, role);
    Status status = linear_prepare(view, pool, out);
    permille.store(static_cast<int32_t>(static_cast<uint64_t>(++done) * 999 / total));
    return status;
  };
  // A vector of one row is read through the same exact dequantisation as an embedding row.
  const auto vector = [&](uint32_t layer, uint32_t role, std::vector<float> &out, bool wanted) {
    if (!wanted) return Status::good();
    const TensorView &view = views_[layer * 256 + role];
    if (!view.data) return missing(layer, role);
    LinearPtr row;
    Status status = linear_prepare(view, pool, row);
    if (!status.ok()) return status;
    out.resize(view.cols);
    linear_row(*row, 0, out.data());
    return status;
  };
  Status status = matrix(0, LS_ROLE_EMBEDDING, embedding_);
  if (status.ok()) status = vector(0, LS_ROLE_FINAL_NORM, final_norm_, true);
  if (status.ok() && !config_.tied_embeddings) status = matrix(0, LS_ROLE_LM_HEAD, lm_head_);
  for (uint32_t l = 0; l < config_.layers && status.ok(); ++l) {
    Layer &w = layers_[l];
    const struct { uint32_t role; std::vector<float> *out; bool wanted; } vectors[] = {
        {LS_ROLE_ATTN_NORM, &w.attn_norm, true}, {LS_ROLE_FFN_NORM, &w.ffn_norm, true}, {LS_ROLE_Q_NORM, &w.q_norm, config_.qk_norm != 0}, {LS_ROLE_K_NORM, &w.k_norm, config_.qk_norm != 0},
        {LS_ROLE_Q_BIAS, &w.q_bias, config_.qkv_bias != 0}, {LS_ROLE_K_BIAS, &w.k_bias, config_.qkv_bias != 0}, {LS_ROLE_V_BIAS, &w.v_bias, config_.qkv_bias != 0},
        {LS_ROLE_O_BIAS, &w.o_bias, config_.o_bias != 0}};
    const struct { uint32_t role; LinearPtr *out; } matrices[] = {
        {LS_ROLE_Q, &w.q}, {LS_ROLE_K, &w.k}, {LS_ROLE_V, &w.v}, {LS_ROLE_O, &w.o}, {LS_ROLE_GATE, &w.gate}, {LS_ROLE_UP, &w.up}, {LS_ROLE_DOWN, &w.down}};
    for (const auto &one : vectors)
      if (status.ok()) status = vector(l, one.role, *one.out, one.wanted);
    for (const auto &one : matrices)
      if (status.ok()) status = matrix(l, one.role, *one.out);
  }
  if (!status.ok()) return status;
  views_.clear();
  views_.shrink_to_fit();
  permille.store(1000);
  return status;
}

void Model::plan(ThreadPool &pool, const StepBatch &batch) {
  const uint32_t half = config_.head_dim / 2;
  spans_.clear();
  positions_.clear();
  sampled_.clear();
  sequences_.clear();
  sampled_sequences_.clear();
  uint32_t row = 0;
  for (const StepRow &r : batch.rows) {
    sequences_.push_back({row, r.start, r.len, r.pages});
    for (uint32_t i = 0; i < r.len;) {
      const uint32_t position = r.start + i, slot = position % kPageTokens, count = std::min(kPageTokens - slot, r.len - i);
      spans_.push_back({row + i, count, static_cast<uint32_t>(r.pages[position / kPageTokens]), slot});
      i += count;
    }
    for (uint32_t i = 0; i < r.len; ++i) positions_.push_back(r.start + i);
    if (r.sample) {
      sampled_sequences_.push_back({static_cast<uint32_t>(sampled_.size()), r.start + r.len - 1, 1, r.pages});
      sampled_.push_back(row + r.len - 1);
    }
    row += r.len;
  }
  tokens_ = row;
  if (config_.layers > 1 || sampled_.size() == tokens_) attention_.plan(sequences_, pool.size());
  if (!sampled_.empty() && sampled_.size() != tokens_) sampled_attention_.plan(sampled_sequences_, pool.size());

  const uint32_t q_dim = config_.heads * config_.head_dim, kv_dim = config_.kv_heads * config_.head_dim, ffn = std::min(tokens_, kFfnRows);
  x_.ensure(static_cast<size_t>(tokens_) * config_.hidden);
  h_.ensure(static_cast<size_t>(tokens_) * config_.hidden);
  q_.ensure(static_cast<size_t>(tokens_) * q_dim);
  mixed_.ensure(static_cast<size_t>(tokens_) * q_dim);
  k_.ensure(static_cast<size_t>(tokens_) * kv_dim);
  v_.ensure(static_cast<size_t>(tokens_) * kv_dim);
  gate_.ensure(static_cast<size_t>(ffn) * config_.intermediate);
  up_.ensure(static_cast<size_t>(ffn) * config_.intermediate);
  sampled_x_.ensure(sampled_.size() * config_.hidden);

  // cos and sin once for all layers: the angle in f32, as the reference has it, its cosine exact to f32.
  float *cos = cos_.ensure(static_cast<size_t>(tokens_) * half), *sin = sin_.ensure(static_cast<size_t>(tokens_) * half);
  share_rows(pool, tokens_, [&](uint32_t first, uint32_t count) {
    for (uint32_t t = first; t < first + count; ++t) {
      for (uint32_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(positions_[t]) * inv_freq_[i];
        cos[static_cast<size_t>(t) * half + i] = static_cast<float>(std::cos(static_cast<double>(angle))) * config_.rope_scale;
        sin[static_cast<size_t>(t) * half + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * config_.rope_scale;
      }
    }
  });
}

void Model::embed(ThreadPool &pool, const StepBatch &batch) {
  Timer timer(profile_, Profile::embed);
  share_rows(pool, static_cast<uint32_t>(spans_.size()), [&](uint32_t first, uint32_t count) {
    uint32_t sequence = 0;
    for (uint32_t s = first; s < first + count; ++s) {
      while (sequence + 1 < sequences_.size() && sequences_[sequence + 1].first_row <= spans_[s].row) ++sequence;
      for (uint32_t i = 0; i < spans_[s].count; ++i) {
        const uint32_t row = spans_[s].row + i;
        linear_row(*embedding_, static_cast<uint32_t>(batch.rows[sequence].tokens[row - sequences_[sequence].first_row]), x_.data() + static_cast<size_t>(row) * config_.hidden);
      }
    }
  });
}

void Model::norm(ThreadPool &pool, const float *x, const float *weight, float *y, uint32_t rows) {
  Timer timer(profile_, Profile::norm);
  const size_t n = config_.hidden;
  share_rows(pool, rows, [&](uint32_t first, uint32_t count) {
    for (size_t r = first; r < first + count; ++r) ops_.rmsnorm(x + r * n, weight, y + r * n, config_.hidden, config_.rms_eps);
  });
}

// One token's query heads: norm per head, then rope. token gives the position.
void Model::rotate(const Layer &layer, float *q, uint32_t token) {
  const uint32_t dim = config_.head_dim, half = dim / 2;
  if (config_.qk_norm)
    for (uint32_t h = 0; h < config_.heads; ++h) ops_.rmsnorm(q + h * dim, layer.q_norm.data(), q + h * dim, dim, config_.rms_eps);
  ops_.rope(q, cos_.data() + static_cast<size_t>(token) * half, sin_.data() + static_cast<size_t>(token) * half, config_.heads, dim, static_cast<ls_rope_style>(config_.rope_style));
}

void Model::rotate_and_store(ThreadPool &pool, const Layer &layer, uint32_t index, const KvMemory &memory, bool with_q) {
  Timer timer(profile_, Profile::rope_kv);
  const uint32_t dim = config_.head_dim, half = dim / 2;
  const size_t q_dim = static_cast<size_t>(config_.heads) * dim, kv_dim = static_cast<size_t>(config_.kv_heads) * dim;
  share_rows(pool, static_cast<uint32_t>(spans_.size()), [&](uint32_t first, uint32_t count) {
    for (uint32_t s = first; s < first + count; ++s) {
      const Span &span = spans_[s];
      for (uint32_t i = 0; i < span.count; ++i) {
        const uint32_t token = span.row + i;
        if (with_q) rotate(layer, q_.data() + token * q_dim, token);
        float *k = k_.data() + token * kv_dim;
        if (config_.qk_norm)
          for (uint32_t h = 0; h < config_.kv_heads; ++h) ops_.rmsnorm(k + h * dim, layer.k_norm.data(), k + h * dim, dim, config_.rms_eps);
        ops_.rope(k, cos_.data() + static_cast<size_t>(token) * half, sin_.data() + static_cast<size_t>(token) * half, config_.kv_heads, dim, static_cast<ls_rope_style>(config_.rope_style));
        memory.store(index, span.page, span.slot + i, k, v_.data() + token * kv_dim);
      }
    }
  });
}

void Model::feed_forward(ThreadPool &pool, const Layer &layer, float *x, uint32_t rows) {
  const uint32_t hidden = config_.hidden, wide = config_.intermediate;
  norm(pool, x, layer.ffn_norm.data(), h_.data(), rows);
  for (uint32_t first = 0; first < rows; first += kFfnRows) {
    const uint32_t count = std::min(kFfnRows, rows - first);
    {
      Timer timer(profile_, Profile::gate_up);
      const LinearOut outs[2] = {{layer.gate.get(), nullptr, gate_.data(), wide, false}, {layer.up.get(), nullptr, up_.data(), wide, false}};
      linear_forward(pool, h_.data() + static_cast<size_t>(first) * hidden, count, hidden, outs, 2);
    }
    {
      Timer timer(profile_, Profile::silu);
      share_rows(pool, count, [&](uint32_t r, uint32_t n) {
        const size_t at = static_cast<size_t>(r) * wide;
        ops_.silu_mul(gate_.data() + at, up_.data() + at, gate_.data() + at, n * wide);
      });
    }
    Timer timer(profile_, Profile::down);
    const LinearOut out = {layer.down.get(), nullptr, x + static_cast<size_t>(first) * hidden, hidden, true};
    linear_forward(pool, gate_.data(), count, wide, &out, 1);
  }
}

// Of the last layer only K and V of every token, and the rest for the tokens that sample.
void Model::last_layer(ThreadPool &pool, const Layer &layer, const KvMemory &memory, LayerHook *hook) {
  const uint32_t hidden = config_.hidden, q_dim = config_.heads * config_.head_dim, kv_dim = config_.kv_heads * config_.head_dim, count = static_cast<uint32_t>(sampled_.size());
  norm(pool, x_.data(), layer.attn_norm.data(), h_.data(), tokens_);
  {
    Timer timer(profile_, Profile::qkv);
    const LinearOut outs[2] = {{layer.k.get(), layer.k_bias.empty() ? nullptr : layer.k_bias.data(), k_.data(), kv_dim, false},
                               {layer.v.get(), layer.v_bias.empty() ? nullptr : layer.v_bias.data(), v_.data(), kv_dim, false}};
    linear_forward(pool, h_.data(), tokens_, hidden, outs, 2);
  }
  rotate_and_store(pool, layer, config_.layers - 1, memory, false);
  if (hook) hook->layer_stored(config_.layers - 1);
  if (!count) return;
  // sampled_ rises and i <= sampled_[i], so rows can move up in place.
  for (uint32_t i = 0; i < count; ++i) {
    std::memmove(h_.data() + static_cast<size_t>(i) * hidden, h_.data() + static_cast<size_t>(sampled_[i]) * hidden, hidden * sizeof(float));
    std::memcpy(sampled_x_.data() + static_cast<size_t>(i) * hidden, x_.data() + static_cast<size_t>(sampled_[i]) * hidden, hidden * sizeof(float));
  }
  {
    Timer timer(profile_, Profile::qkv);
    const LinearOut out = {layer.q.get(), layer.q_bias.empty() ? nullptr : layer.q_bias.data(), q_.data(), q_dim, false};
    linear_forward(pool, h_.data(), count, hidden, &out, 1);
    for (uint32_t i = 0; i < count; ++i) rotate(layer, q_.data() + static_cast<size_t>(i) * q_dim, sampled_[i]);
  }
  {
    Timer timer(profile_, Profile::attention);
    sampled_attention_.run(pool, memory, config_.layers - 1, q_.data(), mixed_.data());
  }
  {
    Timer timer(profile_, Profile::out_proj);
    const LinearOut out = {layer.o.get(), layer.o_bias.empty() ? nullptr : layer.o_bias.data(), sampled_x_.data(), hidden, true};
    linear_forward(pool, mixed_.data(), count, q_dim, &out, 1);
  }
  feed_forward(pool, layer, sampled_x_.data(), count);
}

const float *Model::forward(ThreadPool &pool, const StepBatch &batch, const KvMemory &memory) {
  plan(pool, batch);
  embed(pool, batch);
  const uint32_t hidden = config_.hidden, q_dim = config_.heads * config_.head_dim, kv_dim = config_.kv_heads * config_.head_dim;
  const bool all_sample = sampled_.size() == tokens_;
  for (uint32_t l = 0; l < config_.layers; ++l) {
    const Layer &layer = layers_[l];
    if (l + 1 == config_.layers && !all_sample) {
      last_layer(pool, layer, memory, batch.hook);
      break;
    }
    norm(pool, x_.data(), layer.attn_norm.data(), h_.data(), tokens_);
    {
      Timer timer(profile_, Profile::qkv);
      const LinearOut outs[3] = {{layer.q.get(), layer.q_bias.empty() ? nullptr : layer.q_bias.data(), q_.data(), q_dim, false},
                                 {layer.k.get(), layer.k_bias.empty() ? nullptr : layer.k_bias.data(), k_.data(), kv_dim, false},
                                 {layer.v.get(), layer.v_bias.empty() ? nullptr : layer.v_bias.data(), v_.data(), kv_dim, false}};
      linear_forward(pool, h_.data(), tokens_, hidden, outs, 3);
    }
    rotate_and_store(pool, layer, l, memory, true);
    if (batch.hook) batch.hook->layer_stored(l);
    {
      Timer timer(profile_, Profile::attention);
      attention_.run(pool, memory, l, q_.data(), mixed_.data());
    }
    {
      Timer timer(profile_, Profile::out_proj);
      const LinearOut out = {layer.o.get(), layer.o_bias.empty() ? nullptr : layer.o_bias.data(), x_.data(), hidden, true};
      linear_forward(pool, mixed_.data(), tokens_, q_dim, &out, 1);
    }
    feed_forward(pool, layer, x_.data(), tokens_);
  }
  if (sampled_.empty()) return nullptr;
  float *last = all_sample ? x_.data() : sampled_x_.data();
  norm(pool, last, final_norm_.data(), last, static_cast<uint32_t>(sampled_.size()));
  return last;
}

void Model::head(ThreadPool &pool, const float *hidden, uint32_t count, float *logits) {
  Timer timer(profile_, Profile::head);
  const Linear *w = config_.tied_embeddings ? embedding_.get() : lm_head_.get();
  const LinearOut out = {w, nullptr, logits, config_.vocab, false};
  linear_forward(pool, hidden, count, config_.hidden, &out, 1);
}

}  // namespace ls::cpu
