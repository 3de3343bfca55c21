// Which instruction set the kernels use: found once from the CPU and the operating system, or forced by LAYERSCALE_CPU_ISA.
#pragma once
#include <string>
#include <vector>

#include "../native/backend.h"

namespace ls::cpu {

// avx2 = AVX2+FMA+F16C (the minimum). avx512 = F+BW+VL+DQ. amx = avx512 + VNNI + BF16 + AMX-TILE/BF16/INT8.
enum class Isa { avx2, avx512, amx };

const char *isa_name(Isa isa);

// What the CPU has and the operating system lets a process use. Asking for AMX tiles needs a permission per process; amx is true only when it was granted.
struct CpuFeatures {
  bool avx2 = false, avx512 = false, vnni = false, avx512bf16 = false, amx = false;
};
const CpuFeatures &cpu_features();

// Every variant this machine can run, slowest first; empty below AVX2.
std::vector<Isa> available_isas();

// The variant to use: LAYERSCALE_CPU_ISA=avx2|avx512|amx when set, else the best available.
// LS_UNSUPPORTED when the variable names an unknown or absent variant, or when the machine is below AVX2.
Status detect_isa(Isa &out);

}  // namespace ls::cpu
