// Which tiles of queries and keys a step's attention consists of.
#include <algorithm>

#include "attention.h"

namespace ls::cuda {
namespace {

constexpr uint32_t kTileRows = 16;          // of a split tile
constexpr uint32_t kSplitRows = 64;         // packed rows of a sequence up to which the keys are split instead of the rows
constexpr uint32_t kSmallestPartition = 256;  // keys
constexpr uint32_t kMostPartitions = 64;

constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

uint32_t partition_keys(uint32_t context, uint32_t smallest) {
  uint32_t keys = smallest;
  while (ceil_div(context, keys) > kMostPartitions) keys *= 2;
  return keys;
}

void split(const AttentionRow &row, uint32_t group, uint32_t smallest, AttentionPlan &out) {
  const uint32_t start = static_cast<uint32_t>(row.start), len = static_cast<uint32_t>(row.len), total = len * group, keys = partition_keys(start + len, smallest);
  for (uint32_t first = 0; first < total; first += kTileRows) {
    const uint32_t rows = std::min(kTileRows, total - first), end = start + (first + rows - 1) / group + 1, parts = ceil_div(end, keys);
    AttentionTile tile{row.first_token, row.start, static_cast<int32_t>(first), static_cast<int32_t>(rows), row.page_offset, 0, static_cast<int32_t>(end), -1};
    if (parts == 1) {
      out.split.push_back(tile);
      continue;
    }
    out.folds.push_back({tile.token, tile.first, tile.rows, static_cast<int32_t>(out.partial_rows), static_cast<int32_t>(parts), {}});
    for (uint32_t p = 0; p < parts; ++p) {
      tile.key_begin = static_cast<int32_t>(p * keys);
      tile.key_end = static_cast<int32_t>(std::min(end, (p + 1) * keys));
      tile.partial = static_cast<int32_t>(out.partial_rows);
      out.partial_rows += rows;
      out.split.push_back(tile);
    }
  }
}

}  // namespace

uint32_t attention_block_rows(uint32_t head_dim) { return head_dim <= 128 ? 128 : 64; }

uint32_t attention_partial_rows(uint32_t sequences, uint32_t max_context, uint32_t group) {
  // Every sequence decodes, and one has a short chunk besides; more short chunks at once make partitions grow.
  return (sequences * group + kSplitRows) * std::min(kMostPartitions, ceil_div(max_context, kSmallestPartition));
}

size_t attention_partial_bytes(uint32_t partial_rows, uint32_t kv_heads, uint32_t head_dim) {
  const size_t padded = head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
  return size_t{partial_rows} * kv_heads * (padded + 2) * sizeof(float);
}

void plan_attention(const AttentionRow *rows, uint32_t count, uint32_t group, uint32_t head_dim, uint32_t partial_capacity, AttentionPlan &out) {
  const uint32_t block = attention_block_rows(head_dim);
  out.block.clear();
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t start = static_cast<uint32_t>(rows[i].start), len = static_cast<uint32_t>(rows[i].len), total = len * group;
    if (len <= 1 || total <= kSplitRows) continue;
    for (uint32_t first = 0; first < total; first += block) {
      const uint32_t n = std::min(block, total - first), end = start + (first + n - 1) / group + 1;
      out.block.push_back({rows[i].first_token, rows[i].start, static_cast<int32_t>(first), static_cast<int32_t>(n), rows[i].page_offset, 0, static_cast<int32_t>(end), -1});
    }
  }
  // A partition that covers the longest context needs no partial results, so this ends.
  for (uint32_t smallest = kSmallestPartition;; smallest *= 2) {
    out.split.clear();
    out.folds.clear();
    out.partial_rows = 0;
    for (uint32_t i = 0; i < count; ++i)
      if (rows[i].len == 1 || (rows[i].len > 1 && static_cast<uint32_t>(rows[i].len) * group <= kSplitRows)) split(rows[i], group, smallest, out);
    if (out.partial_rows <= partial_capacity) break;
  }
  const auto costlier = [](const AttentionTile &a, const AttentionTile &b) { return a.key_end - a.key_begin > b.key_end - b.key_begin; };
  std::stable_sort(out.split.begin(), out.split.end(), costlier);
  std::stable_sort(out.block.begin(), out.block.end(), costlier);
}

}  // namespace ls::cuda
