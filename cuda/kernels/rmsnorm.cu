// Root-mean-square norm: a block a row.   x, delta (., n)    weight (n)    y (rows, n)
#include "rmsnorm.h"

#include "elements.cuh"

namespace ls::cuda {
namespace {

constexpr int kThreads = 256;

template <class Delta, class Y, bool kVector>
LS_KERNEL LS_BOUNDS(kThreads, 1) void rmsnorm_kernel(RmsNorm a) {
  LS_SHARED(float, scratch, kThreads / 32);
  const int32_t from = a.index ? a.index[block_x()] : static_cast<int32_t>(block_x());
  if (from < 0) return;  // the whole block
  const uint32_t n = a.n;
  float *x = a.x + static_cast<size_t>(from) * n;
  const Delta *delta = a.delta ? static_cast<const Delta *>(a.delta) + static_cast<size_t>(from) * n : nullptr;
  Y *y = static_cast<Y *>(a.y) + static_cast<size_t>(block_x()) * n;

  // The second pass reads what this thread wrote in the first, out of the cache.
  float sum = 0;
  if constexpr (kVector) {
    for (uint32_t i = thread_x() * 4; i < n; i += kThreads * 4) {
      Float4 v = load_elements4(x + i);
      if (delta) {
        const Float4 d = load_elements4(delta + i);
        for (int e = 0; e < 4; ++e) v.v[e] += d.v[e];
        store_elements4(x + i, v);
      }
      for (int e = 0; e < 4; ++e) sum = fma_rn(v.v[e], v.v[e], sum);
    }
  } else {
    for (uint32_t i = thread_x(); i < n; i += kThreads) {
      float v = x[i];
      if (delta) x[i] = v += load_element(delta + i);
      sum = fma_rn(v, v, sum);
    }
  }
  const float scale = 1.0f / sqrtf(block_sum<kThreads>(sum, scratch) / static_cast<float>(n) + a.eps);
  if constexpr (kVector) {
    for (uint32_t i = thread_x() * 4; i < n; i += kThreads * 4) {
      Float4 v = load_elements4(x + i);
      const Float4 w = load_elements4(a.weight + i);
      for (int e = 0; e < 4; ++e) v.v[e] = v.v[e] * scale * w.v[e];
      store_elements4(y + i, v);
    }
  } else {
    for (uint32_t i = thread_x(); i < n; i += kThreads) store_element(y + i, x[i] * scale * a.weight[i]);
  }
}

LS_KERNEL LS_BOUNDS(kThreads, 1) void gather_rows_kernel(const uint32_t *from, const int32_t *index, uint32_t *to, uint32_t words) {
  const int32_t row = index[block_x()];
  if (row < 0) return;
  for (uint32_t i = thread_x(); i < words; i += kThreads) to[static_cast<size_t>(block_x()) * words + i] = from[static_cast<size_t>(row) * words + i];
}

template <class Delta, class Y>
void run(Stream stream, const RmsNorm &args) {
  if (args.n % 4 == 0) launch(rmsnorm_kernel<Delta, Y, true>, Dim{args.rows}, Dim{kThreads}, 0, stream, args);
  else launch(rmsnorm_kernel<Delta, Y, false>, Dim{args.rows}, Dim{kThreads}, 0, stream, args);
}

}  // namespace

void rmsnorm(Stream stream, const RmsNorm &args) {
  const bool wide_delta = args.delta && args.delta_type == Element::f32;
  if (args.y_type == Element::f32) return wide_delta ? run<float, float>(stream, args) : run<bf16, float>(stream, args);
  wide_delta ? run<float, bf16>(stream, args) : run<bf16, bf16>(stream, args);
}

void gather_rows(Stream stream, const void *from, const int32_t *index, void *to, uint32_t rows, uint32_t bytes) {
  launch(gather_rows_kernel, Dim{rows}, Dim{kThreads}, 0, stream, static_cast<const uint32_t *>(from), index, static_cast<uint32_t *>(to), bytes / 4);
}

}  // namespace ls::cuda
