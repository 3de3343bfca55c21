// Angles of a step, and q, k, v of one layer made ready for attention.
//   table (tokens, half, {cos, sin})    q, k, v rows as QkvPrepare has them    pages as kv_layout.h has them
#include "rope.h"

#include <cmath>

#include "elements.cuh"

namespace ls::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kPairs = kMaxHeadDim / 2 / static_cast<int>(kWarp);  // of a lane

// {cos, sin} of an f32 angle of any size: reduced to a quarter turn in double, then polynomials in f32.
LS_DEVICE Bytes8 cos_sin(float angle, float factor) {
  const double turns = rint(static_cast<double>(angle) * 0.63661977236758134308);
  const float x = static_cast<float>(fma(turns, -1.57079632679489661923, static_cast<double>(angle))), z = x * x;
  const float s = fma_rn(fma_rn(fma_rn(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f), z * x, x);
  const float c = fma_rn(fma_rn(fma_rn(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f), z * z, fma_rn(-0.5f, z, 1.0f));
  const int quarter = static_cast<int>(turns) & 3;  // positions are below 2^24
  const float cosine = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s, sine = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
  return {{bits_as<uint32_t>(cosine * factor), bits_as<uint32_t>(sine * factor)}};
}

LS_KERNEL LS_BOUNDS(kThreads, 1) void rope_table_kernel(const int32_t *positions, const float *inv_freq, uint32_t half, uint32_t count, float factor, Bytes8 *table) {
  const uint32_t i = block_x() * kThreads + thread_x();
  if (i < count) table[i] = cos_sin(static_cast<float>(positions[i / half]) * inv_freq[i % half], factor);
}

LS_DEVICE void store_kv(uint8_t *row, uint32_t i, float value, KvType type, float scale) {
  if (type == KvType::bf16) reinterpret_cast<bf16 *>(row)[i] = __float2bfloat16(value);
  else row[i] = __nv_cvt_float_to_fp8(value / scale, __NV_SATFINITE, type == KvType::e4m3 ? __NV_E4M3 : __NV_E5M2);
}

// A warp takes one head of one token: heads of q, then of k, then of v. Lane l holds pairs l, l + 32, ...
template <class T>
LS_KERNEL LS_BOUNDS(kThreads, 1) void qkv_prepare_kernel(QkvPrepare a) {
  const uint32_t token = block_x(), lane = lane_id(), dim = a.layout.head_dim, half = dim / 2, kv_heads = a.k ? a.layout.kv_heads : 0, q_heads = a.q ? a.heads : 0;
  const uint32_t head = block_y() * (kThreads / kWarp) + warp_id();
  if (head >= q_heads + 2 * kv_heads) return;  // the whole warp
  const bool is_q = head < q_heads, is_v = head >= q_heads + kv_heads;
  const uint32_t kv_head = (head - q_heads) % (kv_heads ? kv_heads : 1);
  const int32_t place = is_q ? 0 : a.places[token];
  if (place < 0) return;

  const T *in = is_q ? static_cast<const T *>(a.q) + static_cast<size_t>(token) * a.q_ld + head * dim : static_cast<const T *>(is_v ? a.v : a.k) + static_cast<size_t>(token) * a.kv_ld + kv_head * dim;
  const float *norm = is_v ? nullptr : is_q ? a.q_norm : a.k_norm;
  const bool split = a.style == LS_ROPE_HALF;  // elements p and p + half are a pair, else 2p and 2p + 1
  const auto first = [&](uint32_t p) { return split ? p : 2 * p; };
  const auto second = [&](uint32_t p) { return split ? p + half : 2 * p + 1; };

  float x[kPairs], y[kPairs], sum = 0;
  LS_UNROLL
  for (int j = 0; j < kPairs; ++j) {
    const uint32_t p = lane + static_cast<uint32_t>(j) * kWarp;
    x[j] = p < half ? load_element(in + first(p)) : 0;
    y[j] = p < half ? load_element(in + second(p)) : 0;
    sum = fma_rn(x[j], x[j], fma_rn(y[j], y[j], sum));
  }
  const float scale = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(dim) + a.eps);

  const Bytes8 *angles = reinterpret_cast<const Bytes8 *>(a.table) + static_cast<size_t>(a.index ? a.index[token] : static_cast<int32_t>(token)) * half;
  bf16 *q_out = is_q ? static_cast<bf16 *>(a.q_out) + (static_cast<size_t>(token) * a.heads + head) * dim : nullptr;
  const uint32_t row_elements = a.layout.row_elements(), slot = static_cast<uint32_t>(place) % kPageTokens;
  uint8_t *row = nullptr;
  if (!is_q) row = static_cast<uint8_t *>(a.pages) + static_cast<size_t>(static_cast<uint32_t>(place) / kPageTokens) * a.layout.page_bytes() + (2 * kv_head + is_v) * a.layout.block_bytes() + slot * row_elements * a.layout.element_bytes();
  const float kv_scale = is_v ? a.scales.v : a.scales.k;
  LS_UNROLL
  for (int j = 0; j < kPairs; ++j) {
    const uint32_t p = lane + static_cast<uint32_t>(j) * kWarp;
    if (p >= half) continue;
    float u = x[j], w = y[j];
    if (norm) u = u * scale * norm[first(p)], w = w * scale * norm[second(p)];
    if (!is_v) {
      const Bytes8 angle = angles[p];
      const float cosine = bits_as<float>(angle.word[0]), sine = bits_as<float>(angle.word[1]), turned = u * cosine - w * sine;
      w = w * cosine + u * sine;
      u = turned;
    }
    if (is_q) {
      q_out[first(p)] = __float2bfloat16(u);
      q_out[second(p)] = __float2bfloat16(w);
    } else {
      store_kv(row, first(p), u, a.layout.type, kv_scale);
      store_kv(row, second(p), w, a.layout.type, kv_scale);
    }
  }
  if (!is_q && lane < row_elements - dim) store_kv(row, dim + lane, 0, a.layout.type, 1);
}

}  // namespace

void rope_table(Stream stream, const int32_t *positions, const float *inv_freq, uint32_t tokens, uint32_t head_dim, float rope_scale, float *table) {
  const uint32_t half = head_dim / 2, count = tokens * half;
  launch(rope_table_kernel, Dim{(count + kThreads - 1) / kThreads}, Dim{kThreads}, 0, stream, positions, inv_freq, half, count, rope_scale, reinterpret_cast<Bytes8 *>(table));
}

void qkv_prepare(Stream stream, const QkvPrepare &args) {
  const uint32_t heads = (args.q ? args.heads : 0) + (args.k ? 2 * args.layout.kv_heads : 0), warps = kThreads / kWarp;
  const Dim grid{args.tokens, (heads + warps - 1) / warps};
  if (args.type == Element::f32) launch(qkv_prepare_kernel<float>, grid, Dim{kThreads}, 0, stream, args);
  else launch(qkv_prepare_kernel<bf16>, grid, Dim{kThreads}, 0, stream, args);
}

}  // namespace ls::cuda
