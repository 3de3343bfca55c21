#include "ops_impl.h"

namespace ls::cpu {
const OpsKernels kOps_avx512 = avx512::ops_table("avx512");
}  // namespace ls::cpu
