// What the CPU tests share: a small fixed random source and the kernel tables this machine can run.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "isa.h"
#include "ops.h"

namespace support {

struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint64_t next() {
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((next() >> 32) * n >> 32); }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }  // [0, 1)
  // About normal: mean 0, variance 1.
  float normal() {
    float sum = 0;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum - 6.0f;
  }
  std::vector<float> normals(size_t n, float scale = 1) {
    std::vector<float> out(n);
    for (float &x : out) x = normal() * scale;
    return out;
  }
};

inline bool has(ls::cpu::Isa wanted) {
  for (ls::cpu::Isa isa : ls::cpu::available_isas())
    if (isa == wanted) return true;
  return false;
}
inline std::vector<const ls::cpu::OpsKernels *> ops_tables() {
  std::vector<const ls::cpu::OpsKernels *> out{&ls::cpu::kOps_avx2, &ls::cpu::kOps_emu512};
  if (has(ls::cpu::Isa::avx512)) out.push_back(&ls::cpu::kOps_avx512);
  return out;
}
inline std::vector<const ls::cpu::AttentionKernels *> attention_tables() {
  std::vector<const ls::cpu::AttentionKernels *> out{&ls::cpu::kAttention_avx2, &ls::cpu::kAttention_emu512};
  if (has(ls::cpu::Isa::avx512)) out.push_back(&ls::cpu::kAttention_avx512);
  out.push_back(&ls::cpu::kAttention_emuamx);
  if (has(ls::cpu::Isa::amx)) out.push_back(&ls::cpu::kAttention_amx);
  return out;
}

}  // namespace support
