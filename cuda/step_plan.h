// A step as the device gets it: one block of int32 words in page-locked memory, copied once, and a few numbers for the host that launches.
//
// Every region begins at a multiple of 16 words. The fixed regions of a decode step depend on its bucket alone, so a captured graph finds them:
//   counts   [split tiles, folds, block tiles, copies, then the sampled rows of each head chunk]
//   tokens, positions, places (T each)   places: page * 16 + place in the page, -1 = padding
//   sampled (S): row of the token matrix, -1 = padding       params (S): SampleParams
//   folds, split tiles        from here on regions follow each other as long as they are
//   block tiles, copies (pairs), page ids
// Page offsets in tiles are words from the beginning of the block.
#pragma once
#include <cstdint>
#include <vector>

#include "backend.h"
#include "kernels/attention.h"

namespace ls::cuda {

constexpr uint32_t kHeadRows = 64;   // rows of logits in memory at a time
constexpr uint32_t kCounts = 4;      // words before those of the head chunks

// What of a plan does not change from step to step.
struct PlanLimits {
  uint32_t tokens = 0;      // of a step
  uint32_t rows = 0;        // of a step
  uint32_t max_context = 0;
  uint32_t group = 0;       // query heads of a kv head
  uint32_t head_dim = 0;
  uint32_t vocab = 0;
  uint32_t partial_rows = 0;  // capacity of the attention's partial results
  explicit PlanLimits(const ls_config &config);
  PlanLimits() = default;
  uint32_t head_chunks() const { return (rows + kHeadRows - 1) / kHeadRows; }
  size_t capacity_words() const;
};

// Where the regions are, in words.
struct StepShape {
  uint32_t words = 0;            // to copy
  uint32_t tokens = 0, sampled = 0;  // T and S, padding included
  uint32_t real_sampled = 0;
  uint32_t at_tokens = 0, at_positions = 0, at_places = 0, at_sampled = 0, at_params = 0, at_folds = 0, at_split = 0, at_block = 0, at_copies = 0;
  uint32_t grid_split = 0, grid_folds = 0, grid_block = 0;  // tiles, or bounds of them in a graph
  uint32_t copies = 0;
  bool graph = false;            // a decode step of `tokens` rows
};

// The regions of a step with T tokens and S sampled rows that have a place of their own whatever the step is.
StepShape fixed_regions(const PlanLimits &limits, uint32_t tokens, uint32_t sampled);
// Blocks of a captured launch: tiles and folds of a decode step come in any number.
void graph_grids(const PlanLimits &limits, StepShape &shape);

class StepPacker {
 public:
  explicit StepPacker(const PlanLimits &limits) : limits_(limits) {}
  // buckets: rising sizes of decode steps for which there are graphs. words: capacity_words(). LS_INTERNAL when the batch breaks its limits.
  Status pack(const StepBatch &batch, const std::vector<uint32_t> &buckets, int32_t *words, StepShape &out);

 private:
  PlanLimits limits_;
  std::vector<AttentionRow> rows_;
  AttentionPlan plan_;
};

}  // namespace ls::cuda
