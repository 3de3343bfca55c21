// device.h for nvcc. Included by device.h only.
#pragma once
#include <cuda_runtime.h>

#include "runtime.h"

#define LS_KERNEL __global__
#define LS_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define LS_DEVICE __device__ __forceinline__
#define LS_HOST_DEVICE __host__ __device__ __forceinline__
#define LS_UNROLL _Pragma("unroll")
#define LS_PRAGMA(x) _Pragma(#x)
#define LS_UNROLL_BY(n) LS_PRAGMA(unroll n)
#define LS_SHARED(type, name, count) __shared__ __align__(16) type name[count]

namespace ls::cuda {

LS_DEVICE unsigned thread_x() { return threadIdx.x; }
LS_DEVICE unsigned block_x() { return blockIdx.x; }
LS_DEVICE unsigned block_y() { return blockIdx.y; }
LS_DEVICE unsigned block_z() { return blockIdx.z; }
LS_DEVICE unsigned block_dim_x() { return blockDim.x; }
LS_DEVICE unsigned grid_x() { return gridDim.x; }
LS_DEVICE unsigned grid_y() { return gridDim.y; }
LS_DEVICE unsigned grid_z() { return gridDim.z; }

LS_DEVICE void sync_block() { __syncthreads(); }
LS_DEVICE void sync_warp() { __syncwarp(); }
LS_DEVICE uint32_t ballot(bool p) { return __ballot_sync(0xffffffffu, p); }
LS_DEVICE bool warp_any(bool p) { return __any_sync(0xffffffffu, p); }
LS_DEVICE bool warp_all(bool p) { return __all_sync(0xffffffffu, p); }
// 4- and 8-byte types. `from` is taken modulo 32; shfl_down keeps the own value where lane + d is beyond the warp.
template <class T>
LS_DEVICE T shfl(T v, unsigned from) { return __shfl_sync(0xffffffffu, v, static_cast<int>(from)); }
template <class T>
LS_DEVICE T shfl_xor(T v, unsigned mask) { return __shfl_xor_sync(0xffffffffu, v, static_cast<int>(mask)); }
template <class T>
LS_DEVICE T shfl_down(T v, unsigned d) { return __shfl_down_sync(0xffffffffu, v, d); }

extern __shared__ __align__(128) unsigned char ls_dynamic_shared[];
template <class T>
LS_DEVICE T *dyn_smem() { return reinterpret_cast<T *>(ls_dynamic_shared); }

LS_DEVICE uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies `bytes` (0..16) of global memory to shared memory and zeroes the rest of the 16; `from` is not read when bytes is 0.
LS_DEVICE void cp_async16(void *to, const void *from, uint32_t bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes) : "memory");
}
LS_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's newest groups are under way.
template <int N>
LS_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Lane i gives the address of row i%8 of 8x8 matrix i/8 (16-bit elements); r[j] are elements (lane/4, 2*(lane%4) + 0,1) of matrix j.
LS_DEVICE void ldmatrix_x4(uint32_t *r, const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
LS_DEVICE void ldmatrix_x2(uint32_t *r, const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");
}
// The same of the transposed matrices: r[j] are elements (2*(lane%4) + 0,1, lane/4).
LS_DEVICE void ldmatrix_x4_trans(uint32_t *r, const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
LS_DEVICE void ldmatrix_x2_trans(uint32_t *r, const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");
}

// d = a b + c over bf16 pairs, f32 sums; d and c may be the same. With g = lane/4, t = lane%4:
//   a (16 x 16): a[0] (g, 2t..)  a[1] (g+8, 2t..)  a[2] (g, 2t+8..)  a[3] (g+8, 2t+8..)      b (16 x 8): b[0] (2t.., g)  b[1] (2t+8.., g)
//   c, d (16 x 8): [0] (g, 2t)  [1] (g, 2t+1)  [2] (g+8, 2t)  [3] (g+8, 2t+1)
LS_DEVICE void mma_m16n8k16(float *d, const uint32_t *a, const uint32_t *b, const float *c) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

LS_DEVICE int atomic_add(int *p, int v) { return atomicAdd(p, v); }
LS_DEVICE unsigned atomic_add(unsigned *p, unsigned v) { return atomicAdd(p, v); }
LS_DEVICE float atomic_add(float *p, float v) { return atomicAdd(p, v); }
LS_DEVICE void atomic_add(uint64_t *p, uint64_t v) { atomicAdd(reinterpret_cast<unsigned long long *>(p), static_cast<unsigned long long>(v)); }
LS_DEVICE int atomic_max(int *p, int v) { return atomicMax(p, v); }
LS_DEVICE void fence_device() { __threadfence(); }
LS_DEVICE void fence_system() { __threadfence_system(); }
// Flags between devices.
LS_DEVICE uint32_t load_acquire(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
LS_DEVICE void store_release(uint32_t *p, uint32_t v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(v) : "memory"); }
// Inside a loop that waits for another block or device.
LS_DEVICE void spin_pause() { __nanosleep(64); }

// Read-only data of this launch, 1 to 16 bytes at once (aligned).
template <class T>
LS_DEVICE T load_global(const T *p) {
  if constexpr (sizeof(T) == 16) {
    const uint4 v = __ldg(reinterpret_cast<const uint4 *>(p));
    return *reinterpret_cast<const T *>(&v);
  } else if constexpr (sizeof(T) == 8) {
    const uint2 v = __ldg(reinterpret_cast<const uint2 *>(p));
    return *reinterpret_cast<const T *>(&v);
  } else if constexpr (sizeof(T) == 4) {
    const unsigned v = __ldg(reinterpret_cast<const unsigned *>(p));
    return *reinterpret_cast<const T *>(&v);
  } else if constexpr (sizeof(T) == 2) {
    const unsigned short v = __ldg(reinterpret_cast<const unsigned short *>(p));
    return *reinterpret_cast<const T *>(&v);
  } else {
    const unsigned char v = __ldg(reinterpret_cast<const unsigned char *>(p));
    return *reinterpret_cast<const T *>(&v);
  }
}

// Upper half of the 128-bit product.
LS_DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) { return __umul64hi(a, b); }
LS_DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// The fast ones: a few units in the last place.
LS_DEVICE float exp_fast(float x) { return __expf(x); }
LS_DEVICE float exp2_fast(float x) { return exp2f(x); }
LS_DEVICE float rsqrt_fast(float x) { return rsqrtf(x); }
LS_DEVICE float divide_fast(float a, float b) { return __fdividef(a, b); }

// A refused launch shows in launch_status() of runtime.h. Nothing is launched for an empty grid.
template <class... P, class... A>
void launch(void (*kernel)(P...), Dim grid, Dim block, size_t smem, Stream stream, A &&...args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (OnlyLoad::active) {
    cudaFuncAttributes attributes;
    cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(kernel));
    return;
  }
  if (smem > 48 * 1024) cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem));
  kernel<<<dim3(grid.x, grid.y, grid.z), dim3(block.x, block.y, block.z), smem, stream>>>(static_cast<P>(args)...);
}

}  // namespace ls::cuda
