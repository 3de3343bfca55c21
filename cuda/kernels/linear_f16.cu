// Matrix products with f16 weights.
#include "linear_sizes.cuh"

namespace ls::cuda {

void linear_launch_f16(Stream stream, LinearSize size, LinearParams &params) { launch_linear<WeightsSplit<LS_DTYPE_F16>>(stream, size, params); }

}  // namespace ls::cuda
