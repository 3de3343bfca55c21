// Products with Q8_0, Q4_0 and Q4_1 weights, W rows interleaved (included per ISA, see cpu.cmake).
//
// Activations are 16-bit integers with one scale per token and block of 32 (relative error of an element <= 2^-16 of its block's maximum), so a
// result is near-exact with respect to the dequantised weights. One block of one row is summed in integers, exactly:
//   Q8_0  stored as w + 128 <= 255, |x| <= 32767: 32 * 255 * 32767 = 267,378,720; with -128 * sum(x) as the start of the accumulator < 402,000,000 < 2^31
//   Q4_x  w <= 15: 32 * 15 * 32767 = 15,728,160; with Q4_0's -8 * sum(x) as the start < 24,200,000
//         nibbles left in place, times 16 or 256: 8 * 15 * 256 * 32767 = 1,006,602,240 < 2^31, shifted back exactly at the end of the block
// so neither the order inside a block nor the instruction (pmaddwd, vpdpwssd) can change a bit. Blocks are then added in order by fma into one f32 lane
// per row: acc = fma(float(isum), dw * dx, acc), Q4_1 also acc = fma(m, dx * sum(x), acc). That order is the same for any number of tokens.
#pragma once
#include "../linear_kernels.h"
#include "../simd.h"

namespace ls::cpu::LS_SIMD_NS {

constexpr int kQuantTokens = W == 8 ? 4 : 8;  // tokens per register tile

LS_SIMD_INLINE vi pair_of(const int16_t *q) {
  int32_t both;
  std::memcpy(&both, q, 4);
  return set1i(both);
}

// G groups of rows x T tokens; the pair (k, k+1) of a token is broadcast once for all groups.
template <int G, int T>
LS_SIMD_INLINE void madd_pair(vi (&sum)[G][T], const vi (&w)[G], const int16_t *const (&x)[T], uint32_t k) {
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
    const vi pair = pair_of(x[t] + k);
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) sum[g][t] = madd16(sum[g][t], w[g], pair);
  }
}

// Bytes of weights ahead of their use that are fetched: one stream over the groups, which lie one behind the other.
constexpr size_t kPrefetchBytes = 6144;

// One block of every group against every token, added to sum.
template <int G, int T>
LS_SIMD_INLINE void block_q8(vi (&sum)[G][T], const uint8_t *const (&q)[G], const int16_t *const (&x)[T], uint32_t k) {
#pragma GCC unroll 16
  for (int c = 0; c < 8; ++c) {
    vi v[G], w[G];
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) v[g] = loadi(q[g] + c * 4 * W), w[g] = low_bytes(v[g]);
    madd_pair<G, T>(sum, w, x, k + 4 * c);
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) w[g] = high_bytes(v[g]);
    madd_pair<G, T>(sum, w, x, k + 4 * c + 2);
  }
}

// 4-bit weights, each nibble shifted down: the shifts are shared by all tokens.
template <int G, int T>
LS_SIMD_INLINE void block_q4(vi (&sum)[G][T], const uint8_t *const (&q)[G], const int16_t *const (&x)[T], uint32_t k) {
  const vi low = set1i(0x000f000f);
#pragma GCC unroll 16
  for (int c = 0; c < 4; ++c) {
    vi v[G], w[G];
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) v[g] = loadi(q[g] + c * 4 * W), w[g] = andi(v[g], low);
    madd_pair<G, T>(sum, w, x, k + 8 * c);
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) w[g] = andi(shr16<4>(v[g]), low);
    madd_pair<G, T>(sum, w, x, k + 8 * c + 2);
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) w[g] = andi(shr16<8>(v[g]), low);
    madd_pair<G, T>(sum, w, x, k + 8 * c + 4);
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) w[g] = shr16<12>(v[g]);
    madd_pair<G, T>(sum, w, x, k + 8 * c + 6);
  }
}

// The same integers for few tokens: the middle nibbles stay in place in sums of their own, since masks are cheaper than shifts.
template <int G, int T>
LS_SIMD_INLINE void block_q4_few(vi (&sum)[G][T], const uint8_t *const (&q)[G], const int16_t *const (&x)[T], uint32_t k) {
  const vi low = set1i(0x000f000f), mid = set1i(0x00f000f0), high = set1i(0x0f000f00);
  vi sum16[G][T], sum256[G][T];
#pragma GCC unroll 16
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) sum16[g][t] = sum256[g][t] = zeroi();
#pragma GCC unroll 16
  for (int c = 0; c < 4; ++c) {
    vi v[G], w[G];
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) v[g] = loadi(q[g] + c * 4 * W), w[g] = andi(v[g], low);
    madd_pair<G, T>(sum, w, x, k + 8 * c);
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) w[g] = andi(v[g], mid);
    madd_pair<G, T>(sum16, w, x, k + 8 * c + 2);
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) w[g] = andi(v[g], high);
    madd_pair<G, T>(sum256, w, x, k + 8 * c + 4);
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) w[g] = shr16<12>(v[g]);
    madd_pair<G, T>(sum, w, x, k + 8 * c + 6);
  }
#pragma GCC unroll 16
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) sum[g][t] = addi(sum[g][t], addi(sar32<4>(sum16[g][t]), sar32<8>(sum256[g][t])));
}

template <ls_dtype D, int G, int T>
void quant_tile(const QuantMatrix &w, uint32_t group, const QuantRows &x, uint32_t t0, const LinearTarget &out) {
  constexpr size_t kBlock = (D == LS_DTYPE_Q8_0 ? 32 : 16) * W;
  const uint32_t blocks = w.cols / 32;
  const uint8_t *base[G], *q[G];
  const int16_t *xq[T];
  vf acc[G][T];
#pragma GCC unroll 16
  for (int g = 0; g < G; ++g) {
    base[g] = w.data + (group + g) * w.group_bytes;
    q[g] = base[g] + w.quant_offset;
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) acc[g][t] = zero();
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) xq[t] = x.q + static_cast<size_t>(t0 + t) * w.cols;
  const int32_t *start = D == LS_DTYPE_Q8_0 ? x.minus128 : x.minus8;  // what the offset of the stored weights takes away
  for (uint32_t b = 0; b < blocks; ++b) {
    vi sum[G][T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
      for (int g = 0; g < G; ++g) sum[g][t] = D == LS_DTYPE_Q4_1 ? zeroi() : set1i(start[static_cast<size_t>(t0 + t) * blocks + b]);
    if constexpr (T <= 2) {
#pragma GCC unroll 16
      for (int g = 0; g < G; ++g)
#pragma GCC unroll 16
        for (size_t i = 0; i < kBlock; i += 64) prefetch(q[g] + kPrefetchBytes + i);
    }
    if constexpr (D == LS_DTYPE_Q8_0) block_q8<G, T>(sum, q, xq, b * 32);
    else if constexpr (G * T <= 2) block_q4_few<G, T>(sum, q, xq, b * 32);
    else block_q4<G, T>(sum, q, xq, b * 32);
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) {
      q[g] += kBlock;
      const vf d = load_f16(base[g] + static_cast<size_t>(b) * W * 2);
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) acc[g][t] = fma(to_float(sum[g][t]), mul(d, set1(x.d[static_cast<size_t>(t0 + t) * blocks + b])), acc[g][t]);
      if constexpr (D == LS_DTYPE_Q4_1) {
        const vf m = load_f16(base[g] + static_cast<size_t>(blocks + b) * W * 2);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) acc[g][t] = fma(m, set1(x.sum[static_cast<size_t>(t0 + t) * blocks + b]), acc[g][t]);
      }
    }
  }
#pragma GCC unroll 16
  for (int g = 0; g < G; ++g) {
    const uint32_t row = (group + g) * W;
    const int n = static_cast<int>(w.rows - row < static_cast<uint32_t>(W) ? w.rows - row : W);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      float *y = out.y + (t0 + t) * out.ldy + row;
      vf v = acc[g][t];
      if (out.bias) v = add(v, load_n(out.bias + row, n));
      if (out.accumulate) v = add(load_n(y, n), v);
      store_n(y, v, n);
    }
  }
}

// Tokens [t, m) of one group in tiles of T, the rest in smaller ones.
template <ls_dtype D, int T>
void quant_tokens(const QuantMatrix &w, uint32_t group, const QuantRows &x, uint32_t t, uint32_t m, const LinearTarget &out) {
  for (; t + T <= m; t += T) quant_tile<D, 1, T>(w, group, x, t, out);
  if constexpr (T > 1) {
    if (t < m) quant_tokens<D, T / 2>(w, group, x, t, m, out);
  }
}

template <ls_dtype D>
void quant_product_of(const QuantMatrix &w, uint32_t group0, uint32_t group1, const QuantRows &x, uint32_t m, const LinearTarget &out) {
  uint32_t g = group0;
  if (m == 1) {
    for (; g + 2 <= group1; g += 2) quant_tile<D, 2, 1>(w, g, x, 0, out);
  }
  for (; g < group1; ++g) quant_tokens<D, kQuantTokens>(w, g, x, 0, m, out);
}

inline void quant_product(const QuantMatrix &w, uint32_t group0, uint32_t group1, const QuantRows &x, uint32_t m, const LinearTarget &out) {
  switch (w.dtype) {
    case LS_DTYPE_Q8_0: return quant_product_of<LS_DTYPE_Q8_0>(w, group0, group1, x, m, out);
    case LS_DTYPE_Q4_0: return quant_product_of<LS_DTYPE_Q4_0>(w, group0, group1, x, m, out);
    default: return quant_product_of<LS_DTYPE_Q4_1>(w, group0, group1, x, m, out);
  }
}

// One token. A block with a value that is not finite gets a NaN scale, so that it shows in every output instead of becoming a number.
inline void quantize_row(const float *x, uint32_t t, const QuantRows &out) {
  const uint32_t blocks = out.cols / 32;
  int16_t *q = out.q + static_cast<size_t>(t) * out.cols;
  for (uint32_t b = 0; b < blocks; ++b, x += 32, q += 32) {
    vf largest = zero(), taint = zero();
#pragma GCC unroll 16
    for (int s = 0; s < 32; s += W) {
      const vf v = load(x + s);
      largest = max_v(abs_v(v), largest);
      taint = fma(v, zero(), taint);
    }
    const float top = hmax(largest);
    const bool tiny = top < 1e-30f;  // the reciprocal would overflow; such a block is zero
    const vf inverse = set1(tiny ? 0.0f : 32767.0f / top);
#pragma GCC unroll 16
    for (int s = 0; s < 32; s += W) store_i16(q + s, to_int(mul(load(x + s), inverse)));
    int32_t sum = 0;
    for (int i = 0; i < 32; ++i) sum += q[i];
    const float d = (tiny ? 0.0f : top / 32767.0f) + hsum(taint);
    const size_t at = static_cast<size_t>(t) * blocks + b;
    out.d[at] = d;
    out.sum[at] = d * static_cast<float>(sum);
    out.minus8[at] = -8 * sum;
    out.minus128[at] = -128 * sum;
  }
}

}  // namespace ls::cpu::LS_SIMD_NS
