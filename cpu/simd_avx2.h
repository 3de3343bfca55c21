// 8 lanes on AVX2+FMA+F16C (included by simd.h only).
#pragma once

namespace ls::cpu::LS_SIMD_NS {

constexpr int W = 8;
using vf = __m256;
using vi = __m256i;

LS_SIMD_INLINE vf zero() { return _mm256_setzero_ps(); }
LS_SIMD_INLINE vf set1(float x) { return _mm256_set1_ps(x); }
LS_SIMD_INLINE vf load(const float *p) { return _mm256_loadu_ps(p); }
LS_SIMD_INLINE void store(float *p, vf a) { _mm256_storeu_ps(p, a); }
LS_SIMD_INLINE vf load_n(const float *p, int n) { return load8_n(p, n); }
LS_SIMD_INLINE void store_n(float *p, vf a, int n) { store8_n(p, a, n); }
LS_SIMD_INLINE vf load_bf16(const void *p) { return load_bf16x8(p); }
LS_SIMD_INLINE vf load_bf16_n(const void *p, int n) { return bf16x8_to_f32(load8_u16_n(p, n)); }
LS_SIMD_INLINE vf load_f16(const void *p) { return _mm256_cvtph_ps(loadu128(p)); }
LS_SIMD_INLINE vf load_f16_n(const void *p, int n) { return _mm256_cvtph_ps(load8_u16_n(p, n)); }
LS_SIMD_INLINE void store_bf16(void *p, vf a) { _mm_storeu_si128(static_cast<__m128i *>(p), f32x8_to_bf16(a)); }
LS_SIMD_INLINE void store_bf16_n(void *p, vf a, int n) { store8_u16_n(p, f32x8_to_bf16(a), n); }

LS_SIMD_INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
LS_SIMD_INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
LS_SIMD_INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
LS_SIMD_INLINE vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
LS_SIMD_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
LS_SIMD_INLINE vf max_v(vf a, vf b) { return _mm256_max_ps(a, b); }  // b when either is NaN
LS_SIMD_INLINE vf min_v(vf a, vf b) { return _mm256_min_ps(a, b); }  // b when either is NaN
LS_SIMD_INLINE vf abs_v(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
LS_SIMD_INLINE vf round_v(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a < b ? yes : no, lane by lane
LS_SIMD_INLINE vf select_lt(vf a, vf b, vf yes, vf no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
LS_SIMD_INLINE vf select_nan(vf a, vf yes, vf no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
LS_SIMD_INLINE __m256 fold8(vf a) { return a; }
LS_SIMD_INLINE __m256 foldmax8(vf a) { return a; }

LS_SIMD_INLINE vi zeroi() { return _mm256_setzero_si256(); }
LS_SIMD_INLINE vi set1i(int32_t x) { return _mm256_set1_epi32(x); }
LS_SIMD_INLINE vi loadi(const void *p) { return loadu256(p); }
LS_SIMD_INLINE void storei(void *p, vi a) { _mm256_storeu_si256(static_cast<__m256i *>(p), a); }
LS_SIMD_INLINE vi addi(vi a, vi b) { return _mm256_add_epi32(a, b); }
LS_SIMD_INLINE vi subi(vi a, vi b) { return _mm256_sub_epi32(a, b); }
LS_SIMD_INLINE vi andi(vi a, vi b) { return _mm256_and_si256(a, b); }
template <int N> LS_SIMD_INLINE vi shl32(vi a) { return _mm256_slli_epi32(a, N); }
template <int N> LS_SIMD_INLINE vi sar32(vi a) { return _mm256_srai_epi32(a, N); }
template <int N> LS_SIMD_INLINE vi shr16(vi a) { return _mm256_srli_epi16(a, N); }
// acc + a[2i]*b[2i] + a[2i+1]*b[2i+1] over int16 pairs
LS_SIMD_INLINE vi madd16(vi acc, vi a, vi b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
// Bytes as unsigned 16-bit: the lower (upper) 8 of every 16, in place order
LS_SIMD_INLINE vi low_bytes(vi a) { return _mm256_unpacklo_epi8(a, _mm256_setzero_si256()); }
LS_SIMD_INLINE vi high_bytes(vi a) { return _mm256_unpackhi_epi8(a, _mm256_setzero_si256()); }
LS_SIMD_INLINE vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
LS_SIMD_INLINE vi to_int(vf a) { return _mm256_cvtps_epi32(a); }  // nearest even
LS_SIMD_INLINE vf as_float(vi a) { return _mm256_castsi256_ps(a); }
// W int32, saturated to int16, in order
LS_SIMD_INLINE void store_i16(void *p, vi a) {
  _mm_storeu_si128(static_cast<__m128i *>(p), _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
}

}  // namespace ls::cpu::LS_SIMD_NS
