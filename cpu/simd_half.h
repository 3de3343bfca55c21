// 8-lane building blocks that every width uses (included by simd.h only).
#pragma once

namespace ls::cpu::LS_SIMD_NS {

LS_SIMD_INLINE __m128 fold4(__m256 a) { return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)); }
// ((0+4)+(2+6)) + ((1+5)+(3+7))
LS_SIMD_INLINE float hsum8(__m256 a) {
  __m128 s = fold4(a);
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
// The same tree for four vectors: lane i of the result is hsum8 of argument i.
LS_SIMD_INLINE __m128 hsum8x4(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m128 a4 = fold4(a), b4 = fold4(b), c4 = fold4(c), d4 = fold4(d);
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a4, b4), _mm_unpackhi_ps(a4, b4));  // a0+a2, b0+b2, a1+a3, b1+b3
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c4, d4), _mm_unpackhi_ps(c4, d4));
  return _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
}
LS_SIMD_INLINE float hmax8(__m256 a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

LS_SIMD_INLINE __m256 bf16x8_to_f32(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
// Straight from memory: one load to both halves and one shuffle, half the work of widen and shift.
LS_SIMD_INLINE __m256 load_bf16x8(const void *p) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i *>(p)));
  const __m256i spread = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  return _mm256_castsi256_ps(_mm256_shuffle_epi8(both, spread));
}
// Round to nearest even; a NaN stays a (quiet) NaN.
LS_SIMD_INLINE __m128i f32x8_to_bf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i isnan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i r = _mm256_blendv_epi8(rounded, quiet, isnan);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}

// Lanes 0..n-1 all ones, n clamped to [0, 8].
LS_SIMD_INLINE __m256i mask8(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
LS_SIMD_INLINE __m256 load8_n(const float *p, int n) { return n <= 0 ? _mm256_setzero_ps() : _mm256_maskload_ps(p, mask8(n)); }
LS_SIMD_INLINE void store8_n(float *p, __m256 a, int n) {
  if (n > 0) _mm256_maskstore_ps(p, mask8(n), a);
}
// n 16-bit elements (n clamped to [0, 8]), the rest zero; nothing beyond them is read.
LS_SIMD_INLINE __m128i load8_u16_n(const void *p, int n) {
  alignas(16) uint16_t tmp[8] = {};
  if (n > 0) std::memcpy(tmp, p, static_cast<size_t>(n > 8 ? 8 : n) * 2);
  return _mm_load_si128(reinterpret_cast<const __m128i *>(tmp));
}
LS_SIMD_INLINE void store8_u16_n(void *p, __m128i a, int n) {
  alignas(16) uint16_t tmp[8];
  _mm_store_si128(reinterpret_cast<__m128i *>(tmp), a);
  if (n > 0) std::memcpy(p, tmp, static_cast<size_t>(n > 8 ? 8 : n) * 2);
}
LS_SIMD_INLINE __m128i loadu128(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
LS_SIMD_INLINE __m256i loadu256(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }

LS_SIMD_INLINE float scalar_bf16(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
LS_SIMD_INLINE float scalar_f16(uint16_t h) { return _cvtsh_ss(h); }

LS_SIMD_INLINE void prefetch(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T0); }

}  // namespace ls::cpu::LS_SIMD_NS
