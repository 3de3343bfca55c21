// Sequences and steps through the ABI, over the fake device.
#include <atomic>
#include <thread>

#include "check.h"
#include "harness.h"

using namespace ls::test;

namespace {

Tokens greedy(Tokens tokens, uint32_t count, uint32_t vocab) {
  for (uint32_t i = 0; i < count; ++i) tokens.push_back(next_token(tokens, vocab));
  return tokens;
}

int32_t greedy_last(Tokens tokens, uint32_t count, uint32_t vocab) { return greedy(std::move(tokens), count, vocab).back(); }

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
  CHECK_EQ(rig.stats().cached, 4u);  // the last one a tail
  CHECK_EQ(rig.stats().held, 0u);
}

TEST("a prefix hit is capped at the last full page before the last token") {
  for (const uint32_t n : {1u, 15u, 16u, 17u, 32u, 33u, 48u}) {
    Rig rig;
    rig.serve(range(0, 48));
    const Opened seq = rig.open(range(0, n));
    CHECK_EQ(seq.cached, (n - 1) / 16 * 16);
    CHECK_EQ(seq.start, n - 1);  // the head of a page that is known further is copied
    rig.compute(seq.slot, range(0, n), seq.start);
    rig.check();
  }
}

TEST("commit takes computed tokens only; a last page that is not full is kept and not reported") {
  struct Case { uint32_t computed, commit, cached, stored; };
  for (const Case c : {Case{40, ~0u, 3, 2}, Case{40, 32, 2, 2}, Case{40, 31, 2, 1}, Case{40, 15, 1, 0}, Case{40, 0, 0, 0}, Case{16, 16, 1, 1}, Case{15, 100, 1, 0}}) {
    Rig rig;
    rig.serve(range(0, c.computed), 0, c.commit);
    CHECK_EQ(rig.stats().cached, c.cached);
    CHECK_EQ(rig.stats().free, 32 - c.cached);
    CHECK_EQ(rig.events().size(), size_t{c.stored});
  }
}

TEST("a commit that ends inside an attached page leaves it evictable, whatever siblings begin alike") {
  Rig rig;
  Tokens sibling = range(0, 20), prompt = range(0, 32);
  const Tokens rest = range(500, 12);
  sibling.insert(sibling.end(), rest.begin(), rest.end());
  prompt.push_back(600);
  rig.serve(prompt, 0, 32);
  rig.serve(sibling);  // its second page has the first 4 tokens of the other's, and came later
  const Opened seq = rig.open(prompt);
  CHECK_EQ(seq.cached, 32u);
  CHECK_EQ(rig.close(seq.slot, 20), LS_OK);
  rig.check();
}

TEST("a prompt that continues a tail is computed from the token on which it differs") {
  Rig rig;
  Tokens a = range(0, 44);
  rig.serve(a);
  Tokens b = range(0, 40);
  b.insert(b.end(), {900, 901, 902});
  const Opened one = rig.open(b), two = rig.open(b);  // both copy; nobody shares a page that is written
  CHECK_EQ(one.cached, 32u);
  CHECK_EQ(one.start, 40u);
  CHECK_EQ(two.start, 40u);
  CHECK_EQ(rig.stats().held, 4u);
  rig.check();
  CHECK_EQ(rig.submit({{.slot = one.slot, .start = 40, .tokens = {900, 901, 902}}, {.slot = two.slot, .start = 40, .tokens = {900, 901, 902}}}), LS_OK);
  CHECK_EQ(rig.wait_token(), next_token(b, rig.config.vocab));
  CHECK_EQ(rig.close(one.slot), LS_OK);
  CHECK_EQ(rig.close(two.slot), LS_OK);
  rig.check();
  CHECK_EQ(rig.stats().cached, 4u);  // two tails under one prefix, the third a duplicate
  CHECK_EQ(rig.open(a).start, 43u);  // the first tail was not written
}

TEST("a copy waits for the next step whoever it is of, and is forgotten with its sequence") {
  Rig rig({.pages = 4, .max_seqs = 3});
  const Tokens a = range(0, 24), b = range(0, 25), c = range(500, 16);
  rig.serve(a);
  const Opened one = rig.open(b);
  CHECK_EQ(one.start, 24u);
  const Opened other = rig.open(c);
  CHECK_EQ(rig.submit({{.slot = other.slot, .tokens = c}}), LS_OK);  // carries the copy for `one`
  CHECK_EQ(rig.wait_token(), next_token(c, rig.config.vocab));
  CHECK_EQ(rig.close(other.slot, 0), LS_OK);
  const Opened gone = rig.open(b);
  CHECK_EQ(gone.start, 24u);
  CHECK_EQ(rig.close(gone.slot), LS_OK);
  rig.check();
  const Opened next = rig.open(c);
  CHECK_EQ(rig.submit({{.slot = next.slot, .tokens = c}}), LS_OK);  // on the page that the forgotten copy would have filled
  CHECK_EQ(rig.wait_token(), next_token(c, rig.config.vocab));
  CHECK_EQ(rig.submit({{.slot = next.slot, .start = 16, .tokens = {-1}}, {.slot = one.slot, .start = 24, .tokens = {24}}}), LS_OK);
  const Result r = rig.wait();
  CHECK_EQ(r.rows.at(0).token, greedy_last(c, 2, rig.config.vocab));
  CHECK_EQ(r.rows.at(1).token, next_token(b, rig.config.vocab));
}

TEST("a prompt as large as the pool may copy from the page that it evicts for it") {
  Rig rig({.pages = 3, .max_seqs = 1});
  rig.serve(range(0, 40));  // fills the pool: two full pages and a tail
  CHECK_EQ(rig.stats().free, 0u);
  const Tokens b = range(0, 48);
  const Opened seq = rig.open(b);
  CHECK_EQ(seq.cached, 32u);
  CHECK_EQ(seq.start, 40u);
  CHECK_EQ(rig.stats().held, 3u);
  rig.compute(seq.slot, b, seq.start);
  CHECK_EQ(rig.close(seq.slot), LS_OK);
  rig.check();
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
  CHECK_EQ(rig.wait_token(), greedy_last(range(0, 10), 2, rig.config.vocab));
}

TEST("carries of several slots in another row order") {
  Rig rig;
  const Opened a = rig.open(range(0, 10)), b = rig.open(range(50, 10));
  CHECK_EQ(rig.submit({{.slot = a.slot, .tokens = range(0, 10)}, {.slot = b.slot, .tokens = range(50, 10)}}), LS_OK);
  CHECK_EQ(rig.submit({{.slot = b.slot, .start = 10, .tokens = {-1}}, {.slot = a.slot, .start = 10, .tokens = {-1}}}), LS_OK);
  CHECK(rig.wait().code > 0);
  const Result r = rig.wait();
  CHECK_EQ(r.rows[0].token, greedy_last(range(50, 10), 2, rig.config.vocab));
  CHECK_EQ(r.rows[1].token, greedy_last(range(0, 10), 2, rig.config.vocab));
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
  CHECK_EQ(rig.stats().cached, 2u);  // 31 tokens had completed: a page and a tail, which the row in flight does not reach
  const Opened two = rig.open(b);
  CHECK_EQ(two.slot, one.slot);
  CHECK_EQ(rig.wait_token(), next_token(range(0, 32), rig.config.vocab));
  CHECK_EQ(rig.submit({{.slot = two.slot, .tokens = b}}), LS_OK);  // on the freed pages
  CHECK_EQ(rig.wait_row().slot, one.slot);
  CHECK_EQ(rig.wait_token(), next_token(b, rig.config.vocab));
  rig.check();
  // What the stale rows sampled is not a carry of the new sequence, and its tokens are its own.
  CHECK_EQ(rig.submit({{.slot = two.slot, .start = 40, .tokens = {-1}}}), LS_OK);
  CHECK_EQ(rig.wait_token(), greedy_last(b, 2, rig.config.vocab));
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

TEST("open: limits, slots and ids") {
  Rig rig({.max_seqs = 2});
  const std::string before = rig.snapshot();
  CHECK_EQ(rig.open({}).code, LS_INVALID);
  CHECK_EQ(rig.open(range(0, 257)).code, LS_INVALID);
  CHECK(last_error().find("257") != std::string::npos);
  CHECK_EQ(rig.open({1, -1}).code, LS_INVALID);
  CHECK_EQ(rig.open({1, 1000}).code, LS_INVALID);
  CHECK(last_error().find("1000") != std::string::npos);
  int32_t out[3];
  CHECK_EQ(ls_seq_open(rig.engine, nullptr, 4, 0, 0, out), LS_INVALID);
  CHECK_EQ(rig.snapshot(), before);
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
