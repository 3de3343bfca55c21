// Sequences with their K and V in pages as the CUDA device keeps them, and attention by its definition in double precision.
#pragma once
#include <cmath>
#include <random>
#include <vector>

#include "../device.h"
#include "guarded.h"
#include "kernels/attention.h"

namespace ls::cuda::cases {

struct Shape {
  uint32_t heads, kv_heads, head_dim;
  KvType type = KvType::bf16;
  KvScales scales = {};
  uint32_t group() const { return heads / kv_heads; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
  KvLayout layout() const { return {kv_heads, head_dim, type}; }
};

inline uint16_t bf16_bits(float x) { return bits_as<uint16_t>(__float2bfloat16(x)); }
inline float bf16_value(uint16_t bits) { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }
inline uint8_t fp8_bits(float x, KvType type) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, type == KvType::e4m3 ? __NV_E4M3 : __NV_E5M2); }
inline float fp8_value(uint8_t bits, KvType type) {
  const int exponent_bits = type == KvType::e4m3 ? 4 : 5, mantissa_bits = 7 - exponent_bits, bias = type == KvType::e4m3 ? 7 : 15;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1), mantissa = bits & ((1 << mantissa_bits) - 1);
  const double size = exponent ? std::ldexp(1.0 + std::ldexp(mantissa, -mantissa_bits), exponent - bias) : std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return static_cast<float>(bits & 0x80 ? -size : size);
}

// `contexts` tokens of K and V for each sequence, under page ids in random order; what no token was written to is all ones (NaN as bf16).
class Pages {
 public:
  Pages(const Shape &shape, const std::vector<uint32_t> &contexts, uint64_t seed) : shape_(shape), random_(seed), memory_(bytes(shape, contexts)), table_(pages(contexts)) {
    std::vector<int32_t> ids(table_.size());
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    std::shuffle(ids.begin(), ids.end(), random_);
    std::copy(ids.begin(), ids.end(), table_.data());
    const KvLayout layout = shape.layout();
    const uint32_t row = layout.row_elements(), dim = shape.head_dim;
    std::normal_distribution<float> normal;
    int32_t offset = 0;
    for (uint32_t context : contexts) {
      offsets_.push_back(offset);
      auto &values = values_.emplace_back(size_t{2} * context * shape.kv_heads * dim);
      for (uint32_t t = 0; t < context; ++t)
        for (uint32_t h = 0; h < shape.kv_heads; ++h)
          for (uint32_t side = 0; side < 2; ++side)
            for (uint32_t d = 0; d < row; ++d) {
              const float x = d < dim ? normal(random_) * (side ? 1 : 1.5f) : 0, scale = side ? shape.scales.v : shape.scales.k;
              uint8_t *at = memory_.data() + static_cast<size_t>(ids[static_cast<uint32_t>(offset) + t / 16]) * layout.page_bytes() + (2 * h + side) * layout.block_bytes() + (t % 16 * row + d) * layout.element_bytes();
              float stored;
              if (shape.type == KvType::bf16) {
                const uint16_t bits = bf16_bits(x);
                std::memcpy(at, &bits, 2);
                stored = bf16_value(bits);
              } else {
                *at = fp8_bits(x / scale, shape.type);
                stored = fp8_value(*at, shape.type) * scale;
              }
              if (d < dim) values[((size_t{side} * context + t) * shape.kv_heads + h) * dim + d] = stored;
            }
      offset += static_cast<int32_t>((context + 15) / 16);
    }
  }
  const uint8_t *memory() const { return memory_.data(); }
  const int32_t *table() const { return table_.data(); }
  int32_t offset(size_t sequence) const { return offsets_[sequence]; }

  // Attention of one query (rounded to bf16 by the caller) of head `head` at `position`.
  std::vector<double> reference(size_t sequence, const uint16_t *q, uint32_t head, uint32_t position) const {
    const uint32_t dim = shape_.head_dim, kv = head / shape_.group();
    const std::vector<float> &values = values_[sequence];
    const size_t context = values.size() / (size_t{2} * shape_.kv_heads * dim);
    std::vector<double> scores(position + 1), out(dim);
    double top = -1e300, sum = 0;
    for (uint32_t t = 0; t <= position; ++t) {
      for (uint32_t d = 0; d < dim; ++d) scores[t] += static_cast<double>(bf16_value(q[d])) * values[(size_t{t} * shape_.kv_heads + kv) * dim + d] * shape_.scale();
      top = std::max(top, scores[t]);
    }
    for (double &s : scores) sum += s = std::exp(s - top);
    for (uint32_t t = 0; t <= position; ++t)
      for (uint32_t d = 0; d < dim; ++d) out[d] += scores[t] / sum * values[((context + t) * shape_.kv_heads + kv) * dim + d];
    return out;
  }

 private:
  static size_t pages(const std::vector<uint32_t> &contexts) {
    size_t n = 0;
    for (uint32_t c : contexts) n += (c + 15) / 16;
    return n;
  }
  static size_t bytes(const Shape &shape, const std::vector<uint32_t> &contexts) { return pages(contexts) * shape.layout().page_bytes(); }

  Shape shape_;
  std::mt19937_64 random_;
  Guarded<uint8_t> memory_;
  Guarded<int32_t> table_;
  std::vector<int32_t> offsets_;
  std::vector<std::vector<float>> values_;
};

// The rows of a step over these pages; row i is sequence i. Returns out (tokens, heads * head_dim).
struct StepResult {
  std::vector<uint16_t> out;
  AttentionPlan plan;
};
inline std::vector<uint16_t> random_queries(size_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, 1.5f);
  std::vector<uint16_t> q(n);
  for (uint16_t &x : q) x = bf16_bits(normal(random));
  return q;
}
inline StepResult run_step(const Shape &shape, const Pages &pages, std::vector<AttentionRow> rows, const std::vector<uint16_t> &queries, uint32_t capacity, uint32_t grid = 0) {
  const Guarded<uint16_t> q(queries);
  Guarded<uint16_t> out(queries.size());
  StepResult result;
  plan_attention(rows.data(), static_cast<uint32_t>(rows.size()), shape.group(), shape.head_dim, capacity, result.plan);
  const AttentionPlan &plan = result.plan;
  const Guarded<AttentionTile> split(plan.split), block(plan.block);
  const Guarded<AttentionFold> folds(plan.folds);
  Guarded<uint8_t> partial(attention_partial_bytes(capacity, shape.kv_heads, shape.head_dim));
  const Guarded<int32_t> counts(std::vector<int32_t>{static_cast<int32_t>(plan.split.size()), static_cast<int32_t>(plan.folds.size()), static_cast<int32_t>(plan.block.size())});
  const AttentionArgs args{q.data(), out.data(), pages.memory(), pages.table(), shape.layout(), shape.scales, shape.heads, shape.scale(), partial.data(), capacity};
  // By default one block more than there is work for.
  const auto blocks = [&](size_t n) { return grid ? grid : static_cast<uint32_t>(n) + 1; };
  attention_split(nullptr, args, split.data(), counts.data(), blocks(plan.split.size()));
  attention_fold(nullptr, args, folds.data(), counts.data() + 1, blocks(plan.folds.size()));
  attention_block(nullptr, args, block.data(), counts.data() + 2, blocks(plan.block.size()));
  finish();
  out.check_surroundings();
  result.out = out.values();
  return result;
}

}  // namespace ls::cuda::cases
