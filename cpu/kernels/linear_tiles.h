// bf16 weights on AMX tiles (included per ISA, see cpu.cmake).
//
// The stored rows W[n][k..k+31] are the A operand as they lie in the file; 16 tokens of activations, rounded to bf16, are packed as B; C is (rows, tokens).
// An element of C sums 32 columns per tile product, products in order over K, whatever stands in the other rows and columns of the tile: one token or many,
// any row block, the bits are equal. One token uses a B tile of one column.
#pragma once
#include <utility>

#include "../amx.h"
#include "../linear_kernels.h"

namespace ls::cpu::LS_SIMD_NS {

// Columns of a packed token tile: m for a single tile, else 16 with zeros behind the last token.
LS_SIMD_INLINE uint32_t tile_columns(uint32_t m) { return m < 16 ? m : 16; }

// Tile `tile` of x (m, ldx): packed[step][pair][token][2] bf16, 1 KiB apart per step of 32 columns.
inline void tile_pack(const float *x, uint32_t m, size_t ldx, uint32_t cols, uint32_t tile, uint8_t *packed) {
  const uint32_t columns = tile_columns(m), t0 = tile * 16;
  packed += tile * tile_bytes(cols);
  alignas(64) uint32_t pairs[16];
  for (uint32_t t = 0; t < columns; ++t) {
    for (uint32_t s = 0; s < cols / 32; ++s) {
      uint8_t *step = packed + static_cast<size_t>(s) * 1024 + t * 4;
      if (t0 + t < m) {
        const float *src = x + (t0 + t) * ldx + s * 32;
        store_bf16(pairs, load(src));
        store_bf16(pairs + 8, load(src + 16));
      } else {
        std::memset(pairs, 0, sizeof(pairs));
      }
      for (uint32_t p = 0; p < 16; ++p) std::memcpy(step + static_cast<size_t>(p) * columns * 4, &pairs[p], 4);
    }
  }
}

// c[row][16 tokens] of one C tile to y: transposed four by four.
LS_SIMD_INLINE void put_c_tile(const float *c, uint32_t row, uint32_t rows, uint32_t t0, uint32_t tokens, const LinearTarget &out) {
  for (uint32_t r = 0; r < rows; r += 4) {
    for (uint32_t t = 0; t < tokens; t += 4) {
      __m128 v[4] = {_mm_load_ps(c + r * 16 + t), _mm_load_ps(c + (r + 1) * 16 + t), _mm_load_ps(c + (r + 2) * 16 + t), _mm_load_ps(c + (r + 3) * 16 + t)};
      _MM_TRANSPOSE4_PS(v[0], v[1], v[2], v[3]);
      for (uint32_t i = 0; i < 4 && t + i < tokens; ++i) {
        float *y = out.y + (t0 + t + i) * out.ldy + row + r;
        if (r + 4 <= rows) {
          if (out.bias) v[i] = _mm_add_ps(v[i], _mm_loadu_ps(out.bias + row + r));
          if (out.accumulate) v[i] = _mm_add_ps(_mm_loadu_ps(y), v[i]);
          _mm_storeu_ps(y, v[i]);
        } else {
          alignas(16) float tmp[4];
          _mm_store_ps(tmp, v[i]);
          for (uint32_t j = 0; r + j < rows; ++j) {
            const float sum = out.bias ? tmp[j] + out.bias[row + r + j] : tmp[j];
            y[j] = out.accumulate ? y[j] + sum : sum;
          }
        }
      }
    }
  }
}

// A row tiles x B token tiles; C tiles 0.., B operands behind them, A operands in the last tiles.
template <int A, int B>
LS_SIMD_INLINE void tile_block(const FloatMatrix &w, const uint8_t *tail16, uint32_t row, const uint8_t *packed, uint32_t token_tile, uint32_t m, const LinearTarget &out) {
  static_assert((B == 1 && A <= 4) || (B == 2 && A <= 2));
  constexpr int kB = A * B, kA = kB + B;  // C tiles are 0 .. A*B-1; A operands alternate when there is room for two
  const size_t stride = static_cast<size_t>(w.cols) * 2, b_stride = tile_columns(m) * 4;
  const uint8_t *a[A], *b = packed + token_tile * tile_bytes(w.cols);
  for (int i = 0; i < A; ++i) {
    const uint32_t r = row + 16 * i;
    a[i] = r + 16 <= w.rows ? w.data + r * stride : tail16;
  }
  const auto zero_all = [&]<int... I>(std::integer_sequence<int, I...>) { (tile_zero<I>(), ...); };
  zero_all(std::make_integer_sequence<int, A * B>{});
  const size_t b_next = tile_bytes(w.cols);
  for (uint32_t k = 0; k < w.cols / 32; ++k, b += 1024) {
    tile_load<kB>(b, b_stride);
    if constexpr (B == 2) tile_load<kB + 1>(b + b_next, b_stride);
    const auto rows = [&]<int I>() {
      constexpr int kOperand = kA + (kA + 1 < 8 ? I % 2 : 0);
      tile_load<kOperand>(a[I] + k * 64, stride);
      tile_dpbf16<I * B, kOperand, kB>();
      if constexpr (B == 2) tile_dpbf16<I * B + 1, kOperand, kB + 1>();
      // The next block of rows, one line per row and step: rows lie one behind the other, so the stream has no gap.
      if constexpr (B == 1) {
        for (int r = 0; r < 16; ++r) _mm_prefetch(reinterpret_cast<const char *>(a[I] + (16 * A + r) * stride + k * 64), _MM_HINT_T1);
      }
    };
    const auto all_rows = [&]<int... I>(std::integer_sequence<int, I...>) { (rows.template operator()<I>(), ...); };
    all_rows(std::make_integer_sequence<int, A>{});
  }
  alignas(64) float c[256] = {};
  const auto put = [&]<int I>() {
    tile_store<I>(c, 64);
    const uint32_t r = row + 16 * (I / B), t = (token_tile + I % B) * 16;
    put_c_tile(c, r, w.rows - r < 16 ? w.rows - r : 16, t, m - t < 16 ? m - t : 16, out);
  };
  const auto put_all = [&]<int... I>(std::integer_sequence<int, I...>) { (put.template operator()<I>(), ...); };
  put_all(std::make_integer_sequence<int, A * B>{});
}

inline void tile_product(const FloatMatrix &w, const uint8_t *tail16, uint32_t row0, uint32_t row1, const uint8_t *packed, uint32_t m, const LinearTarget &out) {
  TileConfig config;
  const uint16_t columns = static_cast<uint16_t>(tile_columns(m) * 4);
  const uint32_t token_tiles = (m + 15) / 16;
  uint32_t row = row0;
  // Tile roles differ between the shapes, so each shape has its configuration: C tiles `columns` wide, B 16 pairs x `columns`, A 16 rows x 64 bytes.
  const auto configure = [&](int c_tiles, int b_tiles) {
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = 16;
      config.colsb[i] = i < c_tiles + b_tiles ? columns : 64;
    }
    tile_config(config);
  };
  uint32_t left = (row1 - row0 + 15) / 16;  // row tiles
  if (token_tiles == 1) {
    if (left >= 4) configure(4, 1);
    for (; left >= 4; left -= 4, row += 64) tile_block<4, 1>(w, tail16, row, packed, 0, m, out);
    if (left >= 2) {
      configure(2, 1);
      tile_block<2, 1>(w, tail16, row, packed, 0, m, out);
      left -= 2, row += 32;
    }
    if (left) {
      configure(1, 1);
      tile_block<1, 1>(w, tail16, row, packed, 0, m, out);
    }
  } else {
    // 16 tokens or more: every tile is 64 bytes wide, one configuration serves all shapes.
    configure(4, 2);
    for (; left > 0; row += 32) {
      const bool two = left >= 2;
      for (uint32_t t = 0; t < token_tiles; t += 2) {
        const bool pair = t + 1 < token_tiles;
        if (two && pair) tile_block<2, 2>(w, tail16, row, packed, t, m, out);
        else if (two) tile_block<2, 1>(w, tail16, row, packed, t, m, out);
        else if (pair) tile_block<1, 2>(w, tail16, row, packed, t, m, out);
        else tile_block<1, 1>(w, tail16, row, packed, t, m, out);
      }
      left -= two ? 2 : 1;
    }
  }
  tile_release();
}

}  // namespace ls::cpu::LS_SIMD_NS
