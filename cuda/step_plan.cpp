#include "step_plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/sampling.h"

namespace ls::cuda {
namespace {

constexpr uint32_t kAlignWords = 16;
constexpr size_t kPartialBytes = size_t{256} << 20;  // more than this for partial results of attention makes partitions grow instead
constexpr uint32_t kSplitGrid = 1024, kFoldGrid = 256;  // blocks of a captured launch; each does several tiles where there are more

static_assert(sizeof(AttentionTile) == 32 && sizeof(AttentionFold) == 32 && sizeof(SampleParams) == 32);
constexpr uint32_t kRecordWords = 8;

constexpr uint32_t aligned(uint32_t words) { return (words + kAlignWords - 1) / kAlignWords * kAlignWords; }
constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

template <class T>
void put_records(int32_t *to, const std::vector<T> &records) {
  if (!records.empty()) std::memcpy(to, records.data(), records.size() * sizeof(T));
}

}  // namespace

PlanLimits::PlanLimits(const ls_config &c)
    : tokens(c.max_batch_tokens), rows(std::min(c.max_seqs, c.max_batch_tokens)), max_context(c.max_context), group(c.heads / c.kv_heads), head_dim(c.head_dim), vocab(c.vocab) {
  const size_t row_bytes = attention_partial_bytes(1, c.kv_heads, c.head_dim);
  partial_rows = static_cast<uint32_t>(std::min<size_t>(attention_partial_rows(rows, max_context, group), std::max<size_t>(kPartialBytes / row_bytes, 64)));
}

size_t PlanLimits::capacity_words() const {
  const size_t packed = size_t{tokens} * group;
  // A split tile has a row of partial results of its own, or it is the only one for up to 16 packed rows.
  const size_t records = partial_rows + 2 * (packed / 16 + rows) + packed / attention_block_rows(head_dim) + rows;
  return kCounts + head_chunks() + size_t{tokens} * 3 + size_t{rows} * (1 + kRecordWords) + records * kRecordWords + 2 * size_t{rows} + size_t{rows} * ceil_div(max_context, LS_PAGE_TOKENS) +
         12 * kAlignWords;
}

StepShape fixed_regions(const PlanLimits &limits, uint32_t tokens, uint32_t sampled) {
  StepShape shape;
  shape.tokens = tokens;
  shape.sampled = sampled;
  uint32_t at = aligned(kCounts + limits.head_chunks());
  const auto region = [&at](uint32_t words) { return std::exchange(at, at + aligned(words)); };
  shape.at_tokens = region(tokens);
  shape.at_positions = region(tokens);
  shape.at_places = region(tokens);
  shape.at_sampled = region(sampled);
  shape.at_params = region(sampled * kRecordWords);
  shape.at_folds = at;
  shape.words = at;
  return shape;
}

// A decode step has at most a fold for each 16 heads of a group.
void graph_grids(const PlanLimits &limits, StepShape &shape) {
  shape.graph = true;
  const uint32_t folds = shape.tokens * ceil_div(limits.group, 16), parts = std::min(64u, ceil_div(limits.max_context, 256));
  shape.at_split = shape.at_folds + aligned(folds * kRecordWords);
  shape.grid_split = std::min(folds * parts, kSplitGrid);
  shape.grid_folds = parts > 1 ? std::min(folds, kFoldGrid) : 0;
  shape.grid_block = 0;
}

Status StepPacker::pack(const StepBatch &batch, const std::vector<uint32_t> &buckets, int32_t *words, StepShape &out) {
  const uint32_t rows = static_cast<uint32_t>(batch.rows.size());
  uint32_t sampled = 0, pages = 0;
  bool decode = batch.hook == nullptr;
  for (const StepRow &row : batch.rows) {
    if (row.len == 0) return Status::fail(LS_INTERNAL, "a row of slot " + std::to_string(row.slot) + " has no tokens");
    sampled += row.sample;
    pages += row.page_count;
    decode = decode && row.len == 1 && row.sample;
  }
  if (rows > limits_.rows || batch.tokens > limits_.tokens || batch.copies.size() > limits_.rows) return Status::fail(LS_INTERNAL, "a step of " + std::to_string(rows) + " rows is beyond its limits");

  const auto bucket = decode ? std::lower_bound(buckets.begin(), buckets.end(), rows) : buckets.end();
  const bool graph = bucket != buckets.end();
  out = fixed_regions(limits_, graph ? *bucket : batch.tokens, graph ? *bucket : sampled);
  if (graph) graph_grids(limits_, out);
  out.real_sampled = sampled;
  out.copies = static_cast<uint32_t>(batch.copies.size());

  // Page tables come last, where the number of tiles is known; until then their offsets count from the first of them.
  rows_.clear();
  uint32_t token = 0, page = 0, sample = 0;
  for (uint32_t r = 0; r < rows; ++r) {
    const StepRow &row = batch.rows[r];
    rows_.push_back({static_cast<int32_t>(token), static_cast<int32_t>(row.start), static_cast<int32_t>(row.len), static_cast<int32_t>(page)});
    std::memcpy(words + out.at_tokens + token, row.tokens, size_t{row.len} * 4);
    if (row.tokens[0] < 0) words[out.at_tokens + token] = ~row.carry_row;
    for (uint32_t i = 0; i < row.len; ++i) {
      const uint32_t position = row.start + i;
      words[out.at_positions + token + i] = static_cast<int32_t>(position);
      words[out.at_places + token + i] = row.pages[position / LS_PAGE_TOKENS] * LS_PAGE_TOKENS + static_cast<int32_t>(position % LS_PAGE_TOKENS);
    }
    token += row.len;
    page += row.page_count;
    if (!row.sample) continue;
    words[out.at_sampled + sample] = static_cast<int32_t>(token - 1);
    const SampleParams params{row.temperature, row.top_p, static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32), row.start + row.len, row.n_logprobs, static_cast<int32_t>(r), 0};
    std::memcpy(words + out.at_params + sample * kRecordWords, &params, sizeof params);
    ++sample;
  }
  if (token != batch.tokens) return Status::fail(LS_INTERNAL, "the rows of a step have " + std::to_string(token) + " tokens, the step " + std::to_string(batch.tokens));
  for (; token < out.tokens; ++token) {
    words[out.at_tokens + token] = 0;
    words[out.at_positions + token] = 0;
    words[out.at_places + token] = -1;
  }
  for (; sample < out.sampled; ++sample) {
    words[out.at_sampled + sample] = -1;
    std::memset(words + out.at_params + sample * kRecordWords, 0, sizeof(SampleParams));
  }

  plan_attention(rows_.data(), rows, limits_.group, limits_.head_dim, limits_.partial_rows, plan_);
  const uint32_t splits = static_cast<uint32_t>(plan_.split.size()), folds = static_cast<uint32_t>(plan_.folds.size()), blocks = static_cast<uint32_t>(plan_.block.size());
  if (!graph) {
    out.at_split = out.at_folds + aligned(folds * kRecordWords);
    out.grid_split = splits;
    out.grid_folds = folds;
    out.grid_block = blocks;
  }
  out.at_block = out.at_split + aligned(splits * kRecordWords);
  out.at_copies = out.at_block + aligned(blocks * kRecordWords);
  const uint32_t at_pages = out.at_copies + aligned(out.copies * 2);
  out.words = at_pages + pages;
  if (out.words > limits_.capacity_words() || (graph && (blocks > 0 || out.at_folds + folds * kRecordWords > out.at_split)))
    return Status::fail(LS_INTERNAL, "a plan of " + std::to_string(out.words) + " words, " + std::to_string(folds) + " folds and " + std::to_string(blocks) + " blocks does not fit its memory");
  for (AttentionTile &tile : plan_.split) tile.page_offset += static_cast<int32_t>(at_pages);
  for (AttentionTile &tile : plan_.block) tile.page_offset += static_cast<int32_t>(at_pages);
  put_records(words + out.at_folds, plan_.folds);
  put_records(words + out.at_split, plan_.split);
  put_records(words + out.at_block, plan_.block);
  for (uint32_t i = 0; i < out.copies; ++i) {
    words[out.at_copies + 2 * i] = batch.copies[i].from;
    words[out.at_copies + 2 * i + 1] = batch.copies[i].to;
  }
  int32_t *table = words + at_pages;
  for (const StepRow &row : batch.rows) table = std::copy_n(row.pages, row.page_count, table);

  words[0] = static_cast<int32_t>(splits);
  words[1] = static_cast<int32_t>(folds);
  words[2] = static_cast<int32_t>(blocks);
  words[3] = static_cast<int32_t>(out.copies);
  for (uint32_t chunk = 0; chunk < limits_.head_chunks(); ++chunk)
    words[kCounts + chunk] = static_cast<int32_t>(std::clamp(static_cast<int64_t>(sampled) - chunk * kHeadRows, int64_t{0}, int64_t{kHeadRows}));
  return Status::good();
}

}  // namespace ls::cuda
