// Rows of the embedding matrix as the residual stream.
#pragma once
#include <cstdint>

#include "../../native/layerscale.h"
#include "../runtime.h"

namespace ls::cuda {

// x[t] = table[tokens[t]], exactly, for t < count.
//   table   (vocab, hidden) in the layout of the file: f32, f16, bf16, or Q8_0, Q4_0, Q4_1 blocks along hidden
//   tokens  (count) ids; below 0: carry[~tokens[t]], the token that a row sampled in the step before. An id outside the vocabulary reads row 0.
//   x       (count, hidden) f32
void embedding(Stream stream, const void *table, ls_dtype dtype, uint32_t vocab, uint32_t hidden, const int32_t *tokens, const int32_t *carry, uint32_t count, float *x);

}  // namespace ls::cuda
