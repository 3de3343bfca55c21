#include "ops_impl.h"

namespace ls::cpu {
const OpsKernels kOps_emu512 = emu512::ops_table("emu512");
}  // namespace ls::cpu
