// Token choice and log probabilities from logits. Deterministic: sums have fixed chunks and order, and the random number of a token depends on
// (seed, position of the token) alone, so a request gives the same tokens alone, batched or after preemption.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "buffer.h"
#include "ops.h"
#include "thread_pool.h"

namespace ls::cpu {

inline constexpr uint32_t kVocabChunk = 4096;         // logits per unit of work
inline constexpr float kGreedyTemperature = 1e-6f;    // below it the most likely token is taken
inline constexpr float kLogprobFloor = -9999.0f;

struct SampleRow {
  const float *logits = nullptr;  // (vocab)
  float temperature = 0;          // 0: greedy
  float top_p = 1;                // 1: whole vocabulary
  uint64_t seed = 0;
  uint32_t position = 0;          // index of the sampled token in its sequence
  uint32_t n_logprobs = 0;        // <= LS_MAX_LOGPROBS
  int32_t slot = 0;               // for the error text
};

class Sampler {
 public:
  Sampler(uint32_t vocab, const OpsKernels &kernels) : vocab_(vocab), kernels_(kernels) {}
  // out: one per row. LS_INTERNAL naming slot and position when a row has a NaN or +infinity.
  Status run(ThreadPool &pool, const SampleRow *rows, uint32_t count, RowOutput *out);

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };
  struct TopList {
    uint32_t count = 0;
    Candidate entries[LS_MAX_LOGPROBS];
    void offer(Candidate c, uint32_t limit);
  };
  // Per (row, chunk).
  struct Chunk {
    LogitStats stats;
    TopList top;
    float weight = 0;  // sum of exp((x - largest) / temperature)
  };
  // Per row.
  struct Whole {
    float largest = 0;
    double log_sum = 0;  // log of sum exp(x - largest)
    int32_t best = 0;
    bool draw = false, nucleus = false;
  };
  void scan(const SampleRow &row, uint32_t chunk, Chunk &out) const;
  void weigh(const SampleRow &row, const Whole &whole, uint32_t chunk, Chunk &out, float *weights, double *buckets) const;
  int32_t draw(const SampleRow &row, const Chunk *chunks, const float *weights) const;
  int32_t draw_nucleus(const SampleRow &row, const Whole &whole, const double *buckets, const float *weights, std::vector<Candidate> &edge) const;

  uint32_t vocab_;
  const OpsKernels &kernels_;
  std::vector<Chunk> chunks_;
  std::vector<Whole> wholes_;
  std::vector<std::vector<Candidate>> edges_;
  Buffer<float> weights_;
  Buffer<double> buckets_;
};

// Philox-4x32-10, the counter-based generator: four words out of a 128-bit counter and a 64-bit key.
struct Philox {
  uint32_t word[4];
};
Philox philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3);
// In [0, 1), 53 bits.
double uniform(uint64_t seed, uint32_t position);

}  // namespace ls::cpu
