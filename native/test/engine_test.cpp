// Sequences and steps through the ABI, over the fake device.
#include <atomic>
#include <limits>
#include <thread>

#include "check.h"
#include "harness.h"

using namespace ls::test;

namespace {

// What a refused call must not change.
std::string snapshot(Rig &rig) {
  const ls_pool_stats_t s = rig.stats();
  std::string text;
  for (const uint32_t v : {s.total, s.free, s.cached, s.held, s.open_seqs, s.evictions_lo}) text += std::to_string(v) + " ";
  return text;
}

Tokens greedy(Tokens tokens, uint32_t count, uint32_t vocab) {
  for (uint32_t i = 0; i < count; ++i) tokens.push_back(next_token(tokens, vocab));
  return tokens;
}

}  // namespace

TEST("a prompt in chunks, then tokens one by one") {
  Rig rig;
  const Tokens prompt = range(5, 40);
  const Opened seq = rig.open(prompt);
  CHECK_EQ(seq.code, LS_OK);
  CHECK_EQ(seq.cached, 0u);
  CHECK_EQ(rig.submit({{.slot = seq.slot, .start = 0, .tokens = range(5, 17), .sample = false}}, 7), LS_OK);
  Result r = rig.wait();
  CHECK_EQ(r.step, 7u);
  CHECK_EQ(r.rows[0].token, -1);
  CHECK_EQ(r.held, 2u);
  CHECK_EQ(rig.submit({{.slot = seq.slot, .start = 17, .tokens = range(22, 23)}}), LS_OK);
  r = rig.wait();
  Tokens all = prompt;
  for (int i = 0; i < 20; ++i) {
    CHECK_EQ(r.rows[0].token, next_token(all, rig.config.vocab));
    all.push_back(r.rows[0].token);
    CHECK_EQ(rig.submit({{.slot = seq.slot, .start = static_cast<uint32_t>(all.size()) - 1, .tokens = {all.back()}}}), LS_OK);
    r = rig.wait();
    rig.check();
  }
  CHECK_EQ(r.held, 4u);
  CHECK_EQ(rig.close(seq.slot), LS_OK);
  rig.check();
  CHECK_EQ(rig.stats().cached, 3u);
  CHECK_EQ(rig.stats().held, 0u);
}

TEST("a prefix hit is capped at the last full page before the last token") {
  for (const uint32_t n : {1u, 15u, 16u, 17u, 32u, 33u, 48u}) {
    Rig rig;
    rig.serve(range(0, 48));
    const Opened seq = rig.open(range(0, n));
    CHECK_EQ(seq.cached, (n - 1) / 16 * 16);
    rig.compute(seq.slot, range(0, n), seq.cached);
    rig.check();
  }
}

TEST("commit takes full computed pages only") {
  struct Case { uint32_t computed, commit, cached; };
  for (const Case c : {Case{40, ~0u, 2}, Case{40, 32, 2}, Case{40, 31, 1}, Case{40, 15, 0}, Case{40, 0, 0}, Case{16, 16, 1}, Case{15, 100, 0}}) {
    Rig rig;
    rig.serve(range(0, c.computed), 0, c.commit);
    CHECK_EQ(rig.stats().cached, c.cached);
    CHECK_EQ(rig.stats().free, 32 - c.cached);
  }
}

TEST("with the prefix cache off nothing is kept and nothing reported") {
  Rig rig({.prefix_cache = 0});
  rig.serve(range(0, 48));
  CHECK_EQ(rig.stats().free, 32u);
  CHECK_EQ(rig.open(range(0, 48)).cached, 0u);
  CHECK_EQ(ls_cache_clear(rig.engine), LS_OK);
  CHECK_EQ(rig.events().size(), size_t{0});
}

TEST("two steps in flight: a carry resolves into tokens, pages and the prefix cache") {
  Rig rig;
  const Tokens prompt = range(0, 30);
  const Tokens all = greedy(prompt, 20, rig.config.vocab);
  const Opened seq = rig.open(prompt);
  CHECK_EQ(rig.submit({{.slot = seq.slot, .tokens = prompt}}), LS_OK);
  uint32_t at = 30;
  for (; at < 48; ++at) {
    CHECK_EQ(rig.submit({{.slot = seq.slot, .start = at, .tokens = {-1}}}), LS_OK);
    rig.check();
    CHECK_EQ(rig.wait_token(), all[at]);
    rig.check();
  }
  CHECK_EQ(rig.wait_token(), all[at]);
  CHECK_EQ(rig.close(seq.slot), LS_OK);
  const Opened again = rig.open(all);
  CHECK_EQ(again.cached, 48u);
  rig.compute(again.slot, all, 48);
}

TEST("a carry of a completed step, also after a step without this slot") {
  Rig rig;
  const Opened a = rig.open(range(0, 10)), b = rig.open(range(50, 10));
  rig.compute(a.slot, range(0, 10), 0);
  rig.compute(b.slot, range(50, 10), 0);
  CHECK_EQ(rig.submit({{.slot = a.slot, .start = 10, .tokens = {-1}}}), LS_OK);
  CHECK_EQ(rig.wait_token(), greedy(range(0, 10), 2, rig.config.vocab).back());
}

TEST("carries of several slots in another row order") {
  Rig rig;
  const Opened a = rig.open(range(0, 10)), b = rig.open(range(50, 10));
  CHECK_EQ(rig.submit({{.slot = a.slot, .tokens = range(0, 10)}, {.slot = b.slot, .tokens = range(50, 10)}}), LS_OK);
  CHECK_EQ(rig.submit({{.slot = b.slot, .start = 10, .tokens = {-1}}, {.slot = a.slot, .start = 10, .tokens = {-1}}}), LS_OK);
  CHECK(rig.wait().code > 0);
  const Result r = rig.wait();
  CHECK_EQ(r.rows[0].token, greedy(range(50, 10), 2, rig.config.vocab).back());
  CHECK_EQ(r.rows[1].token, greedy(range(0, 10), 2, rig.config.vocab).back());
}

TEST("a slot closed with a step in flight: its row still runs, unfinished pages are not cached, the next owner is safe") {
  Rig rig({.pages = 4, .max_seqs = 2});
  const Tokens a = range(0, 40), b = range(100, 40);
  const Opened one = rig.open(a);
  rig.compute(one.slot, Tokens(a.begin(), a.begin() + 31), 0);
  CHECK_EQ(rig.submit({{.slot = one.slot, .start = 31, .tokens = {a[31]}}}), LS_OK);
  CHECK_EQ(rig.submit({{.slot = one.slot, .start = 32, .tokens = {-1}}}), LS_OK);
  CHECK_EQ(rig.close(one.slot), LS_OK);
  rig.check();
  CHECK_EQ(rig.stats().cached, 1u);  // 31 tokens had completed
  const Opened two = rig.open(b);
  CHECK_EQ(two.slot, one.slot);
  CHECK_EQ(rig.wait_token(), next_token(range(0, 32), rig.config.vocab));
  CHECK_EQ(rig.submit({{.slot = two.slot, .tokens = b}}), LS_OK);  // on the freed pages
  CHECK_EQ(rig.wait_row().slot, one.slot);
  CHECK_EQ(rig.wait_token(), next_token(b, rig.config.vocab));
  rig.check();
  // What the stale rows sampled is not a carry of the new sequence, and its tokens are its own.
  CHECK_EQ(rig.submit({{.slot = two.slot, .start = 40, .tokens = {-1}}}), LS_OK);
  CHECK_EQ(rig.wait_token(), greedy(b, 2, rig.config.vocab).back());
}

TEST("a slot opened anew has no carry of its former sequence") {
  Rig rig;
  const Opened one = rig.open(range(0, 16));
  CHECK_EQ(rig.submit({{.slot = one.slot, .tokens = range(0, 16)}}), LS_OK);
  CHECK_EQ(rig.close(one.slot, 0), LS_OK);
  const Opened two = rig.open(range(0, 16));
  CHECK_EQ(two.slot, one.slot);
  CHECK_EQ(rig.submit({{.slot = two.slot, .tokens = {-1}}}), LS_INVALID);
  CHECK(rig.wait().code > 0);
  CHECK_EQ(rig.submit({{.slot = two.slot, .tokens = {-1}}}), LS_INVALID);
  rig.check();
}

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
  const std::string before = snapshot(rig);
  rig.events();
  for (const Case &c : cases) {
    std::vector<int32_t> plan = good;
    plan[c.word] = c.value;
    const int32_t code = ls_step_submit(rig.engine, plan.data(), static_cast<uint32_t>(plan.size()));
    const std::string what = "word " + std::to_string(c.word) + " = " + std::to_string(c.value) + ": ";
    if (code != LS_INVALID || last_error().find(c.names) == std::string::npos) check::fail(__FILE__, __LINE__, what + std::to_string(code) + " " + last_error());
    CHECK_EQ(snapshot(rig), before);
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
  const std::string before = snapshot(rig);
  rig.events();
  CHECK_EQ(rig.submit({{.slot = a.slot, .tokens = range(0, 60)}, {.slot = b.slot, .tokens = range(200, 33)}}), LS_NO_PAGES);
  CHECK(last_error().find("7 new pages") != std::string::npos);
  CHECK_EQ(snapshot(rig), before);
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

TEST("open: limits, slots and ids") {
  Rig rig({.max_seqs = 2});
  const std::string before = snapshot(rig);
  CHECK_EQ(rig.open({}).code, LS_INVALID);
  CHECK_EQ(rig.open(range(0, 257)).code, LS_INVALID);
  CHECK(last_error().find("257") != std::string::npos);
  CHECK_EQ(rig.open({1, -1}).code, LS_INVALID);
  CHECK_EQ(rig.open({1, 1000}).code, LS_INVALID);
  CHECK(last_error().find("1000") != std::string::npos);
  int32_t out[2];
  CHECK_EQ(ls_seq_open(rig.engine, nullptr, 4, 0, 0, out), LS_INVALID);
  CHECK_EQ(snapshot(rig), before);
  CHECK_EQ(rig.open(range(0, 256)).code, LS_OK);
  CHECK_EQ(rig.open({1}).code, LS_OK);
  CHECK_EQ(rig.open({1}).code, LS_NO_SLOTS);
  CHECK_EQ(rig.close(2), LS_INVALID);
  CHECK_EQ(rig.close(-1), LS_INVALID);
  CHECK_EQ(rig.close(1), LS_OK);
  CHECK_EQ(rig.close(1), LS_INVALID);
  CHECK_EQ(rig.stats().open_seqs, 1u);
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

TEST("a failing device: the engine refuses work, closes cleanly and caches nothing of doubtful content") {
  using Tamper = FakeDevice::Tamper;
  for (int kind = 0; kind < 6; ++kind) {
    Rig rig;
    rig.serve(range(500, 32));
    const Opened a = rig.open(range(0, 40));
    rig.compute(a.slot, range(0, 33), 0);
    CHECK_EQ(rig.submit({{.slot = a.slot, .start = 33, .tokens = {33}, .n_logprobs = 2}}), LS_OK);
    CHECK_EQ(rig.submit({{.slot = a.slot, .start = 34, .tokens = {-1}}}), LS_OK);
    if (kind == 0) device().run_status = ls::Status::fail(LS_NO_MEMORY, "injected");
    else if (kind == 1) device().run_throws = true;
    else device().tamper = std::array{Tamper::token_outside, Tamper::missing_row, Tamper::too_many_top, Tamper::top_outside}[static_cast<size_t>(kind - 2)];
    CHECK_EQ(rig.wait().code, kind == 0 ? LS_NO_MEMORY : LS_INTERNAL);
    CHECK_EQ(rig.wait().code, LS_STATE);
    CHECK_EQ(rig.submit({{.slot = a.slot, .start = 35, .tokens = {1}}}), LS_STATE);
    CHECK_EQ(rig.open({1}).code, LS_STATE);
    rig.check();
    CHECK_EQ(rig.close(a.slot), LS_OK);
    rig.check();
    CHECK_EQ(rig.stats().held, 0u);
    CHECK_EQ(rig.stats().cached, 2u);
  }
}

TEST("destroy: with sequences open, with steps submitted, at any stage of loading") {
  for (int steps = 0; steps <= 2; ++steps) {
    Rig rig;
    const Opened a = rig.open(range(0, 8));
    for (int i = 0; i < steps; ++i) CHECK_EQ(rig.submit({{.slot = a.slot, .start = static_cast<uint32_t>(i), .tokens = {i}}}), LS_OK);
    CHECK(device().alive);
  }
  CHECK(!device().alive);
  ls_engine_destroy(nullptr);
}

TEST("ls_pool_stats from other threads while steps run") {
  Rig rig({.pages = 12});
  std::atomic<bool> stop{false};
  std::atomic<uint32_t> wrong{0}, reads{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      while (!stop) {
        ls_pool_stats_t s{};
        s.struct_size = sizeof s;
        if (ls_pool_stats(rig.engine, &s) != LS_OK || s.free + s.cached + s.held != s.total || s.total != 12) ++wrong;
        if (ls_load_progress(rig.engine) != 1000) ++wrong;
        ++reads;
      }
    });
  try {
    for (int32_t i = 0; i < 300 || reads < 1000; ++i) rig.serve(range(i * 7 % 500, 70));
  } catch (...) {
    ++wrong;
  }
  stop = true;
  for (std::thread &t : threads) t.join();
  CHECK_EQ(wrong.load(), 0u);
}
