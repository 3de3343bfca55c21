// What one instruction set offers to linear.cpp. Each kernel unit fills one table; all pointers of a table work on the same layouts.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../native/layerscale.h"

namespace ls::cpu {

// Where results go: y[t * ldy + row], plus bias, plus what is there already.
struct LinearTarget {
  float *y = nullptr;
  size_t ldy = 0;
  const float *bias = nullptr;  // (N) or null
  bool accumulate = false;
};

// Float weights as stored: row r at data + r * cols * element bytes, 2-byte aligned at least.
struct FloatMatrix {
  const uint8_t *data = nullptr;
  ls_dtype dtype = LS_DTYPE_F32;
  uint32_t rows = 0, cols = 0;
};

// Quantised weights, `group` rows interleaved (8 or 16; rows beyond N are zero). One group of rows is one stretch of group_bytes bytes:
//   d:  [cols/32][group] f16,  Q4_1 also m: [cols/32][group] f16 behind it, padded to 64 bytes; quants at quant_offset:
//   Q8_0 [cols/32][8][group/4][2][4][2] u8 = weight + 128: byte (c, lane, e, i, h) is weight k = 4c + 2e + h of row 4*lane + i. One vector load holds
//        two pairs of columns of every row; unpacking its 128-bit lanes with zero gives 16-bit pairs (k, k+1) in row order, as pmaddwd wants them.
//   Q4_x [cols/32][4][group][2] u16, 4 nibbles each: nibble t of u16 (c, r, h) is weight k = 8c + 2t + h of row r.
struct QuantMatrix {
  const uint8_t *data = nullptr;
  ls_dtype dtype = LS_DTYPE_Q8_0;
  uint32_t rows = 0, cols = 0, group = 0;
  size_t group_bytes = 0, quant_offset = 0;
};

// Activations as 16-bit integers per block of 32: x[t][k] ~ q[t*cols + k] * d[t*blocks + k/32], |q| <= 32767.
struct QuantRows {
  int16_t *q = nullptr;
  float *d = nullptr;         // scale
  float *sum = nullptr;       // d * sum(q): what Q4_1's m multiplies
  int32_t *minus8 = nullptr, *minus128 = nullptr;  // -8 * sum(q), -128 * sum(q): what the offsets of Q4_0 and Q8_0 contribute
  uint32_t cols = 0;
};

struct LinearKernels {
  const char *name;
  uint32_t group;       // rows interleaved in QuantMatrix
  uint32_t float_rows;  // row granule of float_product: chunks start at multiples of it
  // x (m, ldx) f32. scratch: float_scratch(cols) floats, 64-byte aligned, private to the call.
  size_t (*float_scratch)(uint32_t cols);
  void (*float_product)(const FloatMatrix &w, uint32_t row0, uint32_t row1, const float *x, uint32_t m, size_t ldx, const LinearTarget &out, float *scratch);
  void (*quantize_row)(const float *x, uint32_t t, const QuantRows &out);
  void (*quant_product)(const QuantMatrix &w, uint32_t group0, uint32_t group1, const QuantRows &x, uint32_t m, const LinearTarget &out);
  // bf16 on tiles, null without them. Token tile j (16 tokens, or m when m < 16) is packed at packed + j * tile_bytes(cols).
  void (*tile_pack)(const float *x, uint32_t m, size_t ldx, uint32_t cols, uint32_t tile, uint8_t *packed);
  // Rows [row0, row1) with row0 a multiple of 16; tail16: 16 rows, zero-padded, standing for the last rows when N is no multiple of 16.
  void (*tile_product)(const FloatMatrix &w, const uint8_t *tail16, uint32_t row0, uint32_t row1, const uint8_t *packed, uint32_t m, const LinearTarget &out);
};

// Bytes of one packed token tile: 1 KiB per 32 columns.
static inline size_t tile_bytes(uint32_t cols) { return static_cast<size_t>(cols / 32) * 1024; }

const LinearKernels &linear_kernels_avx2();
const LinearKernels &linear_kernels_avx512();
const LinearKernels &linear_kernels_avx512vnni();
const LinearKernels &linear_kernels_amx();
// Tests only: the same sources on AVX2 registers and on a plain C++ tile unit.
const LinearKernels &linear_kernels_emu512();
const LinearKernels &linear_kernels_emuamx();

}  // namespace ls::cpu
