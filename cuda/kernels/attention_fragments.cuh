// What the attention kernels share: rows of K and V in shared memory and their way into the operands of mma.m16n8k16.
//
// A staged row is DP elements (head_dim padded with zeros) and 16 bytes of air, so that eight rows at one column lie in different banks.
// bf16 goes through ldmatrix. fp8 has no such load: a lane takes four neighbouring elements, which is another order of the dims.
//   K   the order of dims inside a group of 16 is the same for q (query_dim), so the dot product is unchanged
//   V   the order of output dims inside a group of 32 is undone where they are written (output_dim)
// With g = lane / 4, t = lane % 4, as in device.h.
#pragma once
#include "../device.h"
#include "attention.h"

namespace ls::cuda {

constexpr float kLog2e = 1.44269504088896f;
constexpr float kNoKey = -INFINITY;

// kFp8: both kinds of it share their code, which is a third of the compile time.
template <bool kFp8, int DP>
struct KvTile {
  static constexpr int kElement = kFp8 ? 1 : 2;
  static constexpr int kRow = DP * kElement + 16;        // bytes
  static constexpr int kChunks = DP * kElement / 16;     // 16-byte pieces of a row
};

LS_DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  const bf16x2 product = __hmul2(bits_as<bf16x2>(a), bits_as<bf16x2>(b));
  return bits_as<uint32_t>(product);
}

// How fp8 becomes bf16, exactly: its bits are shifted to their place in bf16, and the value is multiplied by the quotient of the exponents' biases.
struct Widening {
  uint32_t shift, factor;
};
LS_DEVICE Widening widening(KvType type) { return type == KvType::e4m3 ? Widening{4, 0x7b807b80u /* 2^120 */} : Widening{3, 0x77807780u /* 2^112 */}; }
// Two elements in the high bytes of the halves of u.
LS_DEVICE uint32_t widen(uint32_t u, const Widening &w) { return multiply_bf16x2((u & 0x80008000u) | (u & 0x7f007f00u) >> w.shift, w.factor); }

// Dim of element `e` (0, 1) of register `half` (0: k 0..7, 1: k 8..15) of lane t, inside a group of 16.
template <bool kFp8>
LS_DEVICE int query_dim(int t, int half, int e) {
  return kFp8 ? 4 * t + 2 * half + e : 8 * half + 2 * t + e;
}

// Dim that column `column` of output tile `tile` (8 columns) stands for.
template <bool kFp8>
LS_DEVICE int output_dim(int tile, int column) {
  return kFp8 ? tile / 4 * 32 + 4 * column + tile % 4 : tile * 8 + column;
}

// B operands of q·K: 16 keys (rows of `k`) and dims [16 group, 16 group + 16). b[n] is for keys 8n..8n+7.
template <bool kFp8, int DP>
LS_DEVICE void load_keys(uint32_t (&b)[2][2], const uint8_t *k, int group, const Widening &wide) {
  const int lane = static_cast<int>(lane_id());
  if constexpr (!kFp8) {
    uint32_t r[4];
    ldmatrix_x4(r, k + (lane / 16 * 8 + lane % 8) * KvTile<kFp8, DP>::kRow + (group * 16 + lane / 8 % 2 * 8) * 2);
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
  } else {
    LS_UNROLL
    for (int n = 0; n < 2; ++n) {
      const uint32_t w = *reinterpret_cast<const uint32_t *>(k + (n * 8 + lane / 4) * KvTile<kFp8, DP>::kRow + group * 16 + lane % 4 * 4);
      b[n][0] = widen((w & 0xffu) << 8 | (w & 0xff00u) << 16, wide);
      b[n][1] = widen((w & 0xff0000u) >> 8 | (w & 0xff000000u), wide);
    }
  }
}

// B operands of weights·V: 16 keys (rows of `v`) and dims [32 group, 32 group + 32) as output tiles 4 group .. 4 group + 3.
template <bool kFp8, int DP>
LS_DEVICE void load_values(uint32_t (&b)[4][2], const uint8_t *v, int group, const Widening &wide) {
  const int lane = static_cast<int>(lane_id());
  if constexpr (!kFp8) {
    LS_UNROLL
    for (int j = 0; j < 2; ++j) {
      uint32_t r[4];
      ldmatrix_x4_trans(r, v + (lane / 8 % 2 * 8 + lane % 8) * KvTile<kFp8, DP>::kRow + (group * 32 + j * 16 + lane / 16 * 8) * 2);
      b[2 * j][0] = r[0], b[2 * j][1] = r[1], b[2 * j + 1][0] = r[2], b[2 * j + 1][1] = r[3];
    }
  } else {
    const uint8_t *at = v + 2 * (lane % 4) * KvTile<kFp8, DP>::kRow + group * 32 + lane / 4 * 4;
    uint32_t w[4];
    LS_UNROLL
    for (int i = 0; i < 4; ++i) w[i] = *reinterpret_cast<const uint32_t *>(at + (i / 2 * 8 + i % 2) * KvTile<kFp8, DP>::kRow);
    LS_UNROLL
    for (int i = 0; i < 4; ++i) {
      b[i][0] = widen((w[0] >> 8 * i & 0xffu) << 8 | (w[1] >> 8 * i & 0xffu) << 24, wide);
      b[i][1] = widen((w[2] >> 8 * i & 0xffu) << 8 | (w[3] >> 8 * i & 0xffu) << 24, wide);
    }
  }
}

// Two neighbouring q elements, zeros beyond head_dim (even, as dim is).
LS_DEVICE uint32_t load_query(const bf16 *row, int dim, int head_dim) { return row && dim < head_dim ? load_global(reinterpret_cast<const uint32_t *>(row + dim)) : 0; }

// Where packed row `row` of a tile is, null beyond the tile's rows; its position, -1 then.
struct QueryRow {
  const bf16 *q;
  int position;
};
LS_DEVICE QueryRow query_row(const AttentionArgs &a, const AttentionTile &tile, int kv_head, int row) {
  if (row >= tile.rows) return {nullptr, -1};
  const int group = static_cast<int>(a.heads / a.layout.kv_heads), packed = tile.first + row, token = packed / group, head = kv_head * group + packed % group;
  return {static_cast<const bf16 *>(a.q) + (static_cast<size_t>(tile.token + token) * a.heads + head) * a.layout.head_dim, tile.start + token};
}

// Running softmax of the two rows (g and g + 8) whose scores a lane holds a part of. Units of the logarithm to base 2.
struct Softmax {
  float top[2] = {kNoKey, kNoKey};
  float sum[2] = {0, 0};  // of this lane's keys

  // Scores become weights; what is summed so far is to be multiplied by shrink. s[n] are 16x8 tiles.
  template <int N>
  LS_DEVICE void step(float (&s)[N][4], float (&shrink)[2]) {
    LS_UNROLL
    for (int r = 0; r < 2; ++r) {
      float largest = kNoKey;
      LS_UNROLL
      for (int n = 0; n < N; ++n) largest = fmaxf(largest, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      largest = fmaxf(largest, shfl_xor(largest, 1));
      largest = fmaxf(largest, shfl_xor(largest, 2));
      largest = fmaxf(largest, top[r]);
      const float base = largest == kNoKey ? 0.0f : largest;  // a row that has seen no key yet
      shrink[r] = largest == kNoKey ? 1.0f : exp2_fast(top[r] - base);
      top[r] = largest;
      sum[r] *= shrink[r];
      LS_UNROLL
      for (int n = 0; n < N; ++n)
        LS_UNROLL
        for (int e = 0; e < 2; ++e) {
          const float w = exp2_fast(s[n][2 * r + e] - base);
          s[n][2 * r + e] = w;
          sum[r] += w;
        }
    }
  }
  // Sums over all keys; every lane has them then.
  LS_DEVICE void finish() {
    LS_UNROLL
    for (int r = 0; r < 2; ++r) {
      sum[r] += shfl_xor(sum[r], 1);
      sum[r] += shfl_xor(sum[r], 2);
    }
  }
};

// Weights of 16 keys (two tiles of scores) as the A operand.
LS_DEVICE void weights_operand(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
  a[0] = pack_bf16(low[0], low[1]);
  a[1] = pack_bf16(low[2], low[3]);
  a[2] = pack_bf16(high[0], high[1]);
  a[3] = pack_bf16(high[2], high[3]);
}

// q of two rows (g and g + 8) as A operands, zeros beyond head_dim.
template <bool kFp8, int DP>
LS_DEVICE void load_queries(uint32_t (&q)[DP / 16][4], const QueryRow (&rows)[2], int t, int head_dim) {
  LS_UNROLL
  for (int k = 0; k < DP / 16; ++k)
    LS_UNROLL
    for (int r = 0; r < 4; ++r) q[k][r] = load_query(rows[r % 2].q, k * 16 + query_dim<kFp8>(t, r / 2, 0), head_dim);
}

// What is summed so far after a step of the softmax; mostly no row has found a larger score.
template <int N>
LS_DEVICE void shrink_sums(float (&out)[N][4], const float (&shrink)[2]) {
  if (!warp_any(shrink[0] != 1 || shrink[1] != 1)) return;
  LS_UNROLL
  for (int n = 0; n < N; ++n)
    LS_UNROLL
    for (int e = 0; e < 4; ++e) out[n][e] *= shrink[e / 2];
}

// Adds weights·V of 16 keys (two tiles of weights, rows of `v`) to the sums.
template <bool kFp8, int DP>
LS_DEVICE void add_values(float (&out)[DP / 8][4], const float (&low)[4], const float (&high)[4], const uint8_t *v, const Widening &wide) {
  uint32_t w[4];
  weights_operand(w, low, high);
  LS_UNROLL
  for (int i = 0; i < DP / 32; ++i) {
    uint32_t b[4][2];
    load_values<kFp8, DP>(b, v, i, wide);
    LS_UNROLL
    for (int j = 0; j < 4; ++j) mma_m16n8k16(out[4 * i + j], w, b[j], out[4 * i + j]);
  }
}

// Calls f.template operator()<fp8, padded head_dim>().
template <class F>
void dispatch_kv(const KvLayout &layout, F &&f) {
  const auto dim = [&]<bool kFp8>() {
    if (layout.head_dim <= 64) f.template operator()<kFp8, 64>();
    else if (layout.head_dim <= 128) f.template operator()<kFp8, 128>();
    else f.template operator()<kFp8, 256>();
  };
  layout.type == KvType::bf16 ? dim.template operator()<false>() : dim.template operator()<true>();
}

}  // namespace ls::cuda
