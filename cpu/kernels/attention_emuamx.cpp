#include "attention_tiles.h"

namespace ls::cpu {
const AttentionKernels kAttention_emuamx = emuamx::attention_tile_table("emuamx");
}  // namespace ls::cpu
