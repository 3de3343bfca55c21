// Matrix products with f32 weights.
#include "linear_sizes.cuh"

namespace ls::cuda {

void linear_launch_f32(Stream stream, LinearSize size, LinearParams &params) { launch_linear<WeightsSplit<LS_DTYPE_F32>>(stream, size, params); }

}  // namespace ls::cuda
