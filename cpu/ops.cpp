#include "ops.h"

namespace ls::cpu {

const OpsKernels &ops_for(Isa isa) { return isa == Isa::avx2 ? kOps_avx2 : kOps_avx512; }

}  // namespace ls::cpu
