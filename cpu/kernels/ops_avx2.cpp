#include "ops_impl.h"

namespace ls::cpu {
const OpsKernels kOps_avx2 = avx2::ops_table("avx2");
}  // namespace ls::cpu
