// Attention over bf16 pages on AMX tiles, for head dims that are multiples of 32; included by the tile translation units.
//
// 16 query rows are one tile. Scores of a page: A = 16 rows x 32 dims of q (scaled, rounded to bf16), B = the K block as it lies in the page.
// V product: A = 16 rows x 32 keys of weights (rounded to bf16), B = the V blocks of two pages one behind the other. Rows of a tile do not
// touch each other, sums run over dims and keys in order, and one row uses the same tiles as many, so a row has the same bits in every company.
#pragma once
#include "../amx.h"
#include "attention_impl.h"

namespace ls::cpu::LS_SIMD_NS {

constexpr uint32_t kTileBlock = 32;  // query rows per pass: two tiles, each loaded operand is used twice
constexpr size_t kWeightStride = kPartition;

// Tiles 0..3 sums (row tile * 2 + column tile), 4 and 5 rows, 6 and 7 columns.
template <int R, int C>
LS_SIMD_INLINE void tile_step(const uint16_t *rows, size_t row_stride, const void *column0, const void *column1, size_t column_stride) {
  tile_load<4>(rows, row_stride * 2);
  tile_load<6>(column0, column_stride);
  tile_dpbf16<0, 4, 6>();
  if constexpr (R == 2) {
    tile_load<5>(rows + 16 * row_stride, row_stride * 2);
    tile_dpbf16<2, 5, 6>();
  }
  if constexpr (C == 2) {
    tile_load<7>(column1, column_stride);
    tile_dpbf16<1, 4, 7>();
    if constexpr (R == 2) tile_dpbf16<3, 5, 7>();
  }
}
template <int R, int C>
LS_SIMD_INLINE void tile_clear() {
  tile_zero<0>();
  if constexpr (C == 2) tile_zero<1>();
  if constexpr (R == 2) tile_zero<2>();
  if constexpr (R == 2 && C == 2) tile_zero<3>();
}
template <int R, int C>
LS_SIMD_INLINE void tile_put(float *to, size_t stride) {
  tile_store<0>(to, stride * 4);
  if constexpr (C == 2) tile_store<1>(to + 16, stride * 4);
  if constexpr (R == 2) tile_store<2>(to + 16 * stride, stride * 4);
  if constexpr (R == 2 && C == 2) tile_store<3>(to + 16 * stride + 16, stride * 4);
}

// s[row][key] of C pages; q (16 R rows, head_dim) bf16.
template <int R, int C>
LS_SIMD_INLINE void tile_scores(const uint16_t *q, const void *const *k, uint32_t head_dim, float *s) {
  tile_clear<R, C>();
  for (uint32_t d = 0; d < head_dim; d += 32)
    tile_step<R, C>(q + d, head_dim, static_cast<const uint16_t *>(k[0]) + d * 16, static_cast<const uint16_t *>(k[C - 1]) + d * 16, 64);
  tile_put<R, C>(s, kScoreStride);
}

// part[row][dim .. dim+31]; weights (16 R rows, keys) bf16, v [keys/2][head_dim][2] bf16.
template <int R>
LS_SIMD_INLINE void tile_mix(const uint16_t *weights, const uint16_t *v, uint32_t keys, uint32_t head_dim, uint32_t dim, float *part) {
  tile_clear<R, 2>();
  for (uint32_t key = 0; key < keys; key += 32) {
    const uint16_t *at = v + static_cast<size_t>(key) * head_dim + dim * 2;
    tile_step<R, 2>(weights + key, kWeightStride, at, at + 32, static_cast<size_t>(head_dim) * 4);
  }
  tile_put<R, 2>(part + dim, head_dim);
}

static void run_tiles(const AttentionItem &it, float *scratch) {
  const uint32_t rows = it.tokens * it.group, dims = it.head_dim, rows16 = pad16(rows);  // dims is its own padding here
  float *acc = scratch, *top = acc + static_cast<size_t>(rows) * dims, *sum = top + rows, *s = top + pad16(2 * rows), *part = s + kTileBlock * kScoreStride;
  uint16_t *weights = reinterpret_cast<uint16_t *>(part + static_cast<size_t>(kTileBlock) * dims);
  uint16_t *q = weights + kTileBlock * kWeightStride, *v = q + static_cast<size_t>(rows16) * dims;

  const vf scale = set1(it.scale);
  for (uint32_t row = 0; row < rows; ++row) {
    const float *from = it.q + static_cast<size_t>(row / it.group) * it.ld + static_cast<size_t>(row % it.group) * dims;
    for (uint32_t d = 0; d < dims; d += W) store_bf16(q + static_cast<size_t>(row) * dims + d, mul(load(from + d), scale));
  }
  std::memset(q + static_cast<size_t>(rows) * dims, 0, static_cast<size_t>(rows16 - rows) * dims * 2);

  TileConfig config;
  for (int i = 0; i < 8; ++i) config.rows[i] = 16, config.colsb[i] = 64;
  tile_config(config);
  const uint32_t keys_all = it.first_position + it.tokens;
  for (uint32_t p = it.part_begin; p < it.part_end; ++p) {
    const uint32_t base = p * kPartition, keys = keys_all - base < kPartition ? keys_all - base : kPartition, pages_all = (keys + 15) / 16;
    const void *k[kPartitionPages];
    for (uint32_t i = 0; i < pages_all; ++i) {
      const uint8_t *block = it.kv + static_cast<size_t>(it.pages[p * kPartitionPages + i]) * it.page_bytes;
      k[i] = block;
      std::memcpy(v + static_cast<size_t>(i) * 16 * dims, block + it.block_bytes, it.block_bytes);
    }
    // The V product takes two pages at a time; a missing second one meets zero weights only.
    if (pages_all % 2) std::memset(v + static_cast<size_t>(pages_all) * 16 * dims, 0, it.block_bytes);

    for (uint32_t first = 0; first < rows; first += kTileBlock) {
      const uint32_t count = rows - first < kTileBlock ? rows - first : kTileBlock;
      const uint32_t end = it.first_position + (first + count - 1) / it.group + 1;
      if (end <= base) {
        for (uint32_t r = 0; r < count && it.partial; ++r) it.partial[(static_cast<size_t>(p - it.part_begin) * rows + first + r) * (16 + dims) + 1] = 0;
        continue;
      }
      const uint32_t seen = end - base < kPartition ? end - base : kPartition, pages = (seen + 15) / 16, keys32 = (seen + 31) / 32 * 32;
      const uint16_t *rows_q = q + static_cast<size_t>(first) * dims;
      const bool two = count > 16;
      for (uint32_t i = 0; i < pages; i += 2) {
        if (two && i + 1 < pages) tile_scores<2, 2>(rows_q, k + i, dims, s + i * 16);
        else if (two) tile_scores<2, 1>(rows_q, k + i, dims, s + i * 16);
        else if (i + 1 < pages) tile_scores<1, 2>(rows_q, k + i, dims, s + i * 16);
        else tile_scores<1, 1>(rows_q, k + i, dims, s + i * 16);
      }
      float part_top[kTileBlock], part_sum[kTileBlock];
      for (uint32_t r = 0; r < count; ++r) {
        const uint32_t row_end = it.first_position + (first + r) / it.group + 1;
        const uint32_t n = row_end <= base ? 0 : row_end - base < kPartition ? row_end - base : kPartition;
        float *from = s + r * kScoreStride;
        uint16_t *to = weights + r * kWeightStride;
        part_top[r] = part_sum[r] = 0;
        if (n) soften(from, n, part_top[r], part_sum[r]);
        uint32_t i = 0;
        for (; i < pad16(n); i += W) store_bf16(to + i, load(from + i));
        std::memset(to + i, 0, (keys32 - i) * 2);
      }
      for (uint32_t d = 0; d < dims; d += 32) {
        if (two) tile_mix<2>(weights, v, keys32, dims, d, part);
        else tile_mix<1>(weights, v, keys32, dims, d, part);
      }
      keep_rows(it, p, first, count, part_top, part_sum, part, acc, top, sum);
    }
  }
  tile_release();
  if (it.partial) return;
  for (uint32_t row = 0; row < rows; ++row) finish_row(it, row, acc + static_cast<size_t>(row) * dims, sum[row]);
}

static void run_bf16(const AttentionItem &it, float *scratch) {
  if (it.head_dim % 32 == 0) run_tiles(it, scratch);
  else run_item<true>(it, scratch);
}

constexpr AttentionKernels attention_tile_table(const char *name) { return {name, run_item<false>, run_bf16, fold_item}; }

}  // namespace ls::cpu::LS_SIMD_NS
