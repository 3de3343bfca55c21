#include "linear_float.h"
#include "linear_quant.h"

namespace ls::cpu {

const LinearKernels &linear_kernels_emu512() {
  using namespace LS_SIMD_NS;
  static constexpr LinearKernels table{"emu512", W, 8, float_scratch, float_product, quantize_row, quant_product, nullptr, nullptr};
  return table;
}

}  // namespace ls::cpu
