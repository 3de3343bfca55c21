#include "attention_tiles.h"

namespace ls::cpu {
const AttentionKernels kAttention_amx = amx::attention_tile_table("amx");
}  // namespace ls::cpu
