// The actions of a random trace, each done to the engine and to the plain model.
#pragma once
#include <deque>
#include <random>
#include <set>

#include "kv_support.h"
#include "trace_model.h"

namespace ls::test {

struct Coverage {
  uint32_t opens = 0, hits = 0, heads = 0, steps = 0, carries = 0, closes = 0, closed_in_flight = 0, no_pages = 0, clears = 0, refused = 0, evictions = 0;
  uint32_t pulls = 0, pulled = 0, failed_pulls = 0, closed_pulls = 0, no_room = 0, staged = 0;
};

class TraceBase {
 public:
  TraceBase(uint32_t pages, uint32_t max_seqs, uint32_t seed, bool prefix_cache = true)
      : rig_({.pages = pages, .max_seqs = max_seqs, .max_context = 160, .max_batch_tokens = 96, .vocab = 50, .prefix_cache = prefix_cache}),
        model_(pages, 50), random_(seed), caching_(prefix_cache) {
    // Prompts share beginnings: 3 roots, each continued in a few ways.
    for (int i = 0; i < 3; ++i) bases_.push_back(random_tokens(48));
    for (int i = 0; i < 5; ++i) {
      Tokens t = bases_[static_cast<size_t>(i % 3)];
      t.resize(16 * (1 + static_cast<size_t>(i) % 3));
      const Tokens tail = random_tokens(64);
      t.insert(t.end(), tail.begin(), tail.end());
      bases_.push_back(t);
    }
  }

  Coverage coverage;

 protected:
  struct FlightRow {
    int32_t slot;
    uint64_t serial;
    uint32_t end;
    bool sample;
    int32_t expected;  // the token it will sample
  };
  KvRig rig_;
  std::set<int32_t> pulling_, failed_;      // slots that wait for their transfer, and those that lost it
  std::map<int32_t, uint32_t> staged_;      // slot: tokens to publish
  bool copies_pending_ = false;             // a copied head that no step has taken up may hold a pull at its gate
  Model model_;
  std::mt19937 random_;
  bool caching_;
  std::vector<Tokens> bases_;
  std::deque<std::vector<FlightRow>> in_flight_;
  Replay replay_;
  uint64_t serial_ = 0;

  uint32_t pick(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  Tokens random_tokens(uint32_t n) {
    Tokens t(n);
    for (int32_t &v : t) v = static_cast<int32_t>(pick(50));
    return t;
  }

  Tokens random_prompt() {
    Tokens prompt = bases_[pick(static_cast<uint32_t>(bases_.size()))];
    prompt.resize(1 + pick(static_cast<uint32_t>(prompt.size())));
    if (pick(2)) {
      const Tokens tail = random_tokens(pick(20));
      prompt.insert(prompt.end(), tail.begin(), tail.end());
    }
    return prompt;
  }

  void open() {
    const Tokens prompt = random_prompt();
    const uint64_t domain = pick(4) == 0 ? uint64_t{7} << 32 : 0;
    const Opened seq = rig_.open(prompt, domain);
    if (model_.open.size() == rig_.config.max_seqs) {
      CHECK_EQ(seq.code, LS_NO_SLOTS);
      return;
    }
    CHECK_EQ(seq.code, LS_OK);
    ModelSequence s;
    s.domain = domain;
    s.serial = ++serial_;
    s.prompt = static_cast<uint32_t>(prompt.size());
    s.script = prompt;
    if (caching_) s.pages = model_.match(domain, prompt);
    for (const PagePtr &p : s.pages) ++p->holders;
    s.computed = s.completed = static_cast<uint32_t>(s.pages.size()) * 16;
    CHECK_EQ(seq.cached, s.computed);
    CHECK(!model_.open.contains(seq.slot));
    ModelSequence &opened = model_.open[seq.slot] = std::move(s);
    const uint32_t head = caching_ ? model_.match_head(domain, prompt, opened.pages) : 0;
    if (head > 0 && model_.free() + model_.cached() > 0) {
      if (model_.free() == 0) model_.evict();
      model_.extend(opened, head);
      copies_pending_ = true;
      ++coverage.heads;
    }
    CHECK_EQ(seq.start, opened.computed);
    ++coverage.opens;
    coverage.hits += seq.cached > 0;
  }

  bool usable(int32_t slot) const { return !pulling_.contains(slot) && !failed_.contains(slot); }

  void submit() {
    std::vector<RowSpec> rows;
    std::vector<std::pair<int32_t, uint32_t>> grow;
    uint32_t budget = rig_.config.max_batch_tokens, pages = 0;
    std::vector<int32_t> slots;
    for (const auto &[slot, s] : model_.open) slots.push_back(slot);
    std::shuffle(slots.begin(), slots.end(), random_);
    for (const int32_t slot : slots) {
      ModelSequence &s = model_.open.at(slot);
      if (pick(4) == 0 || budget == 0 || s.computed >= rig_.config.max_context || !usable(slot)) continue;
      // Within the prompt: a chunk of any length. After it: one sampled token, as a carry or by its id.
      uint32_t len = s.computed < s.prompt ? std::min(budget, 1 + pick(s.prompt - s.computed)) : 1;
      RowSpec row{.slot = slot, .start = s.computed, .tokens = Tokens(s.script.begin() + s.computed, s.script.begin() + s.computed + len), .sample = s.computed + len >= s.prompt || pick(3) == 0};
      if (s.computed >= s.prompt && s.sampled && (!s.sample_known || pick(2))) {
        row.tokens[0] = -1;
        ++coverage.carries;
      }
      budget -= len;
      pages += Model::more_pages(s, len);
      grow.emplace_back(slot, len);
      rows.push_back(std::move(row));
    }
    if (rows.empty()) return;
    const int32_t code = rig_.submit(rows);
    if (in_flight_.size() == 2) {
      CHECK_EQ(code, LS_STATE);
      return;
    }
    if (pages > model_.free() + model_.cached()) {
      CHECK_EQ(code, LS_NO_PAGES);
      ++coverage.no_pages;
      return;
    }
    if (code != LS_OK) throw std::runtime_error(last_error());
    copies_pending_ = false;
    while (model_.free() < pages) model_.evict();
    std::vector<FlightRow> flight;
    for (size_t i = 0; i < rows.size(); ++i) {
      ModelSequence &s = model_.open.at(grow[i].first);
      model_.extend(s, grow[i].second);
      s.sampled = rows[i].sample;
      s.sample_known = false;
      flight.push_back({rows[i].slot, s.serial, s.computed, rows[i].sample, next_token(Tokens(s.script.begin(), s.script.begin() + s.computed), 50)});
    }
    in_flight_.push_back(std::move(flight));
    ++coverage.steps;
  }

  void wait() {
    const Result r = rig_.wait();
    if (in_flight_.empty()) {
      CHECK_EQ(r.code, LS_STATE);
      return;
    }
    if (r.code < 0) throw std::runtime_error(last_error());
    const std::vector<FlightRow> flight = std::move(in_flight_.front());
    in_flight_.pop_front();
    CHECK_EQ(r.rows.size(), flight.size());
    CHECK_EQ(r.free, model_.free());
    CHECK_EQ(r.cached, model_.cached());
    CHECK_EQ(r.held, model_.held());
    for (size_t i = 0; i < flight.size(); ++i) {
      CHECK_EQ(r.rows[i].slot, flight[i].slot);
      CHECK_EQ(r.rows[i].token, flight[i].sample ? flight[i].expected : -1);
      const auto found = model_.open.find(flight[i].slot);
      if (found == model_.open.end() || found->second.serial != flight[i].serial) continue;
      found->second.completed = flight[i].end;
      if (flight[i].sample && found->second.computed == flight[i].end) found->second.sample_known = true;
    }
  }

  void close() {
    if (model_.open.empty()) {
      CHECK_EQ(rig_.close(static_cast<int32_t>(pick(4))), LS_INVALID);
      return;
    }
    auto it = model_.open.begin();
    std::advance(it, pick(static_cast<uint32_t>(model_.open.size())));
    const int32_t slot = it->first;
    coverage.closed_in_flight += it->second.completed < it->second.computed;
    const uint32_t commit = pick(3) ? ~0u : pick(2) ? 0 : pick(160);
    CHECK_EQ(rig_.close(slot, commit), LS_OK);
    model_.close(slot, caching_ ? commit : 0);
    coverage.closed_pulls += static_cast<uint32_t>(pulling_.erase(slot));
    failed_.erase(slot);
    staged_.erase(slot);
    ++coverage.closes;
  }

  void clear() {
    CHECK_EQ(ls_cache_clear(rig_.engine), LS_OK);
    model_.clear();
    ++coverage.clears;
  }

  // A valid row beside a broken one: nothing may change.
  void refused() {
    if (model_.open.empty()) return;
    auto it = model_.open.begin();
    std::advance(it, pick(static_cast<uint32_t>(model_.open.size())));
    const uint32_t computed = it->second.computed;
    if (computed >= rig_.config.max_context) return;
    std::vector<RowSpec> rows = {{.slot = it->first, .start = computed, .tokens = {1}}, {.slot = it->first, .start = computed + 1, .tokens = {1}}};
    switch (pick(5)) {
      case 0: break;
      case 1: rows = {{.slot = it->first, .start = computed + 1, .tokens = {1}}}; break;
      case 2: rows = {{.slot = it->first, .start = computed, .tokens = {50}}}; break;
      case 3: rows = {{.slot = it->first, .start = computed, .tokens = {1}, .top_p = 0}}; break;
      default: rows = {{.slot = it->first, .start = computed, .tokens = Tokens(rig_.config.max_context - computed + 1, 1)}};
    }
    const int32_t code = rig_.submit(rows);
    CHECK(code == LS_INVALID || (code == LS_STATE && in_flight_.size() == 2));
    ++coverage.refused;
  }

  void drain() {
    for (const Event &e : rig_.Rig::events(pick(2) ? 21 : 1000)) replay_.apply(e);
    CHECK(replay_.prefixes() == prefixes(model_));
  }

  void compare() {
    rig_.check();
    const ls_pool_stats_t s = rig_.stats();
    CHECK_EQ(s.free, model_.free());
    CHECK_EQ(s.cached, model_.cached());
    CHECK_EQ(s.held, model_.held());
    CHECK_EQ(s.open_seqs, static_cast<uint32_t>(model_.open.size()));
    CHECK_EQ(s.evictions_lo, static_cast<uint32_t>(model_.evictions));
  }
};

}  // namespace ls::test
