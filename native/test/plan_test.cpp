// Step plans and results: what is refused, what a refusal leaves alone, how results are packed.
#include <limits>

#include "check.h"
#include "harness.h"

using namespace ls::test;

TEST("every bad plan is refused, names its field and changes nothing") {
  Rig rig;
  rig.serve(range(500, 64));
  const Opened seq = rig.open(range(0, 20)), other = rig.open(range(600, 20));
  rig.compute(other.slot, range(600, 20), 0);
  CHECK_EQ(rig.submit({{.slot = other.slot, .start = 20, .tokens = {5}, .sample = false}}), LS_OK);
  CHECK(rig.wait().code > 0);
  const std::vector<int32_t> good = pack_plan({{.slot = seq.slot, .tokens = range(0, 20), .n_logprobs = 20}, {.slot = other.slot, .start = 21, .tokens = {6}, .sample = false}}, 1);
  const int32_t nan = std::bit_cast<int32_t>(std::numeric_limits<float>::quiet_NaN()), inf = std::bit_cast<int32_t>(std::numeric_limits<float>::infinity());
  const auto f = [](float v) { return std::bit_cast<int32_t>(v); };
  struct Case { size_t word; int32_t value; const char *names; };
  const size_t row = 8, row2 = 16, ids = 24;
  const Case cases[] = {
      {0, 0, "rows"}, {0, -1, "rows"}, {0, 5, "rows"}, {0, 1, "words"}, {0, INT32_MAX, "rows"}, {0, INT32_MIN, "rows"},
      {1, 0, "tokens"}, {1, 20, "words"}, {1, 22, "words"}, {1, -1, "tokens"}, {1, 129, "tokens"}, {1, INT32_MAX, "tokens"},
      {3, 1, "word 3"}, {7, -1, "word 7"},
      {row, -1, "slot"}, {row, 4, "slot"}, {row, 3, "not open"}, {row, other.slot, "start"}, {row2, seq.slot, "twice"}, {row, INT32_MAX, "slot"}, {row, INT32_MIN, "slot"},
      {row + 1, 1, "start"}, {row + 1, -1, "start"}, {row + 1, 16, "start"}, {row + 1, 237, "max_context"}, {row + 1, INT32_MAX, "max_context"}, {row + 1, INT32_MIN, "start"},
      {row + 2, 0, "len"}, {row + 2, -1, "len"}, {row + 2, 19, "sum"}, {row + 2, 21, "len"}, {row + 2, 22, "len"}, {row + 2, INT32_MAX, "len"}, {row + 2, INT32_MIN, "len"},
      {row + 3, 2, "flags"}, {row + 3, 0x80, "flags"}, {row + 3, 21 << 8 | 1, "n_logprobs"}, {row + 3, -1, "flags"}, {row + 3, static_cast<int32_t>(0xffffff01), "n_logprobs"},
      {row + 4, nan, "temperature"}, {row + 4, inf, "temperature"}, {row + 4, f(-0.1f), "temperature"},
      {row + 5, nan, "top_p"}, {row + 5, 0, "top_p"}, {row + 5, f(-1.0f), "top_p"}, {row + 5, f(1.001f), "top_p"}, {row + 5, inf, "top_p"},
      {row2 + 1, 20, "start"}, {row2 + 5, 0, "top_p"},
      {ids, -1, "carries"}, {ids, -2, "token 0"}, {ids, 1000, "token 0"}, {ids, INT32_MAX, "token 0"}, {ids + 1, -1, "token 1"}, {ids + 20, -1, "carries"}, {ids + 20, 1000, "token 0"},
  };
  const std::string before = rig.snapshot();
  rig.events();
  for (const Case &c : cases) {
    std::vector<int32_t> plan = good;
    plan[c.word] = c.value;
    const int32_t code = ls_step_submit(rig.engine, plan.data(), static_cast<uint32_t>(plan.size()));
    const std::string what = "word " + std::to_string(c.word) + " = " + std::to_string(c.value) + ": ";
    if (code != LS_INVALID || last_error().find(c.names) == std::string::npos) check::fail(__FILE__, __LINE__, what + std::to_string(code) + " " + last_error());
    CHECK_EQ(rig.snapshot(), before);
    rig.check();
  }
  for (uint32_t words = 0; words < good.size(); ++words) CHECK_EQ(ls_step_submit(rig.engine, good.data(), words), LS_INVALID);
  CHECK_EQ(ls_step_submit(rig.engine, nullptr, 100), LS_INVALID);
  CHECK_EQ(rig.wait().code, LS_STATE);  // none was accepted
  CHECK_EQ(rig.events().size(), size_t{0});
  CHECK_EQ(ls_step_submit(rig.engine, good.data(), static_cast<uint32_t>(good.size())), LS_OK);
  CHECK_EQ(rig.wait_token(), next_token(range(0, 20), rig.config.vocab));
}

TEST("a plan beyond the pool is refused whole; one that needs eviction evicts") {
  Rig rig({.pages = 6, .max_seqs = 3});
  rig.serve(range(100, 48));  // 3 cached
  const Opened a = rig.open(range(0, 60)), b = rig.open(range(200, 60));
  const std::string before = rig.snapshot();
  rig.events();
  CHECK_EQ(rig.submit({{.slot = a.slot, .tokens = range(0, 60)}, {.slot = b.slot, .tokens = range(200, 33)}}), LS_NO_PAGES);
  CHECK(last_error().find("7 new pages") != std::string::npos);
  CHECK_EQ(rig.snapshot(), before);
  CHECK_EQ(rig.events().size(), size_t{0});
  CHECK_EQ(rig.submit({{.slot = a.slot, .tokens = range(0, 60)}, {.slot = b.slot, .tokens = range(200, 32)}}), LS_OK);
  rig.check();
  CHECK_EQ(rig.stats().held, 6u);
  CHECK_EQ(rig.stats().evictions_lo, 3u);
  CHECK_EQ(rig.events().size(), size_t{3});
  CHECK(rig.wait().code > 0);
  CHECK_EQ(rig.submit({{.slot = b.slot, .start = 32, .tokens = {1}}}), LS_NO_PAGES);
  CHECK_EQ(rig.close(a.slot), LS_OK);
  CHECK_EQ(rig.submit({{.slot = b.slot, .start = 32, .tokens = {1}}}), LS_OK);
  rig.check();
}

TEST("results: order, logprobs and their count, capacity") {
  Rig rig;
  const Opened a = rig.open(range(0, 5)), b = rig.open(range(10, 5)), c = rig.open(range(20, 5));
  CHECK_EQ(rig.submit({{.slot = c.slot, .tokens = range(20, 5), .n_logprobs = 3, .temperature = 0.5f, .top_p = 0.25f, .seed = 0x123456789abcdef0u},
                       {.slot = a.slot, .tokens = range(0, 5), .sample = false, .n_logprobs = 5},
                       {.slot = b.slot, .tokens = range(10, 5)}}, 0xfffffff0u), LS_OK);
  CHECK_EQ(rig.wait(8 + 3 * 4 + 3 * 2 - 1).code, LS_INVALID);  // too small: the step stays
  const Result r = rig.wait(8 + 3 * 4 + 3 * 2);
  CHECK_EQ(r.code, 8 + 3 * 4 + 3 * 2);
  CHECK_EQ(r.step, 0xfffffff0u);
  CHECK_EQ(r.total, 32u);
  CHECK_EQ(r.free, 29u);
  CHECK_EQ(r.rows[0].slot, c.slot);
  CHECK_EQ(r.rows[0].token, next_token(range(20, 5), rig.config.vocab));
  CHECK_EQ(r.rows[0].logprob, -0.5f - static_cast<float>(c.slot));
  CHECK_EQ(r.rows[0].top.size(), size_t{3});
  CHECK_EQ(r.rows[0].top[2].second, -2.5f);
  CHECK_EQ(r.rows[1].slot, a.slot);
  CHECK_EQ(r.rows[1].token, -1);
  CHECK_EQ(r.rows[1].top.size(), size_t{0});
  CHECK_EQ(r.rows[2].slot, b.slot);
  CHECK_EQ(device().last_rows[0].seed, 0x123456789abcdef0u);
  CHECK_EQ(device().last_rows[0].temperature, 0.5f);
  CHECK_EQ(device().last_rows[0].top_p, 0.25f);
  CHECK_EQ(device().last_rows[1].n_logprobs, 0u);
}

TEST("order of submit and wait") {
  Rig rig;
  const Opened a = rig.open(range(0, 8));
  CHECK_EQ(rig.wait().code, LS_STATE);
  CHECK_EQ(rig.submit({{.slot = a.slot, .tokens = range(0, 2)}}), LS_OK);
  CHECK_EQ(rig.submit({{.slot = a.slot, .start = 2, .tokens = {2}}}), LS_OK);
  CHECK_EQ(rig.submit({{.slot = a.slot, .start = 3, .tokens = {3}}}), LS_STATE);
  CHECK(rig.wait().code > 0);
  CHECK_EQ(rig.submit({{.slot = a.slot, .start = 3, .tokens = {3}}}), LS_OK);
  CHECK(rig.wait().code > 0);
  CHECK_EQ(rig.wait_token(), next_token(range(0, 4), rig.config.vocab));
  CHECK_EQ(rig.wait().code, LS_STATE);
}
