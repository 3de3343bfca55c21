// Weights from shared memory to A operands, and the products of one unit of 32 inputs. One struct a family of weight types:
//   multiply<MT, NT, kTileBytes>(sums, unit, b, lane): sums[m][n] += tile m's unit (at unit + m * kTileBytes) times b[n] (two steps, two registers each)
#pragma once
#include "../device.h"
#include "linear_launch.h"

namespace ls::cuda {

LS_DEVICE void store_outputs(const LinearJob &job, uint32_t row, uint32_t output, const float *from) {
  if (output >= job.outputs) return;
  const size_t at = static_cast<size_t>(row) * job.ldy + output;
  const uint32_t count = job.outputs - output < 4 ? job.outputs - output : 4;
  float v[4];
  LS_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    v[i] = from[i];
    if (job.bias && i < count) v[i] += job.bias[output + i];
  }
  if (job.type == Element::f32) {
    float *y = static_cast<float *>(job.y) + at;
    if (job.aligned && count == 4) {
      Bytes16 out = job.accumulate ? *reinterpret_cast<const Bytes16 *>(y) : Bytes16{};
      LS_UNROLL
      for (int i = 0; i < 4; ++i) out.word[i] = bits_as<uint32_t>(job.accumulate ? bits_as<float>(out.word[i]) + v[i] : v[i]);
      *reinterpret_cast<Bytes16 *>(y) = out;
    } else {
      LS_UNROLL
      for (uint32_t i = 0; i < 4; ++i)
        if (i < count) y[i] = job.accumulate ? y[i] + v[i] : v[i];
    }
    return;
  }
  bf16 *y = static_cast<bf16 *>(job.y) + at;
  if (job.accumulate) {
    LS_UNROLL
    for (uint32_t i = 0; i < 4; ++i)
      if (i < count) v[i] = __bfloat162float(y[i]) + v[i];
  }
  if (job.aligned && count == 4) {
    *reinterpret_cast<uint64_t *>(y) = pack_bf16(v[0], v[1]) | static_cast<uint64_t>(pack_bf16(v[2], v[3])) << 32;
  } else {
    LS_UNROLL
    for (uint32_t i = 0; i < 4; ++i)
      if (i < count) y[i] = __float2bfloat16_rn(v[i]);
  }
}

// Two neighbouring weights as hi + lo, both bf16: 16 bits of mantissa, exact for f16.
LS_DEVICE void split_bf16(float a, float b, uint32_t &hi, uint32_t &lo) {
  hi = pack_bf16(a, b);
  lo = pack_bf16(a - bits_as<float>(hi << 16), b - bits_as<float>(hi & 0xffff0000u));
}

struct WeightsBf16 {
  static constexpr ls_dtype kType = LS_DTYPE_BF16;
  template <int MT, int NT, int kTileBytes>
  static LS_DEVICE void multiply(float (&sums)[MT][NT][4], const unsigned char *unit, const uint32_t (&b)[NT][4], int lane) {
    LS_UNROLL
    for (int step = 0; step < 2; ++step)
      LS_UNROLL
      for (int m = 0; m < MT; ++m) {
        const Bytes16 a = *reinterpret_cast<const Bytes16 *>(unit + m * kTileBytes + step * 512 + lane * 16);
        LS_UNROLL
        for (int n = 0; n < NT; ++n) mma_m16n8k16(sums[m][n], a.word, b[n] + step * 2, sums[m][n]);
      }
  }
};

// f16 and f32: two products, the larger part first.
template <ls_dtype kDtype>
struct WeightsSplit {
  static constexpr ls_dtype kType = kDtype;
  template <int MT, int NT, int kTileBytes>
  static LS_DEVICE void multiply(float (&sums)[MT][NT][4], const unsigned char *unit, const uint32_t (&b)[NT][4], int lane) {
    LS_UNROLL
    for (int step = 0; step < 2; ++step)
      LS_UNROLL
      for (int m = 0; m < MT; ++m) {
        uint32_t hi[4], lo[4];
        if constexpr (kDtype == LS_DTYPE_F16) {
          const Bytes16 raw = *reinterpret_cast<const Bytes16 *>(unit + m * kTileBytes + step * 512 + lane * 16);
          LS_UNROLL
          for (int j = 0; j < 4; ++j) {
            const float2 pair = __half22float2(bits_as<__half2>(raw.word[j]));
            split_bf16(pair.x, pair.y, hi[j], lo[j]);
          }
        } else {
          LS_UNROLL
          for (int j = 0; j < 2; ++j) {
            const Bytes16 raw = *reinterpret_cast<const Bytes16 *>(unit + m * kTileBytes + step * 1024 + j * 512 + lane * 16);
            split_bf16(bits_as<float>(raw.word[0]), bits_as<float>(raw.word[1]), hi[2 * j], lo[2 * j]);
            split_bf16(bits_as<float>(raw.word[2]), bits_as<float>(raw.word[3]), hi[2 * j + 1], lo[2 * j + 1]);
          }
        }
        LS_UNROLL
        for (int n = 0; n < NT; ++n) mma_m16n8k16(sums[m][n], hi, b[n] + step * 2, sums[m][n]);
        LS_UNROLL
        for (int n = 0; n < NT; ++n) mma_m16n8k16(sums[m][n], lo, b[n] + step * 2, sums[m][n]);
      }
  }
};

// bf16 pairs a - b, exact here: small integers.
LS_DEVICE uint32_t subtract_bf16(uint32_t a, uint32_t b) { return bits_as<uint32_t>(__hsub2(bits_as<bf16x2>(a), bits_as<bf16x2>(b))); }

// Integers become bf16 by their place in the mantissa of 128 (0x4300): 0x4300 + q is 128 + q for q < 128. A unit is one block of 32 weights with
// its scale: sum over the block of q x, then one multiply-add with d in f32. Q4_1 adds m times the sum of x, made with a matrix of ones.
template <ls_dtype kDtype>
struct WeightsQuant {
  static constexpr ls_dtype kType = kDtype;

  static LS_DEVICE void load(const unsigned char *unit, int lane, uint32_t (&a)[2][4]) {
    if constexpr (kDtype == LS_DTYPE_Q8_0) {
      const Bytes16 raw = *reinterpret_cast<const Bytes16 *>(unit + lane * 16);
      LS_UNROLL
      for (int word = 0; word < 4; ++word)
        LS_UNROLL
        for (int odd = 0; odd < 2; ++odd) {
          // Two's complement: the low seven bits, less 128 where the eighth is set (which makes 0x4300 into 256).
          const uint32_t pair = raw.word[word] >> (8 * odd);
          a[word / 2][word % 2 * 2 + odd] = subtract_bf16((pair & 0x007f007fu) | 0x43004300u, (pair & 0x00800080u) | 0x43004300u);
        }
    } else {
      const uint64_t raw = *reinterpret_cast<const uint64_t *>(unit + lane * 8);
      const uint32_t zero = kDtype == LS_DTYPE_Q4_0 ? 0x43084308u : 0x43004300u;  // 136: q - 8, or 128: q
      LS_UNROLL
      for (int step = 0; step < 2; ++step)
        LS_UNROLL
        for (int j = 0; j < 4; ++j) a[step][j] = subtract_bf16((static_cast<uint32_t>(raw >> (32 * step)) >> (4 * j) & 0x000f000fu) | 0x43004300u, zero);
    }
  }

  template <int MT, int NT, int kTileBytes>
  static LS_DEVICE void multiply(float (&sums)[MT][NT][4], const unsigned char *unit, const uint32_t (&b)[NT][4], int lane) {
    const float zeros[4] = {};
    float x_sums[NT][2];  // of rows 2t and 2t + 1 of x; equal for all outputs
    if constexpr (kDtype == LS_DTYPE_Q4_1) {
      const uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
      LS_UNROLL
      for (int n = 0; n < NT; ++n) {
        float s[4];
        mma_m16n8k16(s, ones, b[n], zeros);
        mma_m16n8k16(s, ones, b[n] + 2, s);
        x_sums[n][0] = s[0], x_sums[n][1] = s[1];
      }
    }
    LS_UNROLL
    for (int m = 0; m < MT; ++m, unit += kTileBytes) {
      uint32_t a[2][4];
      load(unit, lane, a);
      const unsigned char *scales = unit + quant_bytes(kDtype) + lane / 4 * 4;
      const float2 d = __half22float2(*reinterpret_cast<const __half2 *>(scales));
      float2 offset{};
      if constexpr (kDtype == LS_DTYPE_Q4_1) offset = __half22float2(*reinterpret_cast<const __half2 *>(scales + 32));
      LS_UNROLL
      for (int n = 0; n < NT; ++n) {
        float block[4];
        mma_m16n8k16(block, a[0], b[n], zeros);
        mma_m16n8k16(block, a[1], b[n] + 2, block);
        LS_UNROLL
        for (int i = 0; i < 4; ++i) {
          sums[m][n][i] = fma_rn(i < 2 ? d.x : d.y, block[i], sums[m][n][i]);
          if constexpr (kDtype == LS_DTYPE_Q4_1) sums[m][n][i] = fma_rn(i < 2 ? offset.x : offset.y, x_sums[n][i % 2], sums[m][n][i]);
        }
      }
    }
  }
};

}  // namespace ls::cuda
