// Between linear.cu, which chooses, and the files that hold the kernels of one weight type.
#pragma once
#include "../device.h"
#include "linear.h"
#include "linear_layout.h"

namespace ls::cuda {

struct LinearJob {
  const unsigned char *w = nullptr;
  const float *bias = nullptr;
  void *y = nullptr;
  uint32_t outputs = 0, ldy = 0;
  uint32_t first_block = ~0u;  // of the launch's output blocks; ~0: no such job
  Element type = Element::bf16;
  bool accumulate = false;
  bool aligned = false;        // four outputs may be written at once
};

struct LinearParams {
  const bf16 *x = nullptr;
  uint32_t rows = 0, cols = 0, ldx = 0;
  uint32_t output_blocks = 0, row_blocks = 0;  // the grid is their product
  LinearJob jobs[kMaxLinearOuts];
};

// The kernels differ in how much a block does; results are the same bits.
enum class LinearSize { rows8, rows16, rows64, large };

// All jobs have weights of the type. Fills in the blocks and launches.
void linear_launch_bf16(Stream stream, LinearSize size, LinearParams &params);
void linear_launch_f16(Stream stream, LinearSize size, LinearParams &params);
void linear_launch_f32(Stream stream, LinearSize size, LinearParams &params);
void linear_launch_q8_0(Stream stream, LinearSize size, LinearParams &params);
void linear_launch_q4_0(Stream stream, LinearSize size, LinearParams &params);
void linear_launch_q4_1(Stream stream, LinearSize size, LinearParams &params);

}  // namespace ls::cuda
