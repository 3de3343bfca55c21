// 16 lanes on AVX-512 F+BW+VL+DQ, with VNNI where the unit is compiled for it (included by simd.h only).
#pragma once

namespace ls::cpu::LS_SIMD_NS {

constexpr int W = 16;
using vf = __m512;
using vi = __m512i;

LS_SIMD_INLINE __mmask16 mask16(int n) { return static_cast<__mmask16>(n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u); }

LS_SIMD_INLINE vf zero() { return _mm512_setzero_ps(); }
LS_SIMD_INLINE vf set1(float x) { return _mm512_set1_ps(x); }
LS_SIMD_INLINE vf load(const float *p) { return _mm512_loadu_ps(p); }
LS_SIMD_INLINE void store(float *p, vf a) { _mm512_storeu_ps(p, a); }
LS_SIMD_INLINE vf load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(mask16(n), p); }
LS_SIMD_INLINE void store_n(float *p, vf a, int n) { _mm512_mask_storeu_ps(p, mask16(n), a); }
LS_SIMD_INLINE vf bf16x16_to_f32(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
LS_SIMD_INLINE vf load_bf16(const void *p) { return bf16x16_to_f32(loadu256(p)); }
LS_SIMD_INLINE vf load_bf16_n(const void *p, int n) { return bf16x16_to_f32(_mm256_maskz_loadu_epi16(mask16(n), p)); }
LS_SIMD_INLINE vf load_f16(const void *p) { return _mm512_cvtph_ps(loadu256(p)); }
LS_SIMD_INLINE vf load_f16_n(const void *p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask16(n), p)); }
// Round to nearest even; a NaN stays a (quiet) NaN.
LS_SIMD_INLINE __m256i f32x16_to_bf16(vf a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), rounded, quiet));
}
LS_SIMD_INLINE void store_bf16(void *p, vf a) { _mm256_storeu_si256(static_cast<__m256i *>(p), f32x16_to_bf16(a)); }
LS_SIMD_INLINE void store_bf16_n(void *p, vf a, int n) { _mm256_mask_storeu_epi16(p, mask16(n), f32x16_to_bf16(a)); }

LS_SIMD_INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
LS_SIMD_INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
LS_SIMD_INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
LS_SIMD_INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
LS_SIMD_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
LS_SIMD_INLINE vf max_v(vf a, vf b) { return _mm512_max_ps(a, b); }  // b when either is NaN
LS_SIMD_INLINE vf min_v(vf a, vf b) { return _mm512_min_ps(a, b); }  // b when either is NaN
LS_SIMD_INLINE vf abs_v(vf a) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff))); }
LS_SIMD_INLINE vf round_v(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a < b ? yes : no, lane by lane
LS_SIMD_INLINE vf select_lt(vf a, vf b, vf yes, vf no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }
LS_SIMD_INLINE vf select_nan(vf a, vf yes, vf no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), no, yes); }
LS_SIMD_INLINE __m256 low8(vf a) { return _mm512_castps512_ps256(a); }
LS_SIMD_INLINE __m256 high8(vf a) { return _mm512_extractf32x8_ps(a, 1); }
LS_SIMD_INLINE __m256 fold8(vf a) { return _mm256_add_ps(low8(a), high8(a)); }
LS_SIMD_INLINE __m256 foldmax8(vf a) { return _mm256_max_ps(low8(a), high8(a)); }

LS_SIMD_INLINE vi zeroi() { return _mm512_setzero_si512(); }
LS_SIMD_INLINE vi set1i(int32_t x) { return _mm512_set1_epi32(x); }
LS_SIMD_INLINE vi loadi(const void *p) { return _mm512_loadu_si512(p); }
LS_SIMD_INLINE void storei(void *p, vi a) { _mm512_storeu_si512(p, a); }
LS_SIMD_INLINE vi addi(vi a, vi b) { return _mm512_add_epi32(a, b); }
LS_SIMD_INLINE vi subi(vi a, vi b) { return _mm512_sub_epi32(a, b); }
LS_SIMD_INLINE vi andi(vi a, vi b) { return _mm512_and_si512(a, b); }
template <int N> LS_SIMD_INLINE vi shl32(vi a) { return _mm512_slli_epi32(a, N); }
template <int N> LS_SIMD_INLINE vi sar32(vi a) { return _mm512_srai_epi32(a, N); }
template <int N> LS_SIMD_INLINE vi shr16(vi a) { return _mm512_srli_epi16(a, N); }
// acc + a[2i]*b[2i] + a[2i+1]*b[2i+1] over int16 pairs; exact integers, so both instructions give equal bits
LS_SIMD_INLINE vi madd16(vi acc, vi a, vi b) {
#if defined(LS_SIMD_VNNI)
  return _mm512_dpwssd_epi32(acc, a, b);
#else
  return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b));
#endif
}
// Bytes as unsigned 16-bit: the lower (upper) 8 of every 16, in place order
LS_SIMD_INLINE vi low_bytes(vi a) { return _mm512_unpacklo_epi8(a, _mm512_setzero_si512()); }
LS_SIMD_INLINE vi high_bytes(vi a) { return _mm512_unpackhi_epi8(a, _mm512_setzero_si512()); }
LS_SIMD_INLINE vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
LS_SIMD_INLINE vi to_int(vf a) { return _mm512_cvtps_epi32(a); }  // nearest even
LS_SIMD_INLINE vf as_float(vi a) { return _mm512_castsi512_ps(a); }
// W int32, saturated to int16, in order
LS_SIMD_INLINE void store_i16(void *p, vi a) { _mm256_storeu_si256(static_cast<__m256i *>(p), _mm512_cvtsepi32_epi16(a)); }

}  // namespace ls::cpu::LS_SIMD_NS
