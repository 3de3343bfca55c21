// Matrix products with bf16 weights.
#include "linear_sizes.cuh"

namespace ls::cuda {

void linear_launch_bf16(Stream stream, LinearSize size, LinearParams &params) { launch_linear<WeightsBf16>(stream, size, params); }

}  // namespace ls::cuda
