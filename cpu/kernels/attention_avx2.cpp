#include "attention_impl.h"

namespace ls::cpu {
const AttentionKernels kAttention_avx2 = avx2::attention_table("avx2");
}  // namespace ls::cpu
