// Attention over pages against its definition: head shapes, page types, contexts across partitions, chunks that begin anywhere.
#include <algorithm>

#include "attention_cases.h"

using namespace ls::cuda;
using namespace ls::cuda::cases;

namespace {

struct Chunk {
  uint32_t start, len;
};

// Weights and results are rounded to bf16: 2^-9 of values of about 1, and their errors add up like noise.
void check_step(const Shape &shape, const std::vector<Chunk> &chunks, uint64_t seed, const std::string &what, uint32_t grid = 0, uint32_t capacity = 4096) {
  std::vector<uint32_t> contexts;
  std::vector<AttentionRow> rows;
  int32_t tokens = 0;
  for (const Chunk &c : chunks) contexts.push_back(c.start + c.len);
  const Pages pages(shape, contexts, seed);
  for (size_t i = 0; i < chunks.size(); ++i) {
    rows.push_back({tokens, static_cast<int32_t>(chunks[i].start), static_cast<int32_t>(chunks[i].len), pages.offset(i)});
    tokens += static_cast<int32_t>(chunks[i].len);
  }
  const size_t width = size_t{shape.heads} * shape.head_dim;
  const std::vector<uint16_t> q = random_queries(static_cast<size_t>(tokens) * width, seed + 1), out = run_step(shape, pages, rows, q, capacity, grid).out;
  double squares = 0, worst = 0;
  size_t checked = 0;
  for (size_t i = 0; i < chunks.size(); ++i)
    for (uint32_t t = 0; t < chunks[i].len; ++t) {
      // Of long chunks a part of the tokens, the last one always.
      if (chunks[i].len > 40 && t + 1 != chunks[i].len && t % 7 != seed % 7) continue;
      for (uint32_t h = 0; h < shape.heads; ++h) {
        const size_t at = (static_cast<size_t>(rows[i].first_token) + t) * width + h * shape.head_dim;
        const std::vector<double> want = pages.reference(i, &q[at], h, chunks[i].start + t);
        for (uint32_t d = 0; d < shape.head_dim; ++d) {
          const double error = std::fabs(bf16_value(out[at + d]) - want[d]);
          if (!(error <= 8e-3 * (1 + std::fabs(want[d]))))
            check::fail(__FILE__, __LINE__, what + ": sequence " + std::to_string(i) + " token " + std::to_string(t) + " head " + std::to_string(h) + " dim " + std::to_string(d) + " is " + std::to_string(bf16_value(out[at + d])) + ", expected " + std::to_string(want[d]));
          worst = std::max(worst, error);
          squares += error * error;
          ++checked;
        }
      }
    }
  CHECK(checked > 0);
  CHECK_LE(std::sqrt(squares / static_cast<double>(checked)), 2e-3);
}

std::string name(const Shape &s) {
  const char *types[] = {"bf16", "e4m3", "e5m2"};
  return std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) + "x" + std::to_string(s.head_dim) + " " + types[static_cast<int>(s.type)];
}

}  // namespace

TEST("decoding: every head shape and page type") {
  const Shape shapes[] = {{4, 4, 64}, {9, 3, 64}, {4, 1, 128}, {7, 1, 128}, {16, 2, 64}, {2, 1, 256}, {3, 1, 80}, {5, 1, 18}, {2, 2, 2}, {20, 1, 32}, {2, 1, 192}};
  uint64_t seed = 0;
  for (Shape shape : shapes)
    for (KvType type : {KvType::bf16, KvType::e4m3, KvType::e5m2}) {
      shape.type = type;
      if (type == KvType::e4m3) shape.scales = {0.02f, 0.5f};
      const uint32_t context = 1 + static_cast<uint32_t>(seed * 37 % 90);
      check_step(shape, {{context - 1, 1}}, ++seed, name(shape) + " context " + std::to_string(context));
    }
}

TEST("decoding: contexts at the edges of pages, of warps' turns and of partitions, in one step") {
  const std::vector<Chunk> chunks = {{0, 1}, {1, 1}, {14, 1}, {15, 1}, {16, 1}, {63, 1}, {64, 1}, {127, 1}, {254, 1}, {255, 1}, {256, 1}, {511, 1}, {512, 1}, {700, 1}};
  for (KvType type : {KvType::bf16, KvType::e4m3}) check_step({3, 1, 64, type, {}}, chunks, 7, "mixed contexts");
  // Fewer blocks than tiles: a block does several.
  check_step({4, 2, 32}, chunks, 8, "few blocks", 3);
}

TEST("decoding: 3000 keys") { check_step({4, 1, 128}, {{2999, 1}, {1536, 1}}, 9, "3000 keys"); }

TEST("prefill: every head shape and page type, chunks that begin anywhere") {
  const Shape shapes[] = {{4, 4, 64}, {3, 1, 64}, {4, 1, 128}, {7, 1, 32}, {8, 1, 64}, {2, 1, 256}, {3, 1, 80}, {6, 2, 12}};
  uint64_t seed = 100;
  for (Shape shape : shapes)
    for (KvType type : {KvType::bf16, KvType::e4m3, KvType::e5m2}) {
      shape.type = type;
      if (type == KvType::e5m2) shape.scales = {0.5f, 2};
      const uint32_t len = 65 + static_cast<uint32_t>(seed * 7 % 13), start = static_cast<uint32_t>(seed * 11 % 40);
      check_step(shape, {{start, len}}, ++seed, name(shape) + " start " + std::to_string(start) + " len " + std::to_string(len));
    }
}

TEST("prefill: chunks at the edges of pages and tiles, short chunks behind a prefix, decoding beside them") {
  check_step({2, 1, 64}, {{0, 64}, {5, 1}, {16, 65}, {1, 128}, {300, 1}, {0, 129}, {250, 9}, {600, 3}, {31, 33}, {0, 1}, {90, 200}}, 200, "mixed step");
  check_step({4, 1, 64, KvType::e4m3, {0.1f, 0.25f}}, {{17, 40}, {270, 5}, {255, 1}}, 201, "mixed fp8 step");
  check_step({2, 1, 32}, {{3, 130}, {0, 70}}, 202, "few blocks", 1);
}

TEST("what else is in a step changes no bit of a sequence") {
  const Shape shape{4, 2, 64};
  const Pages pages(shape, {600, 300, 40}, 5);
  const size_t width = size_t{shape.heads} * shape.head_dim;
  const std::vector<uint16_t> q = random_queries(42 * width, 6);
  const StepResult together = run_step(shape, pages, {{0, 599, 1, pages.offset(0)}, {1, 299, 1, pages.offset(1)}, {2, 0, 40, pages.offset(2)}}, q, 4096);
  const auto part = [&](const std::vector<uint16_t> &from, size_t first, size_t n) { return std::vector<uint16_t>(from.begin() + static_cast<long>(first * width), from.begin() + static_cast<long>((first + n) * width)); };
  CHECK(run_step(shape, pages, {{0, 599, 1, pages.offset(0)}}, part(q, 0, 1), 4096).out == part(together.out, 0, 1));
  CHECK(run_step(shape, pages, {{0, 299, 1, pages.offset(1)}}, part(q, 1, 1), 4096).out == part(together.out, 1, 1));
  CHECK(run_step(shape, pages, {{0, 0, 40, pages.offset(2)}}, part(q, 2, 40), 4096).out == part(together.out, 2, 40));
}

TEST("plans cover every query and key once, and keep within the partial results") {
  std::mt19937_64 random(3);
  for (uint32_t round = 0; round < 300; ++round) {
    const uint32_t group = 1 + static_cast<uint32_t>(random() % 9), dim = random() % 2 ? 128 : 256;
    std::vector<AttentionRow> rows;
    for (uint32_t i = 0, n = 1 + static_cast<uint32_t>(random() % 6), token = 0; i < n; ++i) {
      const int32_t len = random() % 3 ? 1 : static_cast<int32_t>(random() % 400);
      rows.push_back({static_cast<int32_t>(token), static_cast<int32_t>(random() % (round % 2 ? 3000 : 200000)), len, 0});
      token += static_cast<uint32_t>(len);
    }
    const uint32_t capacity = round % 3 ? attention_partial_rows(static_cast<uint32_t>(rows.size()), 1u << 18, group) : static_cast<uint32_t>(random() % 300);
    AttentionPlan plan;
    plan_attention(rows.data(), static_cast<uint32_t>(rows.size()), group, dim, capacity, plan);
    CHECK_LE(plan.partial_rows, capacity);
    // Keys given to each packed row, in order; a tile's rows see all of [0, position] between its partitions.
    for (const AttentionRow &row : rows)
      for (uint32_t packed = 0; packed < static_cast<uint32_t>(row.len) * group; ++packed) {
        const int32_t position = row.start + static_cast<int32_t>(packed / group);
        std::vector<const AttentionTile *> mine;
        for (const auto *tiles : {&plan.split, &plan.block})
          for (const AttentionTile &t : *tiles)
            if (t.token == row.first_token && t.first <= static_cast<int32_t>(packed) && static_cast<int32_t>(packed) < t.first + t.rows) mine.push_back(&t);
        std::sort(mine.begin(), mine.end(), [](const auto *a, const auto *b) { return a->key_begin < b->key_begin; });
        CHECK(!mine.empty());
        int32_t covered = 0;
        for (const AttentionTile *t : mine) {
          CHECK_EQ(t->key_begin, covered);
          CHECK_EQ(t->key_begin % 16, 0);
          CHECK_EQ(t->start, row.start);
          CHECK_EQ(t->partial >= 0, mine.size() > 1);
          covered = t->key_end;
        }
        CHECK(covered > position);
        if (mine.size() == 1) continue;
        CHECK_LE(mine.size(), size_t{64});
        bool folded = false;
        for (const AttentionFold &f : plan.folds) {
          if (f.token != row.first_token || f.first != mine[0]->first) continue;
          folded = true;
          CHECK_EQ(static_cast<size_t>(f.parts), mine.size());
          for (size_t p = 0; p < mine.size(); ++p) CHECK_EQ(mine[p]->partial, f.partial + static_cast<int32_t>(p) * f.rows);
        }
        CHECK(folded);
      }
  }
}
