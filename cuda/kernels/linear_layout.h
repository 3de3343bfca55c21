// How packed weights lie. A tile is 16 outputs over all inputs: units of 32 inputs one after the other, inputs padded with zeros to whole units,
// outputs to whole tiles. Inside a unit every lane finds its part of the A operand of mma.m16n8k16 in one read, for two steps of 16 inputs.
//
// Lane 4g + t holds in step s, register j: output g + 8 * (j % 2), inputs 16 s + 2 t + 8 * (j / 2) + {0, 1}.
//   bf16, f16   [step][lane][j][2]                     1024 bytes
//   f32         [step][j / 2][lane][j % 2][2]          2048 bytes
//   Q8_0        [lane][step][j / 2][i][j % 2] i8       512 bytes, then d: [g][output g, g + 8] f16, 32 bytes    (i: which of the two inputs)
//   Q4_0        [lane][step] u32: input i of register j at bit 4 j + 16 i      256 bytes, then d
//   Q4_1        the same, then d, then m
#pragma once
#include <cstddef>
#include <cstdint>

#include "../../native/layerscale.h"

namespace ls::cuda {

constexpr uint32_t kTileRows = 16, kUnitCols = 32;

constexpr uint32_t unit_bytes(ls_dtype dtype) {
  switch (dtype) {
    case LS_DTYPE_F32: return 2048;
    case LS_DTYPE_F16:
    case LS_DTYPE_BF16: return 1024;
    case LS_DTYPE_Q8_0: return 512 + 32;
    case LS_DTYPE_Q4_0: return 256 + 32;
    case LS_DTYPE_Q4_1: return 256 + 64;
  }
  return 0;
}
constexpr uint32_t quant_bytes(ls_dtype dtype) { return dtype == LS_DTYPE_Q8_0 ? 512 : 256; }

// Where element (row, col) of a unit lies; row < 16, col < 32.
struct UnitPlace {
  uint32_t lane, step, j, i;
};
constexpr UnitPlace unit_place(uint32_t row, uint32_t col) {
  return {row % 8 * 4 + col % 8 / 2, col / 16, col % 16 / 8 * 2 + row / 8, col % 2};
}
// Byte offset of an element of 2 or 4 bytes, and of a Q8_0 byte.
constexpr uint32_t place16(UnitPlace p) { return p.step * 512 + p.lane * 16 + p.j * 4 + p.i * 2; }
constexpr uint32_t place32(UnitPlace p) { return p.step * 1024 + p.j / 2 * 512 + p.lane * 16 + p.j % 2 * 8 + p.i * 4; }
constexpr uint32_t place8(UnitPlace p) { return p.lane * 16 + p.step * 8 + p.j / 2 * 4 + p.i * 2 + p.j % 2; }
// Byte offset of the 32-bit word of a Q4 element, and its bit.
constexpr uint32_t place4_word(UnitPlace p) { return p.lane * 8 + p.step * 4; }
constexpr uint32_t place4_bit(UnitPlace p) { return p.j * 4 + p.i * 16; }
// Byte offset of d behind the quants; m is 32 bytes further.
constexpr uint32_t place_scale(ls_dtype dtype, uint32_t row) { return quant_bytes(dtype) + row % 8 * 4 + row / 8 * 2; }

}  // namespace ls::cuda
