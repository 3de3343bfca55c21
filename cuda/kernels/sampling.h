// Token choice and log probabilities from logits, as cpu/sampler.h defines them: the same tokens from the same logits.
//
// Weights exp((x - largest) / temperature) are summed as integers in units of 2^-39, so no sum depends on an order. The random number of a token
// depends on (seed, position) alone.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../../native/layerscale.h"
#include "../runtime.h"

namespace ls::cuda {

inline constexpr uint32_t kMaxSampleVocab = 1u << 20;

struct SampleParams {
  float temperature = 0;    // below 1e-6: greedy
  float top_p = 1;          // 1 and above: whole vocabulary
  uint32_t seed_lo = 0, seed_hi = 0;
  uint32_t position = 0;    // index of the sampled token in its sequence
  uint32_t n_logprobs = 0;  // <= LS_MAX_LOGPROBS
  int32_t carry = -1;       // entry of the carry array that gets the token; -1: none
  uint32_t pad = 0;
};

struct SampleResult {
  int32_t token = -1;
  float logprob = 0;
  uint32_t n_top = 0;
  uint32_t broken = 0;      // 1: the logits have a NaN, +infinity, or nothing but -infinity; the token is then 0
  struct Top {
    int32_t token;
    float logprob;
  } top[LS_MAX_LOGPROBS];   // n_top entries, falling
};

// Bytes of scratch for `rows` rows; vocab <= kMaxSampleVocab.
size_t sample_scratch_bytes(uint32_t rows, uint32_t vocab);
// The first *count (device word) of `rows` rows; blocks of the others leave at once.
//   logits (rows, vocab) f32, rows ld apart   params, results (rows) device arrays   carry device array or null
void sample(Stream stream, const float *logits, size_t ld, uint32_t vocab, const SampleParams *params, const int32_t *count, uint32_t rows, SampleResult *results, int32_t *carry, void *scratch);

}  // namespace ls::cuda
