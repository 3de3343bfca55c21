// Products with weight matrices on the tensor cores: y = x W^T (+ bias), bf16 inputs, f32 sums, weights f32, f16, bf16, Q8_0, Q4_0, Q4_1.
//
// What a row of y holds depends on that row of x alone, bit for bit: every kernel, whatever the number of rows, adds in one order (two halves of
// K, each in steps of 16, then the halves). The order is the same on every architecture; what the tensor core does inside a step is its own.
//   bf16      as they are
//   f16       split exactly into two bf16 terms, two products
//   f32       the upper 16 bits of the mantissa in two bf16 terms, two products (2^-17 relative)
//   Q*        the integers are exact in bf16; each block of 32 is scaled in f32: no rounding of weights
#pragma once
#include <cstddef>
#include <cstdint>

#include "../../native/backend.h"
#include "../runtime.h"
#include "element.h"

namespace ls::cuda {

// Part of a matrix: what one rank of --tp keeps. first_col and cols are multiples of 32 for quantised weights.
struct WeightSlice {
  uint32_t first_row = 0, rows = 0, first_col = 0, cols = 0;
};

// A matrix on the device. Weights are packed: 16 outputs x 32 inputs lie as the lanes of a warp want them.
struct Linear {
  ls_dtype dtype = LS_DTYPE_BF16;
  uint32_t rows = 0, cols = 0;    // outputs, inputs
  const void *data = nullptr;     // linear_bytes(), 16-byte aligned
  const float *bias = nullptr;    // (rows) or null
};

// Whether the kernels take such a slice: cols % 8 == 0, blocks whole. The text names the number that does not fit.
Status linear_check(ls_dtype dtype, const WeightSlice &slice);
// Packed bytes of a matrix: linear_tiles(rows) tiles of linear_tile_bytes().
uint32_t linear_tiles(uint32_t rows);
size_t linear_tile_bytes(ls_dtype dtype, uint32_t cols);
size_t linear_bytes(ls_dtype dtype, uint32_t rows, uint32_t cols);
// Packs tiles [first, first + count) of a slice of `view` to `out` in host memory, count * linear_tile_bytes(dtype, slice.cols). Tiles are
// independent: several threads may pack one matrix, and upload while they do.
void linear_pack(const TensorView &view, const WeightSlice &slice, uint32_t first, uint32_t count, uint8_t *out);

inline constexpr uint32_t kMaxLinearOuts = 4;
struct LinearOut {
  const Linear *w = nullptr;
  void *y = nullptr;               // (rows, w->rows) of `type`, rows ldy elements apart
  Element type = Element::bf16;
  uint32_t ldy = 0;
  bool accumulate = false;         // y += (residual)
};
// For up to kMaxLinearOuts matrices over the same input (q, k, v; gate, up): one launch where their dtypes agree. All have the same cols.
//   x (rows, cols) bf16, rows ldx elements apart, 16-byte aligned, ldx % 8 == 0
void linear_forward(Stream stream, const void *x, uint32_t rows, uint32_t ldx, const LinearOut *outs, uint32_t count);

// y[i] = row rows[i] of a packed matrix as f32, exactly; ids outside the matrix read row 0, ids below 0 are looked up as carry[~id] first.
// For embeddings that are also the head: no second copy. y (count, cols).
void linear_gather(Stream stream, const Linear &w, const int32_t *ids, const int32_t *carry, uint32_t count, float *y);

}  // namespace ls::cuda
