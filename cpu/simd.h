// Thin vector layer. A translation unit gets one width by a macro from cpu.cmake and everything lands in that unit's own namespace LS_SIMD_NS:
//   LS_SIMD_AVX2    8 lanes, __m256        LS_SIMD_AVX512  16 lanes, __m512        LS_SIMD_EMU512  16 lanes on two __m256 (tests of 16-lane sources)
// Kernel units include only <immintrin.h>-level headers besides this one: an inline function of the standard library compiled here with AVX-512
// flags could be the copy the linker keeps for everyone. All functions below have internal linkage for the same reason.
//
// Types: vf = W floats, vi = W int32 (or 2W int16). Names without _n touch W elements at any alignment; _n touch the first n (0 <= n <= W) only.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(LS_SIMD_AMX) && defined(LS_SIMD_EMU512)
#define LS_SIMD_NS emuamx
#elif defined(LS_SIMD_AMX)
#define LS_SIMD_NS amx
#elif defined(LS_SIMD_VNNI)
#define LS_SIMD_NS avx512vnni
#elif defined(LS_SIMD_AVX512)
#define LS_SIMD_NS avx512
#elif defined(LS_SIMD_EMU512)
#define LS_SIMD_NS emu512
#elif defined(LS_SIMD_AVX2)
#define LS_SIMD_NS avx2
#else
#error "compile through cpu.cmake: one of LS_SIMD_AVX2, LS_SIMD_AVX512, LS_SIMD_EMU512 is needed"
#endif

#define LS_SIMD_INLINE static inline __attribute__((always_inline))

#include "simd_half.h"
#if defined(LS_SIMD_AVX2)
#include "simd_avx2.h"
#elif defined(LS_SIMD_AVX512)
#include "simd_avx512.h"
#else
#include "simd_emu512.h"
#endif

namespace ls::cpu::LS_SIMD_NS {

// ---- the same source for every width ----

// Sum of all lanes in one fixed tree: the upper half is added to the lower until one lane is left.
LS_SIMD_INLINE float hsum(vf a) { return hsum8(fold8(a)); }
// Four such sums at once, bit-equal to four calls of hsum.
LS_SIMD_INLINE __m128 hsum4(vf a, vf b, vf c, vf d) { return hsum8x4(fold8(a), fold8(b), fold8(c), fold8(d)); }
LS_SIMD_INLINE float hmax(vf a) { return hmax8(foldmax8(a)); }

// a*b - c etc. spelled with fma; -ffp-contract=off keeps everything else unfused.
LS_SIMD_INLINE vf neg(vf a) { return sub(zero(), a); }

// 2^n for integral n in [-126, 127].
LS_SIMD_INLINE vf pow2i(vi n) { return as_float(shl32<23>(addi(n, set1i(127)))); }

// e^x within 2 ulp; 0 below -87.33 (and for -inf), +inf above 88.72, NaN stays NaN.
LS_SIMD_INLINE vf exp_v(vf x) {
  const vf hi = set1(88.7228317f), lo = set1(-87.3365402f);
  const vf clamped = max_v(min_v(x, hi), lo);  // NaN becomes hi here and is put back at the end
  const vf n = round_v(mul(clamped, set1(1.44269504f)));
  vf r = fma(n, set1(-0.693359375f), clamped);  // ln 2 in two parts: the first product is exact
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  // n reaches 128 at the top: scale in two steps.
  const vi ni = to_int(n), half = sar32<1>(ni);
  vf y = mul(mul(p, pow2i(half)), pow2i(subi(ni, half)));
  y = select_lt(x, lo, zero(), y);
  y = select_lt(hi, x, set1(__builtin_inff()), y);
  return select_nan(x, x, y);
}

// x / (1 + e^-x)
LS_SIMD_INLINE vf silu_v(vf x) { return div(x, add(set1(1.0f), exp_v(neg(x)))); }

}  // namespace ls::cpu::LS_SIMD_NS
