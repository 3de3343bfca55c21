// Attention kernels for any vector width; included by one translation unit per instruction set. Lanes are 16 keys (of one page) in the
// score product and head dims in the V product, so no sum ever crosses lanes but the one over exp, whose order is fixed.
#pragma once
#include "../attention.h"
#include "../simd.h"

namespace ls::cpu::LS_SIMD_NS {

constexpr int kPageVectors = 16 / W;                // vectors that hold 16 keys
constexpr int kTileRows = W == 16 ? 12 : 6;         // query rows per tile: accumulators fill the register file
constexpr uint32_t kScoreStride = kPartition;

LS_SIMD_INLINE uint32_t pad16(uint32_t n) { return (n + 15) / 16 * 16; }

// e^x for x <= 0; 0 for -infinity.
LS_SIMD_INLINE vf exp_down(vf x) {
  const vf lo = set1(-87.3365402f), c = max_v(x, lo), n = round_v(mul(c, set1(1.44269504f)));
  vf r = fma(n, set1(-0.693359375f), c);
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  return select_lt(x, lo, zero(), mul(p, pow2i(to_int(n))));
}
LS_SIMD_INLINE float exp_down1(float x) { return hmax(exp_down(set1(x))); }

// W pairs of bf16 at p: first of each pair, second of each pair.
LS_SIMD_INLINE void load_pairs(const uint16_t *p, vf &even, vf &odd) {
  const vi raw = loadi(p);
  even = as_float(shl32<16>(raw));
  odd = as_float(andi(raw, set1i(static_cast<int32_t>(0xffff0000u))));
}

// Only the first (0) or the second (1) of each pair.
template <int Half>
LS_SIMD_INLINE vf load_half(const uint16_t *p) {
  if constexpr (Half == 0) return as_float(shl32<16>(loadi(p)));
  return as_float(andi(loadi(p), set1i(static_cast<int32_t>(0xffff0000u))));
}

// Places of the pages of one partition. f32 sources: floats; bf16 sources: bf16 pairs (see kv_memory.h).
struct Places {
  const void *k[kPartitionPages], *v[kPartitionPages];
};

// Where a tile's K and V come from. stream: f32 pages read once, the next page being prefetched (pages lie anywhere, so the hardware sees no
// stream); pairs: the same for bf16 pages; reuse: f32 that many tiles read, from the second level cache.
enum Source { reuse, stream, pairs };

// One of the two dims of a pair, for P pages: few enough values at a time that sums, keys and the query fit the registers.
template <int Half, int R, int P>
LS_SIMD_INLINE void score_halves(const float *q, const void *const *k, uint32_t d, vf (&acc)[R][P * kPageVectors]) {
  for (int p = 0; p < P; ++p) {
    vf key[kPageVectors];
    for (int v = 0; v < kPageVectors; ++v) key[v] = load_half<Half>(static_cast<const uint16_t *>(k[p]) + d * 16 + v * 2 * W);
    for (int r = 0; r < R; ++r) {
      const vf x = set1(q[r]);
      for (int v = 0; v < kPageVectors; ++v) acc[r][p * kPageVectors + v] = fma(x, key[v], acc[r][p * kPageVectors + v]);
    }
  }
}

// s[r][16 * page ..] = sum over d of q[d][r] * K[d][key], P pages at once, d in order.
template <Source S, int R, int P>
LS_SIMD_INLINE void score_pages(const float *q, const void *const *k, const void *const *next, uint32_t head_dim, float *s) {
  vf acc[R][P * kPageVectors];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < P * kPageVectors; ++j) acc[r][j] = zero();
  if constexpr (S == pairs) {
    for (uint32_t d = 0; d < head_dim; d += 2) {
      for (int p = 0; p < P; ++p) prefetch(static_cast<const uint16_t *>(next[p]) + d * 16);
      score_halves<0, R, P>(q, k, d, acc);
      score_halves<1, R, P>(q + R, k, d, acc);
      q += 2 * R;
    }
  } else {
    for (uint32_t d = 0; d < head_dim; ++d, q += R) {
      vf key[P * kPageVectors];
      for (int p = 0; p < P && S == stream; ++p) prefetch(static_cast<const float *>(next[p]) + d * 16);
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < kPageVectors; ++v) key[p * kPageVectors + v] = load(static_cast<const float *>(k[p]) + d * 16 + v * W);
      for (int r = 0; r < R; ++r) {
        const vf x = set1(q[r]);
        for (int j = 0; j < P * kPageVectors; ++j) acc[r][j] = fma(x, key[j], acc[r][j]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < P * kPageVectors; ++j) store(s + r * kScoreStride + j * W, acc[r][j]);
}

template <Source S, int R>
static void scores(const float *q, const Places &at, uint32_t pages, uint32_t head_dim, float *s) {
  // Enough independent sums to hide the latency of a multiply-add, no more than there are registers.
  constexpr int kSums = W == 16 ? 24 : 12, kFit = kSums / (R * kPageVectors), P = kFit >= 4 ? 4 : kFit >= 2 ? kFit : 1;
  uint32_t p = 0;
  for (; p + P <= pages; p += P) score_pages<S, R, P>(q, at.k + p, at.k + (p + 2 * P <= pages ? p + P : p), head_dim, s + p * 16);
  if constexpr (P > 1)
    for (; p < pages; ++p) score_pages<S, R, 1>(q, at.k + p, at.k + (p + 1 < pages ? p + 1 : p), head_dim, s + p * 16);
}

template <int Half, int R, int C>
LS_SIMD_INLINE void mix_halves(const float *weight, const uint16_t *v, vf (&sum)[R][C]) {
  if constexpr (R <= C) {
    vf x[R];
    for (int r = 0; r < R; ++r) x[r] = set1(weight[r * kScoreStride]);
    for (int c = 0; c < C; ++c) {
      const vf value = load_half<Half>(v + c * 2 * W);
      for (int r = 0; r < R; ++r) sum[r][c] = fma(x[r], value, sum[r][c]);
    }
  } else {
    vf value[C];
    for (int c = 0; c < C; ++c) value[c] = load_half<Half>(v + c * 2 * W);
    for (int r = 0; r < R; ++r) {
      const vf x = set1(weight[r * kScoreStride]);
      for (int c = 0; c < C; ++c) sum[r][c] = fma(x, value[c], sum[r][c]);
    }
  }
}

// acc[r][dim ..] = sum over keys of weight[r][key] * V[key][dim], C vectors of dims, keys in order.
template <Source S, int R, int C>
LS_SIMD_INLINE void mix_dims(const float *weight, const Places &at, uint32_t pages, uint32_t head_dim, uint32_t dim, float *acc, uint32_t stride) {
  vf sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = zero();
  for (uint32_t p = 0; p < pages; ++p) {
    // Lines of the next page; every call fetches the share of its own dims.
    const char *next = static_cast<const char *>(at.v[p + 1 < pages ? p + 1 : p]);
    if constexpr (S == pairs) {
      const uint16_t *v = static_cast<const uint16_t *>(at.v[p]) + dim * 2;
      next += dim * 4;
      for (int t = 0; t < 16; t += 2, v += head_dim * 2, weight += 2, next += head_dim * 4) {
        for (int line = 0; line < C * W * 4; line += 64) prefetch(next + line);
        mix_halves<0, R, C>(weight, v, sum);
        mix_halves<1, R, C>(weight + 1, v, sum);
      }
    } else {
      const float *v = static_cast<const float *>(at.v[p]) + dim;
      next += dim * 4;
      for (int t = 0; t < 16; ++t, v += head_dim, ++weight, next += head_dim * 4) {
        for (int line = 0; line < C * W * 4 && S == stream; line += 64) prefetch(next + line);
        vf value[C];
        for (int c = 0; c < C; ++c) value[c] = load(v + c * W);
        for (int r = 0; r < R; ++r) {
          const vf x = set1(weight[r * kScoreStride]);
          for (int c = 0; c < C; ++c) sum[r][c] = fma(x, value[c], sum[r][c]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(acc + r * stride + dim + c * W, sum[r][c]);
}

// The last vector may run over the end of a row: what it reads there only reaches lanes past head_dim, which nobody uses.
template <Source S, int R>
static void mix(const float *weight, const Places &at, uint32_t pages, uint32_t head_dim, float *acc, uint32_t stride) {
  constexpr int kSums = W == 16 ? 24 : 12, kFit = kSums / R, C = kFit >= 8 ? 8 : kFit >= 4 ? 4 : 2;
  uint32_t dim = 0;
  for (; dim + C * W <= head_dim; dim += C * W) mix_dims<S, R, C>(weight, at, pages, head_dim, dim, acc, stride);
  for (; dim < head_dim; dim += W) mix_dims<S, R, 1>(weight, at, pages, head_dim, dim, acc, stride);
}

// Turns n scores into weights exp(s - largest), 0 up to the end of the last page.
LS_SIMD_INLINE void soften(float *s, uint32_t n, float &largest, float &sum) {
  const uint32_t padded = pad16(n);
  for (uint32_t i = n; i < padded; ++i) s[i] = -__builtin_inff();
  vf top = load(s);
  for (uint32_t i = W; i < padded; i += W) top = max_v(top, load(s + i));
  largest = hmax(top);
  const vf base = set1(largest);
  vf total = zero();
  for (uint32_t i = 0; i < padded; i += W) {
    const vf e = exp_down(sub(load(s + i), base));
    store(s + i, e);
    total = add(total, e);
  }
  sum = hsum(total);
}

// Folds one partition into a row: (top, sum, acc) <- the same over more keys. The first partition is taken as it is.
LS_SIMD_INLINE void fold_row(float *top, float *sum, float *acc, float part_top, float part_sum, const float *part, uint32_t dims, bool first) {
  if (first) {
    *top = part_top;
    *sum = part_sum;
    for (uint32_t d = 0; d < dims; d += W) store(acc + d, load(part + d));
    return;
  }
  const float largest = part_top > *top ? part_top : *top;
  const float old_scale = exp_down1(*top - largest), part_scale = exp_down1(part_top - largest);
  *top = largest;
  *sum = *sum * old_scale + part_sum * part_scale;
  const vf a = set1(old_scale), b = set1(part_scale);
  for (uint32_t d = 0; d < dims; d += W) store(acc + d, fma(load(part + d), b, mul(load(acc + d), a)));
}

static void finish_row(const AttentionItem &it, uint32_t row, const float *acc, float sum) {
  float *out = it.out + static_cast<size_t>(row / it.group) * it.ld + static_cast<size_t>(row % it.group) * it.head_dim;
  const vf scale = set1(1.0f / sum);
  uint32_t d = 0;
  for (; d + W <= it.head_dim; d += W) store(out + d, mul(load(acc + d), scale));
  if (d < it.head_dim) store_n(out + d, mul(load(acc + d), scale), static_cast<int>(it.head_dim - d));
}

// The results of one tile in one partition: to the partial results, or folded into the rows.
LS_SIMD_INLINE void keep_rows(const AttentionItem &it, uint32_t p, uint32_t first, uint32_t count, const float *part_top, const float *part_sum, const float *part, float *acc, float *top, float *sum) {
  const uint32_t rows = it.tokens * it.group, padded = pad16(it.head_dim);
  for (uint32_t r = 0; r < count; ++r) {
    const uint32_t row = first + r;
    if (it.partial) {
      float *to = it.partial + (static_cast<size_t>(p - it.part_begin) * rows + row) * (16 + padded);
      to[0] = part_top[r];
      to[1] = part_sum[r];
      for (uint32_t d = 0; d < it.head_dim; d += W) store(to + 16 + d, load(part + r * padded + d));
    } else if (part_sum[r] != 0) {
      fold_row(top + row, sum + row, acc + static_cast<size_t>(row) * padded, part_top[r], part_sum[r], part + r * padded, it.head_dim, p == 0);
    }
  }
}

using ScoreFn = void (*)(const float *, const Places &, uint32_t, uint32_t, float *);
using MixFn = void (*)(const float *, const Places &, uint32_t, uint32_t, float *, uint32_t);
#define LS_ROWS_6(f, s) &f<s, 1>, &f<s, 2>, &f<s, 3>, &f<s, 4>, &f<s, 5>, &f<s, 6>
#define LS_ROWS_12(f, s) LS_ROWS_6(f, s), &f<s, 7>, &f<s, 8>, &f<s, 9>, &f<s, 10>, &f<s, 11>, &f<s, 12>
#if defined(LS_SIMD_AVX2)
#define LS_ROWS LS_ROWS_6
#else
#define LS_ROWS LS_ROWS_12
#endif
static const ScoreFn kScores[3][kTileRows] = {{LS_ROWS(scores, reuse)}, {LS_ROWS(scores, stream)}, {LS_ROWS(scores, pairs)}};
static const MixFn kMix[3][kTileRows] = {{LS_ROWS(mix, reuse)}, {LS_ROWS(mix, stream)}, {LS_ROWS(mix, pairs)}};

// bf16 blocks of one page as f32 blocks: exact, so computing from the copy gives the same bits.
LS_SIMD_INLINE void widen(const Places &from, uint32_t page, uint32_t head_dim, float *k, float *v) {
  const uint16_t *kb = static_cast<const uint16_t *>(from.k[page]), *vb = static_cast<const uint16_t *>(from.v[page]);
  vf even, odd;
  for (uint32_t d = 0; d < head_dim; d += 2) {
    for (int j = 0; j < kPageVectors; ++j) {
      load_pairs(kb + d * 16 + j * 2 * W, even, odd);
      store(k + d * 16 + j * W, even);
      store(k + (d + 1) * 16 + j * W, odd);
    }
  }
  for (uint32_t t = 0; t < 16; t += 2) {
    uint32_t d = 0;
    for (; d + W <= head_dim; d += W) {
      load_pairs(vb + static_cast<size_t>(t) * head_dim + d * 2, even, odd);
      store(v + static_cast<size_t>(t) * head_dim + d, even);
      store(v + static_cast<size_t>(t + 1) * head_dim + d, odd);
    }
    if (d == head_dim) continue;
    load_pairs(vb + static_cast<size_t>(t) * head_dim + d * 2, even, odd);
    store_n(v + static_cast<size_t>(t) * head_dim + d, even, static_cast<int>(head_dim - d));
    store_n(v + static_cast<size_t>(t + 1) * head_dim + d, odd, static_cast<int>(head_dim - d));
  }
}

template <bool BF>
static void run_item(const AttentionItem &it, float *scratch) {
  const uint32_t rows = it.tokens * it.group, dims = it.head_dim, padded = pad16(dims);
  const uint32_t tiles = (rows + kTileRows - 1) / kTileRows;
  float *q = scratch, *acc = q + static_cast<size_t>(tiles) * kTileRows * padded, *top = acc + static_cast<size_t>(rows) * padded;
  float *sum = top + rows, *s = top + pad16(2 * rows), *part = s + kTileRows * kScoreStride;
  float *wide_k = part + static_cast<size_t>(kTileRows) * padded, *wide_v = wide_k + static_cast<size_t>(kPartition) * dims;

  // Query tiles, scaled and transposed: [tile][dim][rows of the tile].
  for (uint32_t row = 0; row < rows; ++row) {
    const uint32_t tile = row / kTileRows, count = rows - tile * kTileRows < kTileRows ? rows - tile * kTileRows : kTileRows;
    const float *from = it.q + static_cast<size_t>(row / it.group) * it.ld + static_cast<size_t>(row % it.group) * dims;
    float *to = q + static_cast<size_t>(tile) * kTileRows * padded + row % kTileRows;
    for (uint32_t d = 0; d < dims; ++d) to[static_cast<size_t>(d) * count] = from[d] * it.scale;
  }

  const uint32_t keys_all = it.first_position + it.tokens;
  for (uint32_t p = it.part_begin; p < it.part_end; ++p) {
    const uint32_t base = p * kPartition, keys = keys_all - base < kPartition ? keys_all - base : kPartition;
    Places at;
    for (uint32_t i = 0; i < (keys + 15) / 16; ++i) {
      const uint8_t *block = it.kv + static_cast<size_t>(it.pages[p * kPartitionPages + i]) * it.page_bytes;
      at.k[i] = block;
      at.v[i] = block + it.block_bytes;
    }
    const Source source = tiles > 1 ? reuse : BF ? pairs : stream;
    if (BF && tiles > 1) {
      for (uint32_t i = 0; i < (keys + 15) / 16; ++i) {
        float *k = wide_k + static_cast<size_t>(i) * 16 * dims, *v = wide_v + static_cast<size_t>(i) * 16 * dims;
        widen(at, i, dims, k, v);
        at.k[i] = k;
        at.v[i] = v;
      }
    }
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      const uint32_t first = tile * kTileRows, count = rows - first < kTileRows ? rows - first : kTileRows;
      // Keys of this partition that the last row of the tile sees; earlier rows see fewer.
      const uint32_t end = it.first_position + (first + count - 1) / it.group + 1;
      if (end <= base) {
        for (uint32_t r = 0; r < count && it.partial; ++r) it.partial[(static_cast<size_t>(p - it.part_begin) * rows + first + r) * (16 + padded) + 1] = 0;
        continue;
      }
      const uint32_t seen = end - base < kPartition ? end - base : kPartition, pages = (seen + 15) / 16;
      kScores[source][count - 1](q + static_cast<size_t>(first) * padded, at, pages, dims, s);
      float part_top[kTileRows], part_sum[kTileRows];
      for (uint32_t r = 0; r < count; ++r) {
        const uint32_t row_end = it.first_position + (first + r) / it.group + 1;
        const uint32_t n = row_end <= base ? 0 : row_end - base < kPartition ? row_end - base : kPartition;
        float *weights = s + r * kScoreStride;
        part_top[r] = part_sum[r] = 0;
        if (n) soften(weights, n, part_top[r], part_sum[r]);
        for (uint32_t i = pad16(n); i < pages * 16; ++i) weights[i] = 0;
      }
      kMix[source][count - 1](s, at, pages, dims, part, padded);
      keep_rows(it, p, first, count, part_top, part_sum, part, acc, top, sum);
    }
  }
  if (it.partial) return;
  for (uint32_t row = 0; row < rows; ++row) finish_row(it, row, acc + static_cast<size_t>(row) * padded, sum[row]);
}

static void fold_item(const AttentionItem &it, float *scratch) {
  const uint32_t rows = it.tokens * it.group, padded = pad16(it.head_dim);
  for (uint32_t row = 0; row < rows; ++row) {
    float top = 0, sum = 0;
    for (uint32_t p = 0; p < it.part_end; ++p) {
      const float *part = it.partial + (static_cast<size_t>(p) * rows + row) * (16 + padded);
      if (part[1] != 0) fold_row(&top, &sum, scratch, part[0], part[1], part + 16, it.head_dim, p == 0);
    }
    finish_row(it, row, scratch, sum);
  }
}

constexpr AttentionKernels attention_table(const char *name) { return {name, run_item<false>, run_item<true>, fold_item}; }

}  // namespace ls::cpu::LS_SIMD_NS
