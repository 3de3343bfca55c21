#include "linear_tiles.h"

namespace ls::cpu {

// f32, f16 and the quantised formats run on the AVX-512 unit: every CPU with AMX has VNNI.
const LinearKernels &linear_kernels_amx() {
  static const LinearKernels table = [] {
    LinearKernels k = linear_kernels_avx512vnni();
    k.name = "amx";
    k.tile_pack = LS_SIMD_NS::tile_pack;
    k.tile_product = LS_SIMD_NS::tile_product;
    return k;
  }();
  return table;
}

}  // namespace ls::cpu
