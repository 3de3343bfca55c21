// Matrix products with q4_1 weights.
#include "linear_sizes.cuh"

namespace ls::cuda {

void linear_launch_q4_1(Stream stream, LinearSize size, LinearParams &params) { launch_linear<WeightsQuant<LS_DTYPE_Q4_1>>(stream, size, params); }

}  // namespace ls::cuda
