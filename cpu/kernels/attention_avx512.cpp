#include "attention_impl.h"

namespace ls::cpu {
const AttentionKernels kAttention_avx512 = avx512::attention_table("avx512");
}  // namespace ls::cpu
