// 16 lanes on two AVX2 registers: lets tests run the 16-lane sources, bit for bit, on a machine without AVX-512 (included by simd.h only).
#pragma once

namespace ls::cpu::LS_SIMD_NS {

constexpr int W = 16;
struct vf {
  __m256 lo, hi;
};
struct vi {
  __m256i lo, hi;
};

LS_SIMD_INLINE const char *at(const void *p, size_t bytes) { return static_cast<const char *>(p) + bytes; }
LS_SIMD_INLINE char *at(void *p, size_t bytes) { return static_cast<char *>(p) + bytes; }

LS_SIMD_INLINE vf zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
LS_SIMD_INLINE vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
LS_SIMD_INLINE vf load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
LS_SIMD_INLINE void store(float *p, vf a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
LS_SIMD_INLINE vf load_n(const float *p, int n) { return {load8_n(p, n), load8_n(p + 8, n - 8)}; }
LS_SIMD_INLINE void store_n(float *p, vf a, int n) { store8_n(p, a.lo, n), store8_n(p + 8, a.hi, n - 8); }
LS_SIMD_INLINE vf load_bf16(const void *p) { return {load_bf16x8(p), load_bf16x8(at(p, 16))}; }
LS_SIMD_INLINE vf load_bf16_n(const void *p, int n) { return {bf16x8_to_f32(load8_u16_n(p, n)), bf16x8_to_f32(load8_u16_n(at(p, 16), n - 8))}; }
LS_SIMD_INLINE vf load_f16(const void *p) { return {_mm256_cvtph_ps(loadu128(p)), _mm256_cvtph_ps(loadu128(at(p, 16)))}; }
LS_SIMD_INLINE vf load_f16_n(const void *p, int n) { return {_mm256_cvtph_ps(load8_u16_n(p, n)), _mm256_cvtph_ps(load8_u16_n(at(p, 16), n - 8))}; }
LS_SIMD_INLINE void store_bf16_n(void *p, vf a, int n) { store8_u16_n(p, f32x8_to_bf16(a.lo), n), store8_u16_n(at(p, 16), f32x8_to_bf16(a.hi), n - 8); }
LS_SIMD_INLINE void store_bf16(void *p, vf a) { store_bf16_n(p, a, 16); }

#define LS_EMU2(name, op) \
  LS_SIMD_INLINE vf name(vf a, vf b) { return {op(a.lo, b.lo), op(a.hi, b.hi)}; }
LS_EMU2(add, _mm256_add_ps)
LS_EMU2(sub, _mm256_sub_ps)
LS_EMU2(mul, _mm256_mul_ps)
LS_EMU2(div, _mm256_div_ps)
LS_EMU2(max_v, _mm256_max_ps)
LS_EMU2(min_v, _mm256_min_ps)
#undef LS_EMU2
LS_SIMD_INLINE vf fma(vf a, vf b, vf c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
LS_SIMD_INLINE vf abs_v(vf a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.lo), _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.hi)}; }
LS_SIMD_INLINE vf round_v(vf a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
LS_SIMD_INLINE __m256 select_lt_half(__m256 a, __m256 b, __m256 yes, __m256 no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
LS_SIMD_INLINE vf select_lt(vf a, vf b, vf yes, vf no) { return {select_lt_half(a.lo, b.lo, yes.lo, no.lo), select_lt_half(a.hi, b.hi, yes.hi, no.hi)}; }
LS_SIMD_INLINE __m256 select_nan_half(__m256 a, __m256 yes, __m256 no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
LS_SIMD_INLINE vf select_nan(vf a, vf yes, vf no) { return {select_nan_half(a.lo, yes.lo, no.lo), select_nan_half(a.hi, yes.hi, no.hi)}; }
LS_SIMD_INLINE __m256 fold8(vf a) { return _mm256_add_ps(a.lo, a.hi); }
LS_SIMD_INLINE __m256 foldmax8(vf a) { return _mm256_max_ps(a.lo, a.hi); }

LS_SIMD_INLINE vi zeroi() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
LS_SIMD_INLINE vi set1i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
LS_SIMD_INLINE vi loadi(const void *p) { return {loadu256(p), loadu256(at(p, 32))}; }
LS_SIMD_INLINE void storei(void *p, vi a) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(at(p, 0)), a.lo), _mm256_storeu_si256(reinterpret_cast<__m256i *>(at(p, 32)), a.hi); }
#define LS_EMU2I(name, op) \
  LS_SIMD_INLINE vi name(vi a, vi b) { return {op(a.lo, b.lo), op(a.hi, b.hi)}; }
LS_EMU2I(addi, _mm256_add_epi32)
LS_EMU2I(subi, _mm256_sub_epi32)
LS_EMU2I(andi, _mm256_and_si256)
#undef LS_EMU2I
template <int N> LS_SIMD_INLINE vi shl32(vi a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
template <int N> LS_SIMD_INLINE vi sar32(vi a) { return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)}; }
template <int N> LS_SIMD_INLINE vi shr16(vi a) { return {_mm256_srli_epi16(a.lo, N), _mm256_srli_epi16(a.hi, N)}; }
LS_SIMD_INLINE vi madd16(vi acc, vi a, vi b) {
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(a.lo, b.lo)), _mm256_add_epi32(acc.hi, _mm256_madd_epi16(a.hi, b.hi))};
}
LS_SIMD_INLINE vi low_bytes(vi a) { return {_mm256_unpacklo_epi8(a.lo, _mm256_setzero_si256()), _mm256_unpacklo_epi8(a.hi, _mm256_setzero_si256())}; }
LS_SIMD_INLINE vi high_bytes(vi a) { return {_mm256_unpackhi_epi8(a.lo, _mm256_setzero_si256()), _mm256_unpackhi_epi8(a.hi, _mm256_setzero_si256())}; }
LS_SIMD_INLINE vf to_float(vi a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
LS_SIMD_INLINE vi to_int(vf a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
LS_SIMD_INLINE vf as_float(vi a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
LS_SIMD_INLINE __m128i pack_i16_half(__m256i a) { return _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)); }
LS_SIMD_INLINE void store_i16(void *p, vi a) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(at(p, 0)), pack_i16_half(a.lo));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(at(p, 16)), pack_i16_half(a.hi));
}

}  // namespace ls::cpu::LS_SIMD_NS
