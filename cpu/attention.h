// Causal grouped-query attention over paged K/V.
//
// One arithmetic order per (query token, head), whatever shares the step: keys are walked in partitions of 256 from position 0; inside a
// partition scores, largest score, exp, sum and the weighted sum of V go in key order; partitions are folded in order with rescaling. How
// query tokens are blocked, which thread does what and whether partitions are computed apart changes no bit.
#pragma once
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "isa.h"
#include "kv_memory.h"
#include "thread_pool.h"

namespace ls::cpu {

inline constexpr uint32_t kPartition = 256;                             // keys
inline constexpr uint32_t kPartitionPages = kPartition / kPageTokens;

// One unit of work: some consecutive query tokens of one sequence, all query heads of one kv head, partitions [part_begin, part_end).
// A row is (token, head of the group): row = token * group + head.
struct AttentionItem {
  const float *q;       // first token, first head of the group; heads follow each other, tokens are ld floats apart
  float *out;           // the same layout
  uint32_t ld;
  uint32_t tokens, group, head_dim;
  uint32_t first_position;  // of the first token
  float scale;
  const uint8_t *kv;    // K block of this head in page 0; V follows block_bytes later
  size_t block_bytes, page_bytes;
  const int32_t *pages;
  uint32_t part_begin, part_end;
  // Null: fold the partitions (part_begin is 0) and write out. Else: [part - part_begin][row][16 + head_dim padded to 16] floats,
  // largest score and sum in the first two, the sum being 0 where a row sees no key.
  float *partial;
};

struct AttentionKernels {
  const char *name;
  // scratch: attention_scratch_floats(rows, head_dim) floats, 64-byte aligned.
  void (*run_f32)(const AttentionItem &item, float *scratch);
  void (*run_bf16)(const AttentionItem &item, float *scratch);
  // Folds partial results of all partitions (item.partial, item.part_begin == 0) and writes out.
  void (*fold)(const AttentionItem &item, float *scratch);
};
extern const AttentionKernels kAttention_avx2, kAttention_avx512, kAttention_amx;
// The 16-lane and the tile source on an AVX2 machine, linked into tests only.
extern const AttentionKernels kAttention_emu512, kAttention_emuamx;
// amx: bf16 pages with a head_dim that is a multiple of 32 go through tiles, where q and the weights are rounded to bf16.
const AttentionKernels &attention_for(Isa isa);

size_t attention_scratch_floats(uint32_t rows, uint32_t head_dim);

struct AttentionShape {
  uint32_t heads, kv_heads, head_dim;
  float scale;
};

// Query tokens of one sequence: rows [first_row, first_row + len) of q and out are positions [start, start + len).
struct AttentionSequence {
  uint32_t first_row, start, len;
  const int32_t *pages;
};

// Plans a step once, runs it for every layer. Not thread safe.
class Attention {
 public:
  Attention(const AttentionShape &shape, const AttentionKernels &kernels) : shape_(shape), kernels_(kernels) {}
  // Splits the step into items for `threads` threads. The arrays behind `pages` must outlive run().
  void plan(const std::vector<AttentionSequence> &sequences, uint32_t threads);
  // q, out: (rows, heads * head_dim). K and V of every position up to the last query are in `memory` already.
  void run(ThreadPool &pool, const KvMemory &memory, uint32_t layer, const float *q, float *out);

 private:
  struct Planned {
    uint32_t sequence, kv_head, first_token, tokens, part_begin, part_end;
    size_t partial;  // offset of its partition 0 in partials_; ignored without split
    bool split;
  };
  AttentionItem item(const Planned &planned, const KvMemory &memory, uint32_t layer, const float *q, float *out);

  AttentionShape shape_;
  const AttentionKernels &kernels_;
  std::vector<AttentionSequence> sequences_;
  std::vector<Planned> items_, folds_;
  Buffer<float> partials_;
  uint64_t cost_ = 0;  // multiply-adds of one layer
};

}  // namespace ls::cpu
