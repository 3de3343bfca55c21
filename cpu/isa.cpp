#include "isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>

namespace ls::cpu {
namespace {

struct Regs {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Regs cpuid(uint32_t leaf, uint32_t sub) {
  Regs r;
  if (!__get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d)) return {};
  return r;
}

bool bit(uint32_t word, int index) { return (word >> index) & 1u; }

// XCR0: the register state the operating system saves on a context switch.
uint64_t read_xcr0() {
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return static_cast<uint64_t>(hi) << 32 | lo;
}

// Linux hands out the 8 KiB of tile state only on request, once per process and before any thread touches a tile.
bool request_tile_permission() {
  constexpr long kArchReqXcompPerm = 0x1023, kXfeatureTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
}

CpuFeatures detect_features() {
  CpuFeatures f;
  const Regs l1 = cpuid(1, 0), l7 = cpuid(7, 0), l7s1 = l7.a >= 1 ? cpuid(7, 1) : Regs{};
  if (!bit(l1.c, 27)) return f;  // OSXSAVE: XCR0 can be read
  const uint64_t xcr0 = read_xcr0();
  const bool ymm = (xcr0 & 0x6) == 0x6, zmm = (xcr0 & 0xe6) == 0xe6, tiles = (xcr0 & 0x60000) == 0x60000;
  f.avx2 = ymm && bit(l1.c, 28) && bit(l7.b, 5) && bit(l1.c, 12) && bit(l1.c, 29);                            // AVX, AVX2, FMA, F16C
  f.avx512 = f.avx2 && zmm && bit(l7.b, 16) && bit(l7.b, 30) && bit(l7.b, 31) && bit(l7.b, 17);               // F, BW, VL, DQ
  f.vnni = f.avx512 && bit(l7.c, 11);
  f.avx512bf16 = f.avx512 && bit(l7s1.a, 5);
  f.amx = f.avx512bf16 && f.vnni && tiles && bit(l7.d, 24) && bit(l7.d, 22) && bit(l7.d, 25) && request_tile_permission();  // TILE, BF16, INT8
  return f;
}

std::string join(const std::vector<Isa> &isas) {
  std::string text;
  for (Isa isa : isas) text += (text.empty() ? "" : ", ") + std::string(isa_name(isa));
  return text;
}

}  // namespace

const char *isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::amx: return "amx";
  }
  return "?";
}

const CpuFeatures &cpu_features() {
  static const CpuFeatures features = detect_features();
  return features;
}

std::vector<Isa> available_isas() {
  const CpuFeatures &f = cpu_features();
  std::vector<Isa> isas;
  if (f.avx2) isas.push_back(Isa::avx2);
  if (f.avx512) isas.push_back(Isa::avx512);
  if (f.amx) isas.push_back(Isa::amx);
  return isas;
}

Status detect_isa(Isa &out) {
  const std::vector<Isa> isas = available_isas();
  if (isas.empty()) return Status::fail(LS_UNSUPPORTED, "this CPU is not supported: AVX2, FMA and F16C are needed (x86-64-v3), and at least one is missing or disabled by the operating system");
  const char *forced = std::getenv("LAYERSCALE_CPU_ISA");
  if (!forced || !*forced) {
    out = isas.back();
    return Status::good();
  }
  const std::string name = forced;
  for (Isa isa : isas) {
    if (name == isa_name(isa)) {
      out = isa;
      return Status::good();
    }
  }
  const bool known = name == "avx2" || name == "avx512" || name == "amx";
  return Status::fail(LS_UNSUPPORTED, "LAYERSCALE_CPU_ISA=" + name + (known ? ": this machine does not have it" : ": unknown, expected avx2, avx512 or amx") + " (it has: " + join(isas) + ")");
}

}  // namespace ls::cpu
