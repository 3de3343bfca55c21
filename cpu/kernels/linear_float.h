// Products with f32, f16 and bf16 weights as stored (included per ISA, see cpu.cmake).
//
// One order per output, for any number of tokens and any tile shape: lane l of one accumulator vector takes k = l, l+W, l+2W, ... by fma, the last
// step with zeros beyond K, and the lanes are added by hsum's fixed tree. Every path below does exactly that.
#pragma once
#include "../linear_kernels.h"
#include "../simd.h"

namespace ls::cpu::LS_SIMD_NS {

struct AsF32 {
  static constexpr size_t bytes = 4;
  LS_SIMD_INLINE vf get(const uint8_t *p) { return load(reinterpret_cast<const float *>(p)); }
  LS_SIMD_INLINE vf get_n(const uint8_t *p, int n) { return load_n(reinterpret_cast<const float *>(p), n); }
};
struct AsF16 {
  static constexpr size_t bytes = 2;
  LS_SIMD_INLINE vf get(const uint8_t *p) { return load_f16(p); }
  LS_SIMD_INLINE vf get_n(const uint8_t *p, int n) { return load_f16_n(p, n); }
};
struct AsBf16 {
  static constexpr size_t bytes = 2;
  LS_SIMD_INLINE vf get(const uint8_t *p) { return load_bf16(p); }
  LS_SIMD_INLINE vf get_n(const uint8_t *p, int n) { return load_bf16_n(p, n); }
};

// The token tile for what a tile of T leaves over.
constexpr int smaller_tile(int t) { return t > 4 ? 4 : t > 2 ? 2 : 1; }

// Finished sums of four neighbouring rows of one token. The order sum, + bias, + old value is the same in put1.
LS_SIMD_INLINE void put4(const LinearTarget &out, uint32_t t, uint32_t row, __m128 sum) {
  float *y = out.y + t * out.ldy + row;
  if (out.bias) sum = _mm_add_ps(sum, _mm_loadu_ps(out.bias + row));
  if (out.accumulate) sum = _mm_add_ps(_mm_loadu_ps(y), sum);
  _mm_storeu_ps(y, sum);
}
LS_SIMD_INLINE void put1(const LinearTarget &out, uint32_t t, uint32_t row, float sum) {
  float *y = out.y + t * out.ldy + row;
  if (out.bias) sum = sum + out.bias[row];
  *y = out.accumulate ? *y + sum : sum;
}

template <int R, int T>
LS_SIMD_INLINE void put_tile(const LinearTarget &out, uint32_t t0, uint32_t row, const vf (&acc)[R][T]) {
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
    if constexpr (R % 4 == 0) {
#pragma GCC unroll 16
      for (int i = 0; i < R; i += 4) put4(out, t0 + t, row + i, hsum4(acc[i][t], acc[i + 1][t], acc[i + 2][t], acc[i + 3][t]));
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) put1(out, t0 + t, row + i, hsum(acc[i][t]));
    }
  }
}

// Few tokens: R rows x T tokens straight from the stored weights, which stream from memory once. Each step takes a line of R rows and prefetches R
// lines in memory order, one block of rows and a little ahead: rows lie one behind the other, so DRAM and TLB see a single stream without gaps.
constexpr int kStreamRows = W == 8 ? 4 : 8;  // one token: enough sums to hide the latency of fma
constexpr size_t kPrefetchAhead = 4096;  // bytes beyond the next block of rows

template <class Fmt, int R, int T>
void stream_tile(const FloatMatrix &w, uint32_t row, const float *x, size_t ldx, uint32_t t0, const LinearTarget &out) {
  constexpr uint32_t kLine = 64 / Fmt::bytes;  // columns per cache line of weights
  const size_t stride = static_cast<size_t>(w.cols) * Fmt::bytes;
  const uint8_t *p = w.data + row * stride;
  const uint8_t *ahead = p + R * stride + kPrefetchAhead;
  const float *xt = x + t0 * ldx;
  vf acc[R][T];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) acc[i][t] = zero();
  uint32_t k = 0;
  for (; k + kLine <= w.cols; k += kLine) {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) prefetch(ahead + i * 64);
    ahead += R * 64;
#pragma GCC unroll 16
    for (uint32_t s = 0; s < kLine; s += W) {
      vf xv[T];
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) xv[t] = load(xt + t * ldx + k + s);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const vf wv = Fmt::get(p + i * stride + (k + s) * Fmt::bytes);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) acc[i][t] = fma(wv, xv[t], acc[i][t]);
      }
    }
  }
  for (; k < w.cols; k += W) {
    const int n = static_cast<int>(w.cols - k) < W ? static_cast<int>(w.cols - k) : W;
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const vf wv = Fmt::get_n(p + i * stride + k * Fmt::bytes, n);
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) acc[i][t] = fma(wv, load_n(xt + t * ldx + k, n), acc[i][t]);
    }
  }
  put_tile<R, T>(out, t0, row, acc);
}

// Tokens [t, m) of R rows in tiles of T, the rest in smaller ones; the rows stay in L1 meanwhile.
template <class Fmt, int R, int T>
void stream_tokens(const FloatMatrix &w, uint32_t row, const float *x, uint32_t t, uint32_t m, size_t ldx, const LinearTarget &out) {
  for (; t + T <= m; t += T) stream_tile<Fmt, R, T>(w, row, x, ldx, t, out);
  if constexpr (T > 1) {
    if (t < m) stream_tokens<Fmt, R, smaller_tile(T)>(w, row, x, t, m, ldx, out);
  }
}

template <class Fmt, int R, int T>
void stream_rows(const FloatMatrix &w, uint32_t row0, uint32_t row1, const float *x, uint32_t m, size_t ldx, const LinearTarget &out) {
  uint32_t row = row0;
  for (; row + R <= row1; row += R) stream_tokens<Fmt, R, T>(w, row, x, 0, m, ldx, out);
  for (; row < row1; ++row) stream_tokens<Fmt, 1, 1>(w, row, x, 0, m, ldx, out);
}

// Many tokens: R rows are widened to f32 once per token block, interleaved as strip[step][row][W] so that one pointer walks them, and R x T
// accumulators stay in registers.
constexpr uint32_t kStreamTokens = W == 8 ? 8 : 6;  // up to here widening on the fly is cheaper than a strip
constexpr int kStripRows = 4;
constexpr int kStripTokens = W == 8 ? 3 : 6;
constexpr size_t kTokenBlockBytes = 256 * 1024;  // f32 activations of one token block: they stay in L2 while the strips pass

template <class Fmt, int R>
LS_SIMD_INLINE void widen_strip(const FloatMatrix &w, uint32_t row, float *strip) {
  const size_t stride = static_cast<size_t>(w.cols) * Fmt::bytes;
  const uint8_t *p = w.data + row * stride;
  uint32_t k = 0;
  for (; k + W <= w.cols; k += W, strip += R * W) {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) store(strip + i * W, Fmt::get(p + i * stride + k * Fmt::bytes));
  }
  if (k < w.cols) {
    for (int i = 0; i < R; ++i) store(strip + i * W, Fmt::get_n(p + i * stride + k * Fmt::bytes, static_cast<int>(w.cols - k)));
  }
}

template <int R, int T>
void strip_tile(const float *strip, uint32_t row, uint32_t cols, const float *x, size_t ldx, uint32_t t0, const LinearTarget &out) {
  const float *xt = x + t0 * ldx;
  vf acc[R][T];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) acc[i][t] = zero();
  uint32_t k = 0;
  for (; k + W <= cols; k += W, strip += R * W) {
    vf xv[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) xv[t] = load(xt + t * ldx + k);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const vf wv = load(strip + i * W);
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) acc[i][t] = fma(wv, xv[t], acc[i][t]);
    }
  }
  if (k < cols) {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) acc[i][t] = fma(load(strip + i * W), load_n(xt + t * ldx + k, static_cast<int>(cols - k)), acc[i][t]);
  }
  put_tile<R, T>(out, t0, row, acc);
}

template <int R, int T>
void strip_tokens(const float *strip, uint32_t row, uint32_t cols, const float *x, size_t ldx, uint32_t t, uint32_t t1, const LinearTarget &out) {
  for (; t + T <= t1; t += T) strip_tile<R, T>(strip, row, cols, x, ldx, t, out);
  if constexpr (T > 1) {
    if (t < t1) strip_tokens<R, smaller_tile(T)>(strip, row, cols, x, ldx, t, t1, out);
  }
}

template <class Fmt>
void float_product_of(const FloatMatrix &w, uint32_t row0, uint32_t row1, const float *x, uint32_t m, size_t ldx, const LinearTarget &out, float *scratch) {
  if (m == 1) return stream_rows<Fmt, kStreamRows, 1>(w, row0, row1, x, m, ldx, out);
  if (m == 2) return stream_rows<Fmt, 4, 2>(w, row0, row1, x, m, ldx, out);
  if (m == 3) return stream_rows<Fmt, 4, 3>(w, row0, row1, x, m, ldx, out);
  if constexpr (W == 8) {
    if (m <= kStreamTokens) return stream_rows<Fmt, 2, 4>(w, row0, row1, x, m, ldx, out);
  } else {
    if (m <= kStreamTokens) return stream_rows<Fmt, 4, 6>(w, row0, row1, x, m, ldx, out);
  }
  const size_t fit = kTokenBlockBytes / (static_cast<size_t>(w.cols) * 4) / kStripTokens * kStripTokens;
  const uint32_t block = fit < 8 * kStripTokens ? 8 * kStripTokens : static_cast<uint32_t>(fit < m ? fit : m);
  for (uint32_t t = 0; t < m; t += block) {
    const uint32_t t1 = m - t < block ? m : t + block;
    uint32_t row = row0;
    for (; row + kStripRows <= row1; row += kStripRows) {
      widen_strip<Fmt, kStripRows>(w, row, scratch);
      strip_tokens<kStripRows, kStripTokens>(scratch, row, w.cols, x, ldx, t, t1, out);
    }
    for (; row < row1; ++row) {
      widen_strip<Fmt, 1>(w, row, scratch);
      strip_tokens<1, 1>(scratch, row, w.cols, x, ldx, t, t1, out);
    }
  }
}

inline size_t float_scratch(uint32_t cols) { return static_cast<size_t>((cols + W - 1) / W) * W * kStripRows; }

inline void float_product(const FloatMatrix &w, uint32_t row0, uint32_t row1, const float *x, uint32_t m, size_t ldx, const LinearTarget &out, float *scratch) {
  switch (w.dtype) {
    case LS_DTYPE_F32: return float_product_of<AsF32>(w, row0, row1, x, m, ldx, out, scratch);
    case LS_DTYPE_F16: return float_product_of<AsF16>(w, row0, row1, x, m, ldx, out, scratch);
    default: return float_product_of<AsBf16>(w, row0, row1, x, m, ldx, out, scratch);
  }
}

}  // namespace ls::cpu::LS_SIMD_NS
