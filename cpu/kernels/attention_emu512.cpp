#include "attention_impl.h"

namespace ls::cpu {
const AttentionKernels kAttention_emu512 = emu512::attention_table("emu512");
}  // namespace ls::cpu
