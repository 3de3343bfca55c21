// What a kernel may say: one source for nvcc (PTX, intrinsics) and for g++ (the simulator of sim/, which runs kernels on the host).
//
// A kernel file (kernels/<op>.cu, included headers <op>.cuh) touches the machine only through this header:
//
//   LS_KERNEL LS_BOUNDS(128, 1) void scale(const float *x, float *y, int n) {
//     float *tile = dyn_smem<float>();             // the launch's dynamic shared memory; LS_SHARED(float, s, 32) for a fixed array
//     const int i = block_x() * block_dim_x() + thread_x();
//     ...
//   }
//   launch(scale, Dim{blocks}, Dim{128}, smem_bytes, stream, x, y, n);  // arguments are converted to the kernel's parameter types
//
// Rules, checked by the simulator: block sizes are multiples of 32; every lane of a warp takes part in a warp call (shfl, ballot, mma,
// ldmatrix, sync_warp) and every thread of a block in sync_block(), so nobody returns early past one; 16-byte accesses are aligned; bytes
// of cp_async are there only after cp_async_wait<N>() (and for other threads after a barrier); shared memory holds NaNs at the start.
// Dynamic + fixed shared memory <= kMaxSharedBytes, what sm_120 has. Device code calls no libm function whose result matters to the last
// bit, and no function with static state. Types bf16, half, fp8 are NVIDIA's own headers, in both worlds.
//
// Build: everything of cuda/cuda.cmake (simulator) and `bun build.ts native cuda` (nvcc, all architectures).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

struct CUstream_st;

namespace ls::cuda {

using Stream = CUstream_st *;  // cudaStream_t
using bf16 = __nv_bfloat16;
using bf16x2 = __nv_bfloat162;

constexpr unsigned kWarp = 32;
constexpr size_t kMaxSharedBytes = 99 * 1024;

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// 16 bytes moved at once.
struct alignas(16) Bytes16 {
  uint32_t word[4];
};

}  // namespace ls::cuda

#ifdef __CUDACC__
#include "device_nvcc.h"
#else
#include "sim/device_sim.h"
#endif

namespace ls::cuda {

LS_DEVICE unsigned lane_id() { return thread_x() % kWarp; }
LS_DEVICE unsigned warp_id() { return thread_x() / kWarp; }

template <class To, class From>
LS_HOST_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(static_cast<void *>(&to), &from, sizeof to);
  return to;
}

// Two floats as a packed pair, a in the low half.
LS_HOST_DEVICE uint32_t pack_bf16(float a, float b) {
  const bf16x2 pair = __floats2bfloat162_rn(a, b);
  return bits_as<uint32_t>(pair);
}

LS_DEVICE float warp_sum(float v) {
  for (unsigned d = kWarp / 2; d > 0; d /= 2) v += shfl_xor(v, d);
  return v;
}
LS_DEVICE float warp_max(float v) {
  for (unsigned d = kWarp / 2; d > 0; d /= 2) {
    const float other = shfl_xor(v, d);
    v = other > v ? other : v;
  }
  return v;
}

}  // namespace ls::cuda
