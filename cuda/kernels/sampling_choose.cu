// Last pass of sampling, a block a row: statistics of the whole vocabulary, the token, its log probability and those of the most likely tokens.
#include "elements.cuh"
#include "sampling.cuh"
#include "sampling_kernels.h"
#include "sampling_nucleus.cuh"

namespace ls::cuda {
namespace {

// Philox-4x32-10 with the counter (position, 0, 0, 0): the first two words, of which the upper 53 bits count.
LS_DEVICE uint64_t random_bits(uint32_t seed_lo, uint32_t seed_hi, uint32_t position) {
  uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ seed_lo, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ seed_hi;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    seed_lo += 0x9E3779B9u;
    seed_hi += 0xBB67AE85u;
  }
  return (static_cast<uint64_t>(c0) << 32 | c1) >> 11 << 11;
}

// The first id at which the running weight of the tokens with keys >= last passes a uniform share of `mass`. chunk_mass has the chunks' sums.
LS_DEVICE uint32_t draw(const SampleArgs &a, const SampleParams &p, const float *x, float largest, float inv_temperature, uint64_t last, uint64_t mass, ChooseShared &s) {
  const uint32_t thread = thread_x(), chunks = (a.vocab + kVocabChunk - 1) / kVocabChunk;
  const uint64_t target = multiply_high(random_bits(p.seed_lo, p.seed_hi, p.position), mass);  // < mass
  static_assert(kMaxChunks <= kChooseThreads && kVocabChunk % kChooseThreads == 0);
  constexpr uint32_t kItems = kVocabChunk / kChooseThreads;
  const uint64_t of_chunk = thread < chunks ? s.chunk_mass[thread] : 0;
  uint64_t total;
  const uint64_t before_chunk = block_before<kChooseThreads>(of_chunk, total, s.words);
  if (before_chunk <= target && target < before_chunk + of_chunk) s.cut = thread, s.inside = before_chunk;
  sync_block();

  const uint32_t first = s.cut * kVocabChunk + thread * kItems;
  uint64_t weight[kItems], own = 0;
  LS_UNROLL
  for (uint32_t i = 0; i < kItems; ++i) {
    const uint32_t id = first + i;
    const float logit = id < a.vocab ? load_global(x + id) : -INFINITY;
    weight[i] = id < a.vocab && logit_key(logit, id) >= last ? weight_units(logit, largest, inv_temperature) : 0;
    own += weight[i];
  }
  uint64_t running = s.inside + block_before<kChooseThreads>(own, total, s.words);
  LS_UNROLL
  for (uint32_t i = 0; i < kItems; ++i) {
    if (running <= target && target < running + weight[i]) s.token = first + i;
    running += weight[i];
  }
  sync_block();
  return s.token;
}

LS_KERNEL LS_BOUNDS(kChooseThreads, 1) void choose_kernel(SampleArgs a) {
  LS_SHARED(ChooseShared, shared, 1);
  ChooseShared &s = shared[0];
  const uint32_t row = block_x(), thread = thread_x(), chunks = (a.vocab + kVocabChunk - 1) / kVocabChunk;
  if (row >= static_cast<uint32_t>(*a.count)) return;
  const SampleParams p = a.params[row];
  const SampleScratch scratch = sample_scratch(a.scratch, row, a.vocab);
  const float *x = a.logits + row * a.ld;
  SampleResult &result = a.results[row];

  // Chunks come by rising id, so the first of equal ones has the lowest.
  uint64_t best = 0;
  bool broken = false;
  for (uint32_t c = thread; c < chunks; c += kChooseThreads) {
    const uint64_t key = logit_key(scratch.stats[c].largest, scratch.stats[c].index);
    best = key > best ? key : best;
    broken |= scratch.stats[c].broken != 0;
  }
  best = block_max<kChooseThreads>(best, s.words);
  const float largest = logit_of_order(static_cast<uint32_t>(best >> 32));
  if (thread == 0) s.cut = 0;
  sync_block();
  if (broken) s.cut = 1;
  for (uint32_t c = thread; c < chunks; c += kChooseThreads) s.chunk_sum[c] = static_cast<double>(scratch.stats[c].sum) * exp_reference(scratch.stats[c].largest - largest);
  sync_block();
  double sum = 0;
  for (uint32_t c = 0; c < chunks; ++c) sum += s.chunk_sum[c];
  if (s.cut || !(sum > 0)) {  // the whole block
    if (thread == 0) {
      result.token = 0, result.logprob = 0, result.n_top = 0, result.broken = 1;
      if (a.carry && p.carry >= 0) a.carry[p.carry] = 0;
    }
    return;
  }
  const float log_sum = logf(static_cast<float>(sum));
  sync_block();

  uint32_t token = key_id(best);
  if (p.temperature >= kGreedyTemperature) {
    const float inv_temperature = 1.0f / p.temperature;
    Nucleus whole{0, 0};
    if (p.top_p < 1) {
      whole = find_nucleus(a, scratch, x, largest, inv_temperature, p.top_p, s);
      const uint32_t last_order = static_cast<uint32_t>(whole.last >> 32);
      for (uint32_t c = warp_id(); c < chunks; c += kChooseThreads / kWarp) {
        uint64_t mass = 0;
        if (logit_order(scratch.stats[c].largest) >= last_order) {
          const uint32_t end = a.vocab < (c + 1) * kVocabChunk ? a.vocab : (c + 1) * kVocabChunk;
          for (uint32_t id = c * kVocabChunk + lane_id(); id < end; id += kWarp) {
            const float logit = load_global(x + id);
            if (logit_key(logit, id) >= whole.last) mass += weight_units(logit, largest, inv_temperature);
          }
        }
        for (unsigned d = kWarp / 2; d > 0; d /= 2) mass += shfl_xor(mass, d);
        if (lane_id() == 0) s.chunk_mass[c] = mass;
      }
      sync_block();
    } else {
      uint64_t own = 0;
      for (uint32_t c = thread; c < chunks; c += kChooseThreads) own += s.chunk_mass[c] = scratch.weight[c];
      whole.mass = block_sum_units<kChooseThreads>(own, s.words);
      sync_block();
    }
    token = draw(a, p, x, largest, inv_temperature, whole.last, whole.mass, s);
    sync_block();
  }

  const auto logprob = [&](float logit) { return fminf(fmaxf(logit - largest - log_sum, kLogprobFloor), 0.0f); };
  uint32_t n_top = p.n_logprobs < LS_MAX_LOGPROBS ? p.n_logprobs : LS_MAX_LOGPROBS;
  n_top = n_top < a.vocab ? n_top : a.vocab;
  uint64_t last = ~uint64_t{0};
  for (uint32_t n = 0; n < n_top; ++n) {
    uint64_t next = 0;
    for (uint32_t c = thread; c < chunks; c += kChooseThreads)
      for (uint32_t i = 0; i < n_top; ++i) {
        const uint64_t key = scratch.top[static_cast<size_t>(c) * LS_MAX_LOGPROBS + i];
        if (key >= last) continue;
        next = key > next ? key : next;  // a chunk's keys fall
        break;
      }
    last = block_max<kChooseThreads>(next, s.words);
    if (thread == 0) result.top[n] = {static_cast<int32_t>(key_id(last)), logprob(logit_of_order(static_cast<uint32_t>(last >> 32)))};
    sync_block();
  }
  if (thread == 0) {
    result.token = static_cast<int32_t>(token);
    result.logprob = logprob(x[token]);
    result.n_top = n_top;
    result.broken = 0;
    if (a.carry && p.carry >= 0) a.carry[p.carry] = static_cast<int32_t>(token);
  }
}

}  // namespace

void sample_choose(Stream stream, const SampleArgs &args, uint32_t rows) { launch(choose_kernel, Dim{rows}, Dim{kChooseThreads}, 0, stream, args); }

size_t sample_scratch_bytes(uint32_t rows, uint32_t vocab) { return rows * sample_row_bytes(vocab); }

void sample(Stream stream, const float *logits, size_t ld, uint32_t vocab, const SampleParams *params, const int32_t *count, uint32_t rows, SampleResult *results, int32_t *carry, void *scratch) {
  const SampleArgs args{logits, ld, vocab, params, count, results, carry, scratch};
  sample_scan(stream, args, rows);
  sample_weigh(stream, args, rows);
  sample_choose(stream, args, rows);
}

}  // namespace ls::cuda
