// Causal grouped-query attention over paged K and V, on the tensor cores.
//
// Queries of one sequence that share a kv head are packed as rows: row = token * group + head of the group. Work comes in tiles of rows of one
// sequence, made on the host once a step (plan_attention) and run for every layer and kv head:
//   split tiles   up to 16 rows against one partition of the keys: decoding, and short chunks behind a long prefix. A partition is 256 * 2^k keys,
//                 k chosen by the length of the context alone, so what else is in the step changes no bit. Partitions are folded in their order.
//   block tiles   up to attention_block_rows() rows against all keys that they may see: prefill.
#pragma once
#include <cstdint>
#include <vector>

#include "../runtime.h"
#include "kv_layout.h"

namespace ls::cuda {

// Tokens [start, start + len) of a sequence; its q and out are rows first_token.. of the step. Its page table is pages[page_offset..].
struct AttentionRow {
  int32_t first_token = 0, start = 0, len = 0, page_offset = 0;
};

struct AttentionTile {
  int32_t token, start;           // of the sequence in this step: row of its first token in q, position of it
  int32_t first, rows;            // packed rows [first, first + rows)
  int32_t page_offset;
  int32_t key_begin, key_end;     // key_begin: a multiple of 16
  int32_t partial;                // -1: writes out. Else its first row in the partial results
};
struct AttentionFold {
  int32_t token, first, rows;     // as above
  int32_t partial, parts;         // results of partition p of row r are at partial + p * rows + r
  int32_t pad[3];
};

struct AttentionPlan {
  std::vector<AttentionTile> split, block;  // the costliest first
  std::vector<AttentionFold> folds;
  uint32_t partial_rows = 0;                // in use by `folds`
};

// Packed rows of a block tile, depends on head_dim.
uint32_t attention_block_rows(uint32_t head_dim);
// Most partial rows that a step of `sequences` sequences with contexts up to max_context can need; capacity for plan_attention.
uint32_t attention_partial_rows(uint32_t sequences, uint32_t max_context, uint32_t group);
// Bytes of AttentionArgs::partial for so many rows.
size_t attention_partial_bytes(uint32_t partial_rows, uint32_t kv_heads, uint32_t head_dim);
// Tiles for the rows of a step; rows with len 0 have none. group = heads / kv_heads. Where the partial results would not fit partial_capacity
// rows, partitions grow for the whole step.
void plan_attention(const AttentionRow *rows, uint32_t count, uint32_t group, uint32_t head_dim, uint32_t partial_capacity, AttentionPlan &out);

struct AttentionArgs {
  const void *q = nullptr;         // (tokens, heads * head_dim) bf16
  void *out = nullptr;             // the same
  const void *pages = nullptr;     // of this layer, page p at p * layout.page_bytes()
  const int32_t *page_table = nullptr;
  KvLayout layout;
  KvScales scales;
  uint32_t heads = 0;
  float scale = 0;                 // multiplies q.k
  void *partial = nullptr;         // attention_partial_bytes(partial_rows)
  uint32_t partial_rows = 0;       // capacity, the same in all launches of a step
};

// Tiles and folds are device arrays, their counts device words; `grid_tiles` and `grid_folds` bound the launch: blocks beyond the count leave at
// once, and when there are more tiles than grid_tiles a block does several. Split tiles need attention_fold after them.
void attention_split(Stream stream, const AttentionArgs &args, const AttentionTile *tiles, const int32_t *count, uint32_t grid_tiles);
void attention_fold(Stream stream, const AttentionArgs &args, const AttentionFold *folds, const int32_t *count, uint32_t grid_folds);
void attention_block(Stream stream, const AttentionArgs &args, const AttentionTile *tiles, const int32_t *count, uint32_t grid_tiles);

}  // namespace ls::cuda
