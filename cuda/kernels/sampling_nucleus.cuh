// The last token of a nucleus: the smallest set of most likely tokens whose weights reach a part of the whole.
#pragma once
#include "sampling.cuh"

namespace ls::cuda {

inline constexpr uint32_t kChooseThreads = 512;

// Shared memory of the choosing kernel.
struct ChooseShared {
  uint64_t words[kChooseThreads / kWarp];
  uint64_t mass[256];
  uint32_t count[256];
  uint64_t chunk_mass[kMaxChunks];
  double chunk_sum[kMaxChunks];
  uint64_t inside;     // weights before what is looked at
  uint64_t threshold;
  uint32_t cut, candidates, token;
};

struct Nucleus {
  uint64_t last;  // logit_key of its last token
  uint64_t mass;  // of all of it
};

// Every thread of the block calls it and gets the result. top_p < 1.
LS_DEVICE Nucleus find_nucleus(const SampleArgs &a, const SampleScratch &scratch, const float *x, float largest, float inv_temperature, float top_p, ChooseShared &s) {
  const uint32_t thread = thread_x(), chunks = (a.vocab + kVocabChunk - 1) / kVocabChunk;

  // The bucket in which the wanted mass is reached. Its first token counts even where no mass is wanted.
  static_assert(kBuckets == kChooseThreads);
  const uint64_t mass = scratch.buckets[thread];
  uint64_t total;
  const uint64_t before = block_before<kChooseThreads>(mass, total, s.words);
  const double share = ceil(static_cast<double>(top_p > 0 ? top_p : 0) * static_cast<double>(total));
  uint64_t wanted = static_cast<uint64_t>(share);
  wanted = wanted < 1 ? 1 : wanted > total ? total : wanted;
  if (before < wanted && wanted <= before + mass) s.cut = thread, s.inside = before;
  if (thread == 0) s.candidates = 0;
  sync_block();

  // Its tokens, in no particular order: what follows does not depend on it.
  const uint32_t cut = s.cut;
  for (uint32_t c = 0; c < chunks; ++c) {
    if (bucket_of(scratch.stats[c].largest, largest, inv_temperature) > cut) continue;
    const uint32_t end = a.vocab < (c + 1) * kVocabChunk ? a.vocab : (c + 1) * kVocabChunk;
    for (uint32_t id = c * kVocabChunk + thread; id < end; id += kChooseThreads) {
      const float logit = load_global(x + id);
      if (bucket_of(logit, largest, inv_temperature) == cut && weight_units(logit, largest, inv_temperature)) scratch.candidates[atomic_add(&s.candidates, 1u)] = id;
    }
  }
  sync_block();

  // The key of the last one, eight bits at a time from the top: a bin per value of these bits, largest first.
  uint64_t prefix = 0;
  const uint32_t count = s.candidates;
  for (int shift = 56;; shift -= 8) {
    if (thread < 256) s.mass[thread] = 0, s.count[thread] = 0;
    sync_block();
    for (uint32_t i = thread; i < count; i += kChooseThreads) {
      const uint32_t id = scratch.candidates[i];
      const float logit = load_global(x + id);
      const uint64_t key = logit_key(logit, id);
      if (shift < 56 && key >> (shift + 8) != prefix) continue;
      const uint32_t bin = 255 - static_cast<uint32_t>(key >> shift & 255);
      atomic_add(&s.mass[bin], weight_units(logit, largest, inv_temperature));
      atomic_add(&s.count[bin], 1u);
    }
    sync_block();
    const uint64_t inside = s.inside, own = thread < 256 ? s.mass[thread] : 0;
    uint64_t all;
    const uint64_t above = inside + block_before<kChooseThreads>(own, all, s.words);
    if (above < wanted && wanted <= above + own) s.cut = thread, s.inside = above;
    sync_block();
    prefix = prefix << 8 | (255 - s.cut);
    const bool alone = s.count[s.cut] == 1;
    sync_block();
    if (!alone && shift > 0) continue;
    // One is left: it is the last.
    for (uint32_t i = thread; i < count; i += kChooseThreads) {
      const uint32_t id = scratch.candidates[i];
      const uint64_t key = logit_key(load_global(x + id), id);
      if (key >> shift == prefix) s.threshold = key;
    }
    break;
  }
  sync_block();
  const Nucleus nucleus{s.threshold, s.inside + weight_units(logit_of_order(static_cast<uint32_t>(s.threshold >> 32)), largest, inv_temperature)};
  sync_block();
  return nucleus;
}

}  // namespace ls::cuda
