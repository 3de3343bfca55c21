// Random traces against a plain model: open, extend (chunks, carries, two steps in flight), close, abort, evict, clear, drain, refused
// plans, and sequences that are staged for another engine or pulled from one. After every action: ls_pool_check, page counts, cached tokens
// and (through the fake device) every sampled token must agree with the model; replaying the events must give the model's tree.
#include "trace.h"

using namespace ls::test;

namespace {

class Trace : public TraceBase {
 public:
  using TraceBase::TraceBase;

  void run(uint32_t actions) {
    for (uint32_t i = 0; i < actions; ++i) {
      const uint32_t dice = pick(100);
      std::string action;
      try {
        if (dice < 4) action = "pull", pull();
        else if (dice < 6) action = "settle", settle();
        else if (dice < 8) action = "stage", stage();
        else if (dice < 22) action = "open", open();
        else if (dice < 50) action = "submit", submit();
        else if (dice < 75) action = "wait", wait();
        else if (dice < 90) action = "close", close();
        else if (dice < 92) action = "clear", clear();
        else if (dice < 96) action = "refused", refused();
        else action = "drain", drain();
        compare();
      } catch (const std::exception &e) {
        throw std::runtime_error("action " + std::to_string(i) + " (" + action + "): " + e.what());
      }
    }
    while (!in_flight_.empty()) wait();
    publish();
    while (!model_.open.empty()) close();
    wait_until("no copy is left", [&] { return rig_.kv_stats().staged == 0 && from_.kv_stats().staged == 0; });
    CHECK_EQ(rig_.kv_stats().filling, 0u);
    wait_until("no pull is left", [&] { return rig_.kv_stats().pulls == 0; });
    compare();
    drain();
    CHECK_EQ(rig_.stats().held, 0u);
    coverage.evictions = static_cast<uint32_t>(model_.evictions);
  }

 private:
  // Who stages for the engine under test, and who pulls from it.
  KvRig from_{{.pages = 40, .max_context = 160, .max_batch_tokens = 160, .vocab = 50}}, to_{{.pages = 40, .max_context = 160, .max_batch_tokens = 160, .vocab = 50}};

  // As open, with the rest from another engine; one in five with an id that is wrong.
  void pull() {
    const Tokens prompt = random_prompt();
    const uint32_t known = static_cast<uint32_t>(prompt.size()) - 1;
    const uint64_t id = from_.prefill(prompt, ~0u);
    const bool wrong = pick(5) == 0;
    const PullOpened seq = rig_.open_pull(from_, wrong ? id ^ 1 : id, prompt);
    const auto release = [&] { ls_kv_release(from_.engine, static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32)); };
    if (seq.code != LS_OK || wrong) release();
    if (model_.open.size() == rig_.config.max_seqs) {
      CHECK_EQ(seq.code, LS_NO_SLOTS);
      return;
    }
    ModelSequence s;
    s.prompt = known + 1;
    s.script = prompt;
    if (caching_) s.pages = model_.match(0, prompt);
    s.computed = s.completed = static_cast<uint32_t>(s.pages.size()) * 16;
    const uint32_t head = caching_ ? model_.match_head(0, prompt, s.pages) : 0, missing = (known + 15) / 16 - static_cast<uint32_t>(s.pages.size());
    const auto idle = static_cast<uint32_t>(std::count_if(s.pages.begin(), s.pages.end(), [](const PagePtr &p) { return p->holders == 0; }));
    if (missing > model_.free() + model_.cached() - idle) {
      CHECK_EQ(seq.code, LS_NO_PAGES);
      ++coverage.no_room;
      return;
    }
    if (seq.code != LS_OK) throw std::runtime_error(last_error());
    s.serial = ++serial_;
    for (const PagePtr &p : s.pages) ++p->holders;
    CHECK_EQ(seq.cached, s.computed);
    CHECK_EQ(seq.start, known);
    ModelSequence &opened = model_.open[seq.slot] = std::move(s);
    const uint32_t rest = known - opened.computed;
    CHECK_EQ(seq.pages, rest == head ? 0 : missing);
    if (rest == head) release();
    else pulling_.insert(seq.slot), ++coverage.pulls;
    copies_pending_ |= rest == head && rest > 0;
    while (model_.free() < missing) model_.evict();
    model_.extend(opened, rest);
  }

  // With no step and no copy pending, every pull ends.
  void settle() {
    if (copies_pending_) return;
    while (!in_flight_.empty()) wait();
    while (!pulling_.empty()) {
      const KvEvent e = rig_.event();
      if (e.slot < 0) continue;
      CHECK(pulling_.erase(e.slot) == 1);
      ModelSequence &s = model_.open.at(e.slot);
      if (e.reason == LS_KV_DONE) s.completed = s.computed, ++coverage.pulled;
      else CHECK_EQ(e.reason, static_cast<int32_t>(LS_KV_UNKNOWN));
      if (e.reason != LS_KV_DONE) failed_.insert(e.slot), ++coverage.failed_pulls;
    }
  }

  // Begins to stage some sequence; what was computed of earlier ones is published.
  void stage() {
    publish();
    if (model_.open.empty()) return;
    auto it = model_.open.begin();
    std::advance(it, pick(static_cast<uint32_t>(model_.open.size())));
    const bool possible = usable(it->first) && !staged_.contains(it->first);
    const uint32_t tokens = pick(it->second.prompt + 1);
    CHECK_EQ(ls_kv_stage(rig_.engine, it->first, tokens), possible ? LS_OK : LS_STATE);
    if (possible) staged_[it->first] = tokens;
  }

  // What another engine pulls is what was computed here.
  void publish() {
    std::erase_if(staged_, [&](const auto &entry) {
      const auto [slot, tokens] = entry;
      const ModelSequence &s = model_.open.at(slot);
      if (!in_flight_.empty() || s.completed < tokens || s.script.size() <= tokens || tokens >= to_.config.max_context) return false;
      uint32_t out[2];
      if (ls_kv_publish(rig_.engine, slot, out) != LS_OK) throw std::runtime_error(last_error());
      const uint64_t id = out[0] | static_cast<uint64_t>(out[1]) << 32;
      const Tokens prompt(s.script.begin(), s.script.begin() + tokens + 1);
      const PullOpened pull = to_.open_pull(rig_, id, prompt);
      CHECK_EQ(pull.code, LS_OK);
      if (pull.pages > 0) CHECK_EQ(to_.event().reason, LS_KV_DONE);
      else CHECK_EQ(ls_kv_release(rig_.engine, out[0], out[1]), LS_OK);
      to_.expect_decode(pull.slot, prompt);
      CHECK_EQ(to_.close(pull.slot, 0), LS_OK);
      ++coverage.staged;
      return true;
    });
  }
};

// `seeds` traces; the sum of what happened.
Coverage traces(uint32_t pages, uint32_t max_seqs, uint32_t first_seed, uint32_t seeds, uint32_t actions, bool prefix_cache = true) {
  Coverage all;
  for (uint32_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    Trace trace(pages, max_seqs, seed, prefix_cache);
    try {
      trace.run(actions);
    } catch (const std::exception &e) {
      throw std::runtime_error("seed " + std::to_string(seed) + ", " + e.what());
    }
    for (uint32_t Coverage::*n : {&Coverage::opens, &Coverage::hits, &Coverage::heads, &Coverage::steps, &Coverage::carries, &Coverage::closes, &Coverage::closed_in_flight,
                                  &Coverage::no_pages, &Coverage::clears, &Coverage::refused, &Coverage::evictions, &Coverage::pulls, &Coverage::pulled, &Coverage::failed_pulls, &Coverage::closed_pulls,
                                  &Coverage::no_room, &Coverage::staged})
      all.*n += trace.coverage.*n;
  }
  return all;
}

// Every kind of action must really have happened, often.
void busy(const Coverage &c) {
  std::printf("# pulls %u: %u done, %u failed, %u closed before their end; %u without room; %u staged\n", c.pulls, c.pulled, c.failed_pulls, c.closed_pulls, c.no_room, c.staged);
  CHECK(c.opens > 300 && c.steps > 300 && c.closes > 300 && c.carries > 50 && c.closed_in_flight > 50 && c.clears > 50 && c.refused > 50);
  CHECK(c.pulls > 20 && c.pulled > 5 && c.failed_pulls > 2 && c.closed_pulls > 10 && c.staged > 8);
}

}  // namespace

TEST("trace: a tight pool, few slots") {
  const Coverage all = traces(9, 3, 1, 4, 4000);
  busy(all);
  CHECK(all.hits > 50 && all.heads > 50 && all.no_pages > 100 && all.evictions > 200);
}

TEST("trace: a middling pool, more slots") {
  const Coverage all = traces(24, 6, 11, 4, 4000);
  busy(all);
  CHECK(all.hits > 100 && all.no_pages > 20 && all.evictions > 150);
}

TEST("trace: a large pool, little is evicted") {
  const Coverage all = traces(200, 8, 21, 2, 3000);
  busy(all);
  CHECK(all.hits > 100);
}

TEST("trace: one page only") {
  const Coverage all = traces(1, 2, 31, 2, 2000);
  CHECK(all.no_pages > 100 && all.steps > 20 && all.closes > 100);
}

TEST("trace: without the prefix cache") {
  const Coverage all = traces(16, 4, 41, 1, 3000, false);
  CHECK(all.steps > 100);
  CHECK_EQ(all.hits, 0u);
  CHECK_EQ(all.evictions, 0u);
}
