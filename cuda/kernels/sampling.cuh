// What the three sampling kernels share: sizes, the scratch of a row, weights as integers, orderings of logits.
#pragma once
#include <cfloat>
#include <cmath>

#include "../device.h"
#include "sampling.h"

namespace ls::cuda {

inline constexpr uint32_t kVocabChunk = 4096;        // logits of a block of the first two kernels
inline constexpr uint32_t kMaxChunks = kMaxSampleVocab / kVocabChunk;
inline constexpr uint32_t kBuckets = 512;            // of distances from the largest logit, as cpu/sampler.cpp has them
inline constexpr float kBucketsPerNat = 16;
inline constexpr float kGreedyTemperature = 1e-6f;
inline constexpr float kLogprobFloor = -9999.0f;
inline constexpr uint32_t kScanThreads = 256, kScanItems = kVocabChunk / kScanThreads;

// Result of a chunk.
struct alignas(16) ChunkStats {
  float largest;
  uint32_t index;  // lowest id that has it
  float sum;       // of exp(x - largest)
  uint32_t broken;
};

// Of one row, one after the other in the scratch; 16-byte aligned.
struct SampleScratch {
  ChunkStats *stats;    // (chunks)
  uint64_t *weight;     // (chunks) sums of weights
  uint64_t *buckets;    // (kBuckets) sums of weights
  uint64_t *top;        // (chunks, LS_MAX_LOGPROBS) logit_key, falling, 0 where there is none
  uint32_t *candidates; // (vocab)
};
LS_HOST_DEVICE size_t sample_row_bytes(uint32_t vocab) {
  const size_t chunks = (vocab + kVocabChunk - 1) / kVocabChunk;
  return (chunks * (sizeof(ChunkStats) + 8 + 8 * LS_MAX_LOGPROBS) + 8 * kBuckets + size_t{4} * vocab + 15) / 16 * 16;
}
LS_DEVICE SampleScratch sample_scratch(void *scratch, uint32_t row, uint32_t vocab) {
  const size_t chunks = (vocab + kVocabChunk - 1) / kVocabChunk;
  SampleScratch s;
  s.stats = reinterpret_cast<ChunkStats *>(static_cast<uint8_t *>(scratch) + row * sample_row_bytes(vocab));
  s.weight = reinterpret_cast<uint64_t *>(s.stats + chunks);
  s.buckets = s.weight + chunks;
  s.top = s.buckets + kBuckets;
  s.candidates = reinterpret_cast<uint32_t *>(s.top + chunks * LS_MAX_LOGPROBS);
  return s;
}

// Rises with the logit; never 0. Equal logits (0 and -0 too) have equal keys.
LS_DEVICE uint32_t logit_order(float x) {
  const uint32_t bits = bits_as<uint32_t>(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
LS_DEVICE float logit_of_order(uint32_t order) { return bits_as<float>(order & 0x80000000u ? order & 0x7fffffffu : ~order); }
// Larger logits first, among equal ones lower ids: the larger key comes first.
LS_DEVICE uint64_t logit_key(float x, uint32_t id) { return static_cast<uint64_t>(logit_order(x)) << 32 | (~id & 0xffffffffu); }
LS_DEVICE uint32_t key_id(uint64_t key) { return ~static_cast<uint32_t>(key); }

// e^x for x <= 0 by the steps of the CPU's exp_v, so that both give the same bits; 0 below -87.33.
LS_DEVICE float exp_reference(float x) {
  if (!(x >= -87.3365402f)) return 0;
  x = fminf(x, 0.0f);  // above 0 only in rows with a NaN, which are not used
  const float n = rintf(x * 1.44269504f);
  float r = fma_rn(n, -0.693359375f, x);
  r = fma_rn(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = fma_rn(p, r, 1.3981999507e-3f);
  p = fma_rn(p, r, 8.3334519073e-3f);
  p = fma_rn(p, r, 4.1665795894e-2f);
  p = fma_rn(p, r, 1.6666665459e-1f);
  p = fma_rn(p, r, 5.0000001201e-1f);
  p = fma_rn(p, r * r, r + 1.0f);
  return p * bits_as<float>(static_cast<uint32_t>(static_cast<int>(n) + 127) << 23);
}

// Weight of a logit in units of 2^-39: below 2^59 when all of a vocabulary of 2^20 weigh 1.
LS_DEVICE uint64_t weight_units(float logit, float largest, float inv_temperature) {
  const float scaled = exp_reference((logit - largest) * inv_temperature) * 0x1p19f, high = floorf(scaled);
  return static_cast<uint64_t>(static_cast<uint32_t>(high)) << 20 | static_cast<uint32_t>((scaled - high) * 0x1p20f);
}

LS_DEVICE uint32_t bucket_of(float logit, float largest, float inv_temperature) {
  const float distance = (largest - logit) * inv_temperature * kBucketsPerNat;
  return distance < static_cast<float>(kBuckets - 1) ? static_cast<uint32_t>(distance) : kBuckets - 1;
}

// Largest of a block of kThreads threads; every thread gets it. `scratch`: kThreads / 32 shared words, in use until the caller's next barrier.
template <uint32_t kThreads>
LS_DEVICE uint64_t block_max(uint64_t v, uint64_t *scratch) {
  for (unsigned d = kWarp / 2; d > 0; d /= 2) {
    const uint64_t other = shfl_xor(v, d);
    v = other > v ? other : v;
  }
  if (lane_id() == 0) scratch[warp_id()] = v;
  sync_block();
  for (uint32_t w = 0; w < kThreads / kWarp; ++w) v = scratch[w] > v ? scratch[w] : v;
  return v;
}
template <uint32_t kThreads>
LS_DEVICE uint64_t block_sum_units(uint64_t v, uint64_t *scratch) {
  for (unsigned d = kWarp / 2; d > 0; d /= 2) v += shfl_xor(v, d);
  if (lane_id() == 0) scratch[warp_id()] = v;
  sync_block();
  v = 0;
  for (uint32_t w = 0; w < kThreads / kWarp; ++w) v += scratch[w];
  return v;
}
// Sum of the threads before this one; total: of all. As above.
template <uint32_t kThreads>
LS_DEVICE uint64_t block_before(uint64_t v, uint64_t &total, uint64_t *scratch) {
  uint64_t sum = v;
  for (unsigned d = 1; d < kWarp; d *= 2) {
    const uint64_t other = shfl(sum, lane_id() >= d ? lane_id() - d : 0);
    if (lane_id() >= d) sum += other;
  }
  if (lane_id() == kWarp - 1) scratch[warp_id()] = sum;
  sync_block();
  uint64_t before = sum - v;
  total = 0;
  for (uint32_t w = 0; w < kThreads / kWarp; ++w) {
    if (w < warp_id()) before += scratch[w];
    total += scratch[w];
  }
  return before;
}

}  // namespace ls::cuda
