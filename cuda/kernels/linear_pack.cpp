// Host side of the weights: from the layouts of files to the packed one.
#include <cstring>
#include <string>

#include "linear.h"
#include "linear_layout.h"

namespace ls::cuda {
namespace {

bool quantised(ls_dtype dtype) { return dtype >= LS_DTYPE_Q8_0; }
size_t element_size(ls_dtype dtype) { return dtype == LS_DTYPE_F32 ? 4 : 2; }
size_t block_size(ls_dtype dtype) { return dtype == LS_DTYPE_Q8_0 ? 34 : dtype == LS_DTYPE_Q4_0 ? 18 : 20; }

// Columns [0, cols) of one row to row `r` of the unit; the rest of the unit is zero already. Pairs of inputs stay together.
void pack_float(ls_dtype dtype, const uint8_t *src, uint32_t cols, uint32_t r, uint8_t *unit) {
  for (uint32_t col = 0; col < cols; col += 2) {
    const UnitPlace p = unit_place(r, col);
    if (dtype == LS_DTYPE_F32) std::memcpy(unit + place32(p), src + size_t{col} * 4, 8);
    else std::memcpy(unit + place16(p), src + size_t{col} * 2, 4);
  }
}

// One block of 32 weights of a row.
void pack_block(ls_dtype dtype, const uint8_t *src, uint32_t r, uint8_t *unit) {
  std::memcpy(unit + place_scale(dtype, r), src, 2);
  if (dtype == LS_DTYPE_Q8_0) {
    for (uint32_t col = 0; col < kUnitCols; ++col) unit[place8(unit_place(r, col))] = src[2 + col];
    return;
  }
  if (dtype == LS_DTYPE_Q4_1) std::memcpy(unit + place_scale(dtype, r) + 32, src + 2, 2);
  const uint8_t *nibbles = src + (dtype == LS_DTYPE_Q4_1 ? 4 : 2);
  // Step s is all low or all high nibbles. Rows r and r + 8 share words: each writes its own registers j = r / 8 and r / 8 + 2.
  for (uint32_t step = 0; step < 2; ++step)
    for (uint32_t t = 0; t < 4; ++t) {
      uint32_t word = 0;
      for (uint32_t e = 0; e < 4; ++e) {  // inputs 2t, 2t + 1, 2t + 8, 2t + 9
        const uint32_t col = step * 16 + 2 * t + e % 2 + e / 2 * 8;
        const uint32_t value = step ? nibbles[col - 16] >> 4 : nibbles[col] & 15u;
        word |= value << place4_bit(unit_place(r, col));
      }
      uint8_t *at = unit + place4_word(unit_place(r, step * 16 + 2 * t));
      uint32_t other;
      std::memcpy(&other, at, 4);
      word |= other;
      std::memcpy(at, &word, 4);
    }
}

}  // namespace

Status linear_check(ls_dtype dtype, const WeightSlice &slice) {
  const std::string cols = std::to_string(slice.cols);
  if (slice.rows == 0 || slice.cols == 0) return Status::fail(LS_INVALID, "a weight matrix of " + std::to_string(slice.rows) + " x " + cols);
  if (quantised(dtype) && (slice.cols % kUnitCols != 0 || slice.first_col % kUnitCols != 0))
    return Status::fail(LS_UNSUPPORTED, "quantised weights with inputs " + std::to_string(slice.first_col) + "+" + cols + ": expected multiples of 32");
  if (slice.cols % 8 != 0) return Status::fail(LS_UNSUPPORTED, "a weight matrix with " + cols + " inputs: the CUDA kernels expect a multiple of 8");
  return Status::good();
}

uint32_t linear_tiles(uint32_t rows) { return (rows + kTileRows - 1) / kTileRows; }
size_t linear_tile_bytes(ls_dtype dtype, uint32_t cols) { return size_t{(cols + kUnitCols - 1) / kUnitCols} * unit_bytes(dtype); }
size_t linear_bytes(ls_dtype dtype, uint32_t rows, uint32_t cols) { return linear_tiles(rows) * linear_tile_bytes(dtype, cols); }

void linear_pack(const TensorView &view, const WeightSlice &slice, uint32_t first, uint32_t count, uint8_t *out) {
  const ls_dtype dtype = view.dtype;
  const uint32_t units = (slice.cols + kUnitCols - 1) / kUnitCols;
  const size_t source_row = quantised(dtype) ? view.cols / kUnitCols * block_size(dtype) : view.cols * element_size(dtype);
  const size_t skip = quantised(dtype) ? slice.first_col / kUnitCols * block_size(dtype) : slice.first_col * element_size(dtype);
  const size_t step = quantised(dtype) ? block_size(dtype) : kUnitCols * element_size(dtype);
  const size_t unit = unit_bytes(dtype), tile_bytes = units * unit;
  for (uint32_t tile = first; tile < first + count; ++tile, out += tile_bytes) {
    std::memset(out, 0, tile_bytes);
    for (uint32_t r = 0; r < kTileRows && tile * kTileRows + r < slice.rows; ++r) {
      const uint8_t *src = view.data + (slice.first_row + size_t{tile} * kTileRows + r) * source_row + skip;
      for (uint32_t u = 0; u < units; ++u, src += step) {
        if (quantised(dtype)) pack_block(dtype, src, r, out + u * unit);
        else pack_float(dtype, src, slice.cols - u * kUnitCols < kUnitCols ? slice.cols - u * kUnitCols : kUnitCols, r, out + u * unit);
      }
    }
  }
}

}  // namespace ls::cuda
