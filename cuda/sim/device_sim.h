// device.h for g++: the same calls over the simulator. Included by device.h only. The comments of device_nvcc.h hold here too.
#pragma once
#include <cmath>

#include "record.h"
#include "simulator.h"

#define LS_KERNEL
#define LS_BOUNDS(threads, blocks)
#define LS_DEVICE inline
#define LS_HOST_DEVICE inline
#define LS_UNROLL
#define LS_UNROLL_BY(n)
// The address of a local static tells one declaration (of one template instance) from another.
#define LS_SHARED(type, name, count) \
  static const char name##_key_ = 0; \
  type *const name = static_cast<type *>(::ls::cuda::sim::fixed_shared(&name##_key_, sizeof(type) * (count)))

namespace ls::cuda {

inline unsigned thread_x() { return sim::self()->thread; }
inline unsigned block_x() { return sim::block()->index.x; }
inline unsigned block_y() { return sim::block()->index.y; }
inline unsigned block_z() { return sim::block()->index.z; }
inline unsigned block_dim_x() { return sim::block()->threads; }
inline unsigned grid_x() { return sim::block()->grid.x; }
inline unsigned grid_y() { return sim::block()->grid.y; }
inline unsigned grid_z() { return sim::block()->grid.z; }

inline void sync_block() { sim::block_barrier(); }
inline void sync_warp() { sim::warp_barrier(); }
inline uint32_t ballot(bool p) { return sim::ballot(p); }
inline bool warp_any(bool p) { return sim::ballot(p) != 0; }
inline bool warp_all(bool p) { return sim::ballot(p) == 0xffffffffu; }

namespace sim {
template <class T>
T shuffle(const char *op, T v, unsigned from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint64_t word = 0;
  std::memcpy(&word, &v, sizeof v);
  word = exchange(op, word, from);
  std::memcpy(&v, &word, sizeof v);
  return v;
}
}  // namespace sim
template <class T>
T shfl(T v, unsigned from) { return sim::shuffle("shfl", v, from % 32); }
template <class T>
T shfl_xor(T v, unsigned mask) { return sim::shuffle("shfl_xor", v, (thread_x() % 32) ^ mask); }
template <class T>
T shfl_down(T v, unsigned d) { return sim::shuffle("shfl_down", v, thread_x() % 32 + d < 32 ? thread_x() % 32 + d : thread_x() % 32); }

template <class T>
T *dyn_smem() { return static_cast<T *>(sim::dynamic_shared()); }

inline void cp_async16(void *to, const void *from, uint32_t bytes = 16) { sim::copy_async(to, from, bytes); }
inline void cp_async_commit() { sim::copy_commit(); }
template <int N>
void cp_async_wait() { sim::copy_wait(N); }

inline void ldmatrix_x4(uint32_t *r, const void *row) { sim::load_matrix(r, row, 4, false); }
inline void ldmatrix_x2(uint32_t *r, const void *row) { sim::load_matrix(r, row, 2, false); }
inline void ldmatrix_x4_trans(uint32_t *r, const void *row) { sim::load_matrix(r, row, 4, true); }
inline void ldmatrix_x2_trans(uint32_t *r, const void *row) { sim::load_matrix(r, row, 2, true); }
inline void mma_m16n8k16(float *d, const uint32_t *a, const uint32_t *b, const float *c) { sim::matrix_product(d, a, b, c); }

// Ranks of --tp are threads of this process: atomics are real ones.
inline int atomic_add(int *p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
inline unsigned atomic_add(unsigned *p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
inline float atomic_add(float *p, float v) {
  float old, sum;
  __atomic_load(p, &old, __ATOMIC_SEQ_CST);
  do sum = old + v;
  while (!__atomic_compare_exchange(p, &old, &sum, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return old;
}
inline void atomic_add(uint64_t *p, uint64_t v) { __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
inline int atomic_max(int *p, int v) {
  int old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}
inline void fence_device() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline uint32_t load_acquire(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_release(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void spin_pause() { sim::spin(); }

template <class T>
T load_global(const T *p) {
  sim::check_aligned("load_global", p, sizeof(T));
  return *p;
}

inline uint64_t multiply_high(uint64_t a, uint64_t b) { return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64); }
inline float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float exp_fast(float x) { return std::exp(x); }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float rsqrt_fast(float x) { return 1.0f / std::sqrt(x); }
inline float divide_fast(float a, float b) { return a / b; }

template <class... P, class... A>
void launch(void (*kernel)(P...), Dim grid, Dim block, size_t smem, Stream stream, A &&...args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (sim_only_load(reinterpret_cast<const void *>(kernel))) return;
  auto work = [=, ... values = static_cast<P>(args)] { sim::run_grid(grid, block, smem, [&] { kernel(values...); }); };
  if (!sim_record(stream, work)) work();
}

}  // namespace ls::cuda
