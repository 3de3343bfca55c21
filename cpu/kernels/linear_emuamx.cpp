#include "linear_tiles.h"

namespace ls::cpu {

// Tests only: the tile source on the plain C++ tile unit.
const LinearKernels &linear_kernels_emuamx() {
  static const LinearKernels table = [] {
    LinearKernels k = linear_kernels_emu512();
    k.name = "emuamx";
    k.tile_pack = LS_SIMD_NS::tile_pack;
    k.tile_product = LS_SIMD_NS::tile_product;
    return k;
  }();
  return table;
}

}  // namespace ls::cpu
