#include "attention.h"

#include <algorithm>

namespace ls::cpu {
namespace {

constexpr uint32_t kBlockTokens = 32;      // query tokens that share one pass over K and V
constexpr uint32_t kSplitTokens = 4;       // up to so many query tokens, partitions of a sequence may go to different threads
constexpr uint64_t kSerialCost = 16384;    // multiply-adds below which waking a helper costs more than it brings

uint32_t partitions(uint32_t keys) { return (keys + kPartition - 1) / kPartition; }
size_t partial_stride(uint32_t head_dim) { return 16 + (head_dim + 15) / 16 * 16; }

float *thread_scratch(size_t floats) {
  static thread_local Buffer<float> scratch;
  return scratch.ensure(floats);
}

}  // namespace

const AttentionKernels &attention_for(Isa isa) { return isa == Isa::avx2 ? kAttention_avx2 : isa == Isa::avx512 ? kAttention_avx512 : kAttention_amx; }

size_t attention_scratch_floats(uint32_t rows, uint32_t head_dim) {
  const size_t padded = (head_dim + 15) / 16 * 16;
  // q tiles and folded sums of every row, largest and sum of every row; scores, weights and V sums of one pass (32 rows at most);
  // one partition of K and V as f32, and room for a last vector to run over.
  return static_cast<size_t>(rows + 16) * (2 * padded + 2) + 48 * (kPartition + padded) + 2 * static_cast<size_t>(kPartition) * head_dim + 256;
}

void Attention::plan(const std::vector<AttentionSequence> &sequences, uint32_t threads) {
  sequences_.assign(sequences.begin(), sequences.end());
  items_.clear();
  folds_.clear();
  cost_ = 0;
  const uint32_t group = shape_.heads / shape_.kv_heads;
  size_t whole = 0;  // items when a sequence's block is never split
  for (const AttentionSequence &s : sequences_) whole += static_cast<size_t>((s.len + kBlockTokens - 1) / kBlockTokens) * shape_.kv_heads;
  const size_t wanted = threads > 1 ? static_cast<size_t>(threads) * 4 : 1;
  const uint32_t block = whole >= wanted ? kBlockTokens : whole * 2 >= wanted ? kBlockTokens / 2 : kBlockTokens / 4;
  size_t floats = 0;
  for (uint32_t i = 0; i < sequences_.size(); ++i) {
    const AttentionSequence &s = sequences_[i];
    cost_ += 2ull * s.len * (s.start + s.len) * shape_.heads * shape_.head_dim;
    for (uint32_t done = 0; done < s.len; done += block) {
      const uint32_t tokens = std::min(block, s.len - done);
      const uint32_t parts = partitions(s.start + done + tokens);
      const bool split = s.len <= kSplitTokens && parts > 1 && whole < wanted;
      for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
        Planned planned{i, h, done, tokens, 0, parts, floats, split};
        if (!split) {
          items_.push_back(planned);
          continue;
        }
        folds_.push_back(planned);
        floats += static_cast<size_t>(parts) * tokens * group * partial_stride(shape_.head_dim);
        for (uint32_t p = 0; p < parts; ++p) {
          planned.part_begin = p;
          planned.part_end = p + 1;
          items_.push_back(planned);
        }
      }
    }
  }
  // Longest first, so that the end of the region is even.
  std::sort(items_.begin(), items_.end(), [this](const Planned &a, const Planned &b) {
    const auto cost = [this](const Planned &p) {
      const uint64_t keys = sequences_[p.sequence].start + p.first_token + p.tokens;
      return static_cast<uint64_t>(p.tokens) * (std::min<uint64_t>(keys, static_cast<uint64_t>(p.part_end) * kPartition) - static_cast<uint64_t>(p.part_begin) * kPartition);
    };
    return cost(a) > cost(b);
  });
  partials_.ensure(floats);
}

AttentionItem Attention::item(const Planned &planned, const KvMemory &memory, uint32_t layer, const float *q, float *out) {
  const AttentionSequence &s = sequences_[planned.sequence];
  const uint32_t group = shape_.heads / shape_.kv_heads, ld = shape_.heads * shape_.head_dim;
  const size_t offset = static_cast<size_t>(s.first_row + planned.first_token) * ld + static_cast<size_t>(planned.kv_head) * group * shape_.head_dim;
  AttentionItem item{};
  item.q = q + offset;
  item.out = out + offset;
  item.ld = ld;
  item.tokens = planned.tokens;
  item.group = group;
  item.head_dim = shape_.head_dim;
  item.first_position = s.start + planned.first_token;
  item.scale = shape_.scale;
  item.kv = memory.layer(layer) + 2 * memory.block_bytes() * planned.kv_head;
  item.block_bytes = memory.block_bytes();
  item.page_bytes = memory.page_bytes();
  item.pages = s.pages;
  item.part_begin = planned.part_begin;
  item.part_end = planned.part_end;
  if (planned.split)
    item.partial = partials_.data() + planned.partial + static_cast<size_t>(planned.part_begin) * planned.tokens * group * partial_stride(shape_.head_dim);
  return item;
}

void Attention::run(ThreadPool &pool, const KvMemory &memory, uint32_t layer, const float *q, float *out) {
  const auto kernel = memory.dtype() == LS_DTYPE_BF16 ? kernels_.run_bf16 : kernels_.run_f32;
  const auto work = [&](uint32_t index) {
    const AttentionItem one = item(items_[index], memory, layer, q, out);
    kernel(one, thread_scratch(attention_scratch_floats(one.tokens * one.group, one.head_dim)));
  };
  const uint32_t count = static_cast<uint32_t>(items_.size());
  if (cost_ < kSerialCost || pool.size() == 1) {
    for (uint32_t i = 0; i < count; ++i) work(i);
  } else {
    pool.run(count, work);
  }
  for (const Planned &planned : folds_) {
    const AttentionItem one = item(planned, memory, layer, q, out);
    kernels_.fold(one, thread_scratch(attention_scratch_floats(one.tokens * one.group, one.head_dim)));
  }
}

}  // namespace ls::cpu
