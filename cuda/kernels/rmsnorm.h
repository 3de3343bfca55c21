// Root-mean-square norm with an optional residual addition in front.
#pragma once
#include <cstdint>

#include "../runtime.h"
#include "element.h"

namespace ls::cuda {

struct RmsNorm {
  float *x = nullptr;              // (., n) residual stream, f32
  const void *delta = nullptr;     // (., n) or null: x += delta first, and x is written back
  Element delta_type = Element::bf16;
  const float *weight = nullptr;   // (n)
  const int32_t *index = nullptr;  // (rows) or null: row r reads (and adds to) row index[r] of x and delta; below 0: the row is skipped
  void *y = nullptr;               // (rows, n): x / sqrt(mean(x^2) + eps) * weight
  Element y_type = Element::bf16;
  uint32_t rows = 0, n = 0;
  float eps = 0;
};
void rmsnorm(Stream stream, const RmsNorm &args);

// to[r] = from[index[r]] for rows of `bytes` (a multiple of 4); rows with an index below 0 are skipped.
void gather_rows(Stream stream, const void *from, const int32_t *index, void *to, uint32_t rows, uint32_t bytes);

}  // namespace ls::cuda
