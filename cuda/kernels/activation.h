// The gated activation of the feed-forward part.
#pragma once
#include <cstdint>

#include "../runtime.h"
#include "element.h"

namespace ls::cuda {

// out[r][i] = gate[r][i] / (1 + exp(-gate[r][i])) * up[r][i]
//   gate, up (rows, n) of `type`, rows ld elements apart: two halves of one matrix or two matrices   out (rows, n) bf16, dense
void silu_mul(Stream stream, const void *gate, const void *up, uint32_t ld, Element type, void *out, uint32_t rows, uint32_t n);

}  // namespace ls::cuda
