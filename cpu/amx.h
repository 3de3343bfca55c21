// Tile operations: real AMX where the unit is compiled for it, else a plain C++ tile unit with the documented arithmetic (tests).
//
// The real ones are inline assembly with a memory clobber: the compiler keeps every store before the load of a tile or of the tile
// configuration. (GCC 12's own _tile_loadconfig does not tell the compiler that it reads memory, and the stores that fill the structure get dropped.)
// Each thread loads its own configuration; the process must have been granted tile state first (isa.cpp).
#pragma once
#include <cstdint>
#include <cstring>

#include "simd.h"
#if !defined(__AMX_TILE__)
#include <cmath>
#endif

namespace ls::cpu::LS_SIMD_NS {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t colsb[16] = {};  // bytes per row
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

#if defined(__AMX_TILE__)

LS_SIMD_INLINE void tile_config(const TileConfig &config) { __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory"); }
// Leaves no tile state behind: a context switch then has nothing to save.
LS_SIMD_INLINE void tile_release() { __asm__ volatile("tilerelease" : : : "memory"); }
template <int T> LS_SIMD_INLINE void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int T> LS_SIMD_INLINE void tile_load(const void *p, size_t stride) { __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(p), "r"(stride) : "memory"); }
template <int T> LS_SIMD_INLINE void tile_store(void *p, size_t stride) { __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(p), "r"(stride) : "memory"); }
// C (rows of A x columns of B, f32) += A (rows x k bf16) * B (k/2 x columns x 2 bf16)
template <int C, int A, int B> LS_SIMD_INLINE void tile_dpbf16() { __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B)); }

#else

struct TileUnit {
  TileConfig config;
  uint8_t data[8][16][64];
};
static thread_local TileUnit tile_unit;

LS_SIMD_INLINE void tile_config(const TileConfig &config) {
  tile_unit.config = config;
  std::memset(tile_unit.data, 0, sizeof(tile_unit.data));
}
LS_SIMD_INLINE void tile_release() { tile_unit.config = {}; }
template <int T> LS_SIMD_INLINE void tile_zero() { std::memset(tile_unit.data[T], 0, sizeof(tile_unit.data[T])); }
template <int T> LS_SIMD_INLINE void tile_load(const void *p, size_t stride) {
  std::memset(tile_unit.data[T], 0, sizeof(tile_unit.data[T]));
  for (int r = 0; r < tile_unit.config.rows[T]; ++r) std::memcpy(tile_unit.data[T][r], static_cast<const uint8_t *>(p) + r * stride, tile_unit.config.colsb[T]);
}
template <int T> LS_SIMD_INLINE void tile_store(void *p, size_t stride) {
  for (int r = 0; r < tile_unit.config.rows[T]; ++r) std::memcpy(static_cast<uint8_t *>(p) + r * stride, tile_unit.data[T][r], tile_unit.config.colsb[T]);
}
LS_SIMD_INLINE float flush_denormal(float v) { return std::fabs(v) < 1.17549435e-38f ? std::copysign(0.0f, v) : v; }
LS_SIMD_INLINE float tile_bf16(const uint8_t *p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return flush_denormal(scalar_bf16(h));
}
// Even and odd products are summed apart by fma from zero, added, then added to C; denormals count as zero.
template <int C, int A, int B> LS_SIMD_INLINE void tile_dpbf16() {
  TileUnit &u = tile_unit;
  for (int m = 0; m < u.config.rows[C]; ++m) {
    for (int n = 0; n < u.config.colsb[C] / 4; ++n) {
      float even = 0, odd = 0, c;
      for (int k = 0; k < u.config.colsb[A] / 4; ++k) {
        even = flush_denormal(std::fma(tile_bf16(&u.data[A][m][4 * k]), tile_bf16(&u.data[B][k][4 * n]), even));
        odd = flush_denormal(std::fma(tile_bf16(&u.data[A][m][4 * k + 2]), tile_bf16(&u.data[B][k][4 * n + 2]), odd));
      }
      std::memcpy(&c, &u.data[C][m][4 * n], 4);
      c = flush_denormal(flush_denormal(c) + flush_denormal(even + odd));
      std::memcpy(&u.data[C][m][4 * n], &c, 4);
    }
  }
}

#endif

}  // namespace ls::cpu::LS_SIMD_NS
