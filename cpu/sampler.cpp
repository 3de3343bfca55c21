#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace ls::cpu {
namespace {

// Distances from the largest logit, in units of 1/16 nat at the row's temperature; the last bucket takes all that is further away.
constexpr uint32_t kBuckets = 512;
constexpr float kBucketsPerNat = 16;

uint32_t bucket_of(float logit, float largest, float inv_temperature) {
  const float distance = (largest - logit) * inv_temperature * kBucketsPerNat;
  return distance < static_cast<float>(kBuckets - 1) ? static_cast<uint32_t>(distance) : kBuckets - 1;
}

}  // namespace

Philox philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

double uniform(uint64_t seed, uint32_t position) {
  const Philox r = philox(seed, position, 0, 0, 0);
  const uint64_t bits = static_cast<uint64_t>(r.word[0]) << 32 | r.word[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

// Keeps the `limit` largest, falling; offered by rising id, so equal logits stay in the order of their ids.
void Sampler::TopList::offer(Candidate c, uint32_t limit) {
  if (count == limit && !(c.logit > entries[count - 1].logit)) return;
  uint32_t at = count < limit ? count++ : count - 1;
  for (; at > 0 && entries[at - 1].logit < c.logit; --at) entries[at] = entries[at - 1];
  entries[at] = c;
}

void Sampler::scan(const SampleRow &row, uint32_t chunk, Chunk &out) const {
  const uint32_t begin = chunk * kVocabChunk, n = std::min(kVocabChunk, vocab_ - begin);
  const float *x = row.logits + begin;
  out.stats = kernels_.logit_stats(x, n);
  out.top.count = 0;
  const uint32_t limit = std::min(row.n_logprobs, vocab_);
  if (!limit || out.stats.broken) return;
  uint32_t i = 0;
  for (; i < n && out.top.count < limit; ++i) out.top.offer({x[i], static_cast<int32_t>(begin + i)}, limit);
  while (i < n && (i = kernels_.find_above(x, i, n, out.top.entries[limit - 1].logit)) < n) {
    out.top.offer({x[i], static_cast<int32_t>(begin + i)}, limit);
    ++i;
  }
}

void Sampler::weigh(const SampleRow &row, const Whole &whole, uint32_t chunk, Chunk &out, float *weights, double *buckets) const {
  const uint32_t begin = chunk * kVocabChunk, n = std::min(kVocabChunk, vocab_ - begin);
  const float inv_temperature = 1.0f / row.temperature;
  const float *x = row.logits + begin;
  float *w = weights + begin;
  out.weight = kernels_.weigh(x, whole.largest, inv_temperature, w, n);
  if (!whole.nucleus) return;
  std::fill(buckets, buckets + kBuckets, 0.0);
  for (uint32_t i = 0; i < n; ++i)
    if (w[i] > 0) buckets[bucket_of(x[i], whole.largest, inv_temperature)] += w[i];
}

// The first token at which the running weight passes a uniform share of the whole, ids rising.
int32_t Sampler::draw(const SampleRow &row, const Chunk *chunks, const float *weights) const {
  const uint32_t count = (vocab_ + kVocabChunk - 1) / kVocabChunk;
  double total = 0;
  for (uint32_t c = 0; c < count; ++c) total += chunks[c].weight;
  const double target = uniform(row.seed, row.position) * total;
  double passed = 0;
  int32_t last = chunks[0].stats.index;
  for (uint32_t c = 0; c < count; ++c) {
    if (!(chunks[c].weight > 0)) continue;
    const uint32_t begin = c * kVocabChunk, end = std::min(vocab_, begin + kVocabChunk);
    if (passed + chunks[c].weight <= target && c + 1 < count) {
      passed += chunks[c].weight;
      for (uint32_t i = end; i > begin; --i)
        if (weights[i - 1] > 0) {
          last = static_cast<int32_t>(i - 1);
          break;
        }
      continue;
    }
    double inside = passed;
    for (uint32_t i = begin; i < end; ++i) {
      if (!(weights[i] > 0)) continue;
      last = static_cast<int32_t>(i);
      inside += weights[i];
      if (inside > target) return last;
    }
    passed += chunks[c].weight;
  }
  return last;  // rounding left the target just out of reach
}

int32_t Sampler::draw_nucleus(const SampleRow &row, const Whole &whole, const double *buckets, const float *weights, std::vector<Candidate> &edge) const {
  const uint32_t chunk_count = (vocab_ + kVocabChunk - 1) / kVocabChunk;
  const float inv_temperature = 1.0f / row.temperature;
  double mass[kBuckets], total = 0;
  for (uint32_t b = 0; b < kBuckets; ++b) {
    mass[b] = 0;
    for (uint32_t c = 0; c < chunk_count; ++c) mass[b] += buckets[static_cast<size_t>(c) * kBuckets + b];
    total += mass[b];
  }
  const double wanted = static_cast<double>(row.top_p) * total;
  double inside = 0;
  uint32_t cut = 0;
  for (uint32_t b = 0; b < kBuckets; ++b) {
    if (mass[b] <= 0) continue;
    cut = b;
    if (inside + mass[b] >= wanted) break;
    inside += mass[b];
  }
  if (inside + mass[cut] < wanted) inside -= mass[cut];  // rounding: the walk ended past the last bucket, which is the one to cut

  // Only the bucket in which the wanted mass is reached has to be sorted. The bound is loose; bucket_of decides.
  edge.clear();
  const float slack = std::fabs(whole.largest) * 1e-6f + (static_cast<float>(cut) + 2.0f) * row.temperature / kBucketsPerNat;
  const float bound = cut == kBuckets - 1 ? -std::numeric_limits<float>::infinity() : whole.largest - slack;
  for (uint32_t i = 0; (i = kernels_.find_above(row.logits, i, vocab_, bound)) < vocab_; ++i)
    if (weights[i] > 0 && bucket_of(row.logits[i], whole.largest, inv_temperature) == cut) edge.push_back({row.logits[i], static_cast<int32_t>(i)});
  std::sort(edge.begin(), edge.end(), [](const Candidate &a, const Candidate &b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; });
  Candidate last = edge[0];
  for (const Candidate &c : edge) {
    last = c;
    inside += weights[c.id];
    if (inside >= wanted) break;
  }

  const double target = uniform(row.seed, row.position) * inside;
  double passed = 0;
  int32_t chosen = whole.best;
  const float below = std::nextafterf(last.logit, -std::numeric_limits<float>::infinity());
  for (uint32_t i = 0; (i = kernels_.find_above(row.logits, i, vocab_, below)) < vocab_; ++i) {
    if (row.logits[i] == last.logit && static_cast<int32_t>(i) > last.id) continue;
    chosen = static_cast<int32_t>(i);
    passed += weights[i];
    if (passed > target) break;
  }
  return chosen;
}

Status Sampler::run(ThreadPool &pool, const SampleRow *rows, uint32_t count, RowOutput *out) {
  const uint32_t per_row = (vocab_ + kVocabChunk - 1) / kVocabChunk;
  if (chunks_.size() < static_cast<size_t>(count) * per_row) chunks_.resize(static_cast<size_t>(count) * per_row);
  if (wholes_.size() < count) wholes_.resize(count), edges_.resize(count);
  pool.run(count * per_row, [&](uint32_t i) { scan(rows[i / per_row], i % per_row, chunks_[i]); });

  bool any_draw = false, any_nucleus = false;
  for (uint32_t r = 0; r < count; ++r) {
    const Chunk *chunks = &chunks_[static_cast<size_t>(r) * per_row];
    Whole &whole = wholes_[r];
    uint32_t best = 0;
    bool broken = false;
    for (uint32_t c = 0; c < per_row; ++c) {
      broken |= chunks[c].stats.broken;
      if (chunks[c].stats.largest > chunks[best].stats.largest) best = c;
    }
    whole.largest = chunks[best].stats.largest;
    whole.best = static_cast<int32_t>(best * kVocabChunk + chunks[best].stats.index);
    double sum = 0;
    for (uint32_t c = 0; c < per_row; ++c) sum += chunks[c].stats.sum * std::exp(static_cast<double>(chunks[c].stats.largest) - whole.largest);
    if (broken || !(sum > 0))
      return Status::fail(LS_INTERNAL, "logits of slot " + std::to_string(rows[r].slot) + " at position " + std::to_string(rows[r].position) + " (row " + std::to_string(r) + ") are not finite");
    whole.log_sum = std::log(sum);
    whole.draw = rows[r].temperature >= kGreedyTemperature;
    whole.nucleus = whole.draw && rows[r].top_p < 1;
    any_draw |= whole.draw;
    any_nucleus |= whole.nucleus;
  }

  if (any_draw) {
    float *weights = weights_.ensure(static_cast<size_t>(count) * vocab_);
    double *buckets = any_nucleus ? buckets_.ensure(static_cast<size_t>(count) * per_row * kBuckets) : nullptr;
    pool.run(count * per_row, [&](uint32_t i) {
      const uint32_t r = i / per_row;
      if (wholes_[r].draw) weigh(rows[r], wholes_[r], i % per_row, chunks_[i], weights + static_cast<size_t>(r) * vocab_, buckets ? buckets + static_cast<size_t>(i) * kBuckets : nullptr);
    });
    pool.run(count, [&](uint32_t r) {
      const float *w = weights + static_cast<size_t>(r) * vocab_;
      if (wholes_[r].nucleus) wholes_[r].best = draw_nucleus(rows[r], wholes_[r], buckets + static_cast<size_t>(r) * per_row * kBuckets, w, edges_[r]);
      else if (wholes_[r].draw) wholes_[r].best = draw(rows[r], &chunks_[static_cast<size_t>(r) * per_row], w);
    });
  }

  for (uint32_t r = 0; r < count; ++r) {
    const Whole &whole = wholes_[r];
    const auto logprob = [&](float logit) {
      return static_cast<float>(std::clamp(static_cast<double>(logit) - whole.largest - whole.log_sum, static_cast<double>(kLogprobFloor), 0.0));
    };
    out[r].token = whole.best;
    out[r].logprob = logprob(rows[r].logits[whole.best]);
    out[r].top.clear();
    const uint32_t limit = std::min(rows[r].n_logprobs, vocab_);
    if (!limit) continue;
    TopList merged;
    for (uint32_t c = 0; c < per_row; ++c) {
      const TopList &list = chunks_[static_cast<size_t>(r) * per_row + c].top;
      for (uint32_t i = 0; i < list.count; ++i) merged.offer(list.entries[i], limit);
    }
    for (uint32_t i = 0; i < merged.count; ++i) out[r].top.emplace_back(merged.entries[i].id, logprob(merged.entries[i].logit));
  }
  return Status::good();
}

}  // namespace ls::cpu
