// Loads and stores of activations in either element type; arithmetic is in f32.
#pragma once
#include "../device.h"
#include "element.h"

namespace ls::cuda {

// Plain loads: the memory may be written by the same launch.
LS_DEVICE float load_element(const float *p) { return *p; }
LS_DEVICE float load_element(const bf16 *p) { return __bfloat162float(*p); }
LS_DEVICE void store_element(float *p, float v) { *p = v; }
LS_DEVICE void store_element(bf16 *p, float v) { *p = __float2bfloat16(v); }

struct Float4 {
  float v[4];
};
// Four at once; p is aligned to them.
LS_DEVICE Float4 load_elements4(const float *p) {
  const Bytes16 b = *reinterpret_cast<const Bytes16 *>(p);
  return {{bits_as<float>(b.word[0]), bits_as<float>(b.word[1]), bits_as<float>(b.word[2]), bits_as<float>(b.word[3])}};
}
struct alignas(8) Bytes8 {
  uint32_t word[2];
};
LS_DEVICE Float4 load_elements4(const bf16 *p) {
  const Bytes8 b = *reinterpret_cast<const Bytes8 *>(p);
  return {{bits_as<float>(b.word[0] << 16), bits_as<float>(b.word[0] & 0xffff0000u), bits_as<float>(b.word[1] << 16), bits_as<float>(b.word[1] & 0xffff0000u)}};
}
LS_DEVICE void store_elements4(float *p, const Float4 &x) {
  *reinterpret_cast<Bytes16 *>(p) = {{bits_as<uint32_t>(x.v[0]), bits_as<uint32_t>(x.v[1]), bits_as<uint32_t>(x.v[2]), bits_as<uint32_t>(x.v[3])}};
}
LS_DEVICE void store_elements4(bf16 *p, const Float4 &x) { *reinterpret_cast<Bytes8 *>(p) = {{pack_bf16(x.v[0], x.v[1]), pack_bf16(x.v[2], x.v[3])}}; }

// Sum over a block of kThreads threads in one fixed order; every thread gets it. `scratch`: kThreads / 32 shared floats, free again after the
// caller's next barrier.
template <int kThreads>
LS_DEVICE float block_sum(float v, float *scratch) {
  v = warp_sum(v);
  if (lane_id() == 0) scratch[warp_id()] = v;
  sync_block();
  float sum = 0;
  LS_UNROLL
  for (int w = 0; w < kThreads / 32; ++w) sum += scratch[w];
  return sum;
}

}  // namespace ls::cuda
