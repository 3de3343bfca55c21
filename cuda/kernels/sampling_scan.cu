// First two passes of sampling, a block a (chunk, row).   logits (rows, vocab) f32
//   scan   largest logit, sum of exp(x - largest), largest few of the chunk        weigh   sums of weights of the chunk and of its buckets
#include "elements.cuh"
#include "sampling.cuh"
#include "sampling_kernels.h"

namespace ls::cuda {
namespace {

LS_KERNEL LS_BOUNDS(kScanThreads, 1) void scan_kernel(SampleArgs a) {
  LS_SHARED(uint64_t, largest_of, kScanThreads / kWarp);
  LS_SHARED(float, sum_of, kScanThreads / kWarp);
  const uint32_t chunk = block_x(), row = block_y();
  if (row >= static_cast<uint32_t>(*a.count)) return;
  const SampleScratch scratch = sample_scratch(a.scratch, row, a.vocab);
  const float *x = a.logits + row * a.ld;
  const uint32_t begin = chunk * kVocabChunk;

  if (chunk == 0)
    for (uint32_t b = thread_x(); b < kBuckets; b += kScanThreads) scratch.buckets[b] = 0;

  float value[kScanItems];
  uint64_t best = 0;
  bool broken = false;
  LS_UNROLL
  for (uint32_t i = 0; i < kScanItems; ++i) {
    const uint32_t id = begin + i * kScanThreads + thread_x();
    value[i] = id < a.vocab ? load_global(x + id) : -INFINITY;
    if (!(value[i] <= FLT_MAX)) broken = true;
    const uint64_t key = id < a.vocab ? logit_key(value[i], id) : 0;
    best = key > best ? key : best;
  }
  // A broken value must not win: its chunk's largest is never used, but stays a number.
  broken = warp_any(broken);
  const uint64_t first = block_max<kScanThreads>(best, largest_of);
  const float top = fmaxf(-FLT_MAX, logit_of_order(static_cast<uint32_t>(first >> 32)));
  float sum = 0;
  LS_UNROLL
  for (uint32_t i = 0; i < kScanItems; ++i) sum += exp_reference(value[i] - top);
  if (broken) sum = NAN;  // any warp's shows in the sum
  sum = block_sum<kScanThreads>(sum, sum_of);
  if (thread_x() == 0) scratch.stats[chunk] = {top, key_id(first), sum, !(sum <= FLT_MAX)};

  const uint32_t wanted = a.params[row].n_logprobs;
  uint64_t last = ~uint64_t{0};
  for (uint32_t n = 0; n < wanted && n < LS_MAX_LOGPROBS; ++n) {
    uint64_t next = 0;
    LS_UNROLL
    for (uint32_t i = 0; i < kScanItems; ++i) {
      const uint32_t id = begin + i * kScanThreads + thread_x();
      const uint64_t key = id < a.vocab ? logit_key(value[i], id) : 0;
      if (key < last && key > next) next = key;
    }
    sync_block();
    last = block_max<kScanThreads>(next, largest_of);
    if (thread_x() == 0) scratch.top[static_cast<size_t>(chunk) * LS_MAX_LOGPROBS + n] = last;
  }
}

LS_KERNEL LS_BOUNDS(kScanThreads, 1) void weigh_kernel(SampleArgs a) {
  LS_SHARED(uint64_t, words, kScanThreads / kWarp);
  LS_SHARED(unsigned, low, kBuckets);   // sums of the lower 20 bits of the weights of a chunk, and of the rest: each fits 32 bits
  LS_SHARED(unsigned, high, kBuckets);
  const uint32_t chunk = block_x(), row = block_y();
  if (row >= static_cast<uint32_t>(*a.count)) return;
  const SampleParams params = a.params[row];
  if (!(params.temperature >= kGreedyTemperature)) return;
  const bool nucleus = params.top_p < 1;
  const SampleScratch scratch = sample_scratch(a.scratch, row, a.vocab);
  const float *x = a.logits + row * a.ld;

  uint64_t best = 0;
  for (uint32_t c = thread_x(); c < grid_x(); c += kScanThreads) {
    const uint64_t key = scratch.stats[c].broken ? ~uint64_t{0} : logit_key(scratch.stats[c].largest, 0);
    best = key > best ? key : best;
  }
  best = block_max<kScanThreads>(best, words);
  if (best == ~uint64_t{0}) return;  // the whole block
  const float largest = logit_of_order(static_cast<uint32_t>(best >> 32)), inv_temperature = 1.0f / params.temperature;
  for (uint32_t b = thread_x(); b < kBuckets; b += kScanThreads) low[b] = high[b] = 0;
  sync_block();

  uint64_t sum = 0;
  for (uint32_t i = 0; i < kScanItems; ++i) {
    const uint32_t id = chunk * kVocabChunk + i * kScanThreads + thread_x();
    if (id >= a.vocab) continue;
    const float logit = load_global(x + id);
    const uint64_t w = weight_units(logit, largest, inv_temperature);
    sum += w;
    if (!nucleus || !w) continue;
    const uint32_t bucket = bucket_of(logit, largest, inv_temperature);
    atomic_add(&low[bucket], static_cast<unsigned>(w & 0xfffff));
    atomic_add(&high[bucket], static_cast<unsigned>(w >> 20));
  }
  sum = block_sum_units<kScanThreads>(sum, words);
  if (thread_x() == 0) scratch.weight[chunk] = sum;
  if (nucleus)
    for (uint32_t b = thread_x(); b < kBuckets; b += kScanThreads) {
      const uint64_t mass = (static_cast<uint64_t>(high[b]) << 20) + low[b];
      if (mass) atomic_add(&scratch.buckets[b], mass);
    }
}

}  // namespace

void sample_scan(Stream stream, const SampleArgs &args, uint32_t rows) { launch(scan_kernel, Dim{(args.vocab + kVocabChunk - 1) / kVocabChunk, rows}, Dim{kScanThreads}, 0, stream, args); }
void sample_weigh(Stream stream, const SampleArgs &args, uint32_t rows) { launch(weigh_kernel, Dim{(args.vocab + kVocabChunk - 1) / kVocabChunk, rows}, Dim{kScanThreads}, 0, stream, args); }

}  // namespace ls::cuda
