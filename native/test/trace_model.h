// The plain model that random traces are compared with: slow and evidently right.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "check.h"
#include "harness.h"

namespace ls::test {

// A page as the model sees it: an object, shared by those who hold it.
struct ModelPage {
  uint64_t domain = 0;
  ModelPage *parent = nullptr;
  Tokens tokens;
  uint32_t holders = 0;
  bool resident = false;
  uint64_t touched = 0;
};
using PagePtr = std::shared_ptr<ModelPage>;

struct ModelSequence {
  uint64_t domain = 0, serial = 0;
  Tokens script;  // the prompt, then what the device will sample: known in advance, since it is a hash
  uint32_t prompt = 0, computed = 0, completed = 0;
  bool sampled = false, sample_known = false;
  std::vector<PagePtr> pages;
};

// The tree as a flat list, searched from end to end.
class Model {
 public:
  Model(uint32_t pages, uint32_t vocab) : total_(pages), vocab_(vocab) {}

  std::map<int32_t, ModelSequence> open;
  std::vector<PagePtr> tree;

  PagePtr find(uint64_t domain, const ModelPage *parent, const Tokens &tokens) const {
    for (const PagePtr &p : tree)
      if (p->domain == domain && p->parent == parent && p->tokens == tokens) return p;
    return nullptr;
  }
  static Tokens page_tokens(const Tokens &all, size_t page) { return Tokens(all.begin() + static_cast<std::ptrdiff_t>(page * 16), all.begin() + static_cast<std::ptrdiff_t>(page * 16 + 16)); }

  std::vector<PagePtr> match(uint64_t domain, const Tokens &prompt) const {
    std::vector<PagePtr> path;
    for (size_t i = 0; i < (prompt.size() - 1) / 16; ++i) {
      const PagePtr p = find(domain, path.empty() ? nullptr : path.back().get(), page_tokens(prompt, i));
      if (!p) break;
      path.push_back(p);
    }
    return path;
  }

  // Leading tokens that a resident page has in common with what follows the path; at least one token stays to be computed.
  uint32_t match_head(uint64_t domain, const Tokens &prompt, const std::vector<PagePtr> &path) const {
    const size_t at = path.size() * 16, limit = std::min<size_t>(16, prompt.size() - 1 - at);
    size_t best = 0;
    for (const PagePtr &p : tree) {
      if (p->domain != domain || p->parent != (path.empty() ? nullptr : path.back().get())) continue;
      size_t same = 0;
      while (same < limit && same < p->tokens.size() && p->tokens[same] == prompt[at + same]) ++same;
      best = std::max(best, same);
    }
    return static_cast<uint32_t>(best);
  }

  uint32_t held() const {
    std::set<const ModelPage *> pages;
    for (const auto &[slot, s] : open)
      for (const PagePtr &p : s.pages) pages.insert(p.get());
    return static_cast<uint32_t>(pages.size());
  }
  uint32_t cached() const {
    return static_cast<uint32_t>(std::count_if(tree.begin(), tree.end(), [](const PagePtr &p) { return p->holders == 0; }));
  }
  uint32_t free() const { return total_ - held() - cached(); }

  void evict() {
    PagePtr victim;
    for (const PagePtr &p : tree) {
      const bool leaf = std::none_of(tree.begin(), tree.end(), [&](const PagePtr &q) { return q->parent == p.get(); });
      if (p->holders == 0 && leaf && (!victim || p->touched < victim->touched)) victim = p;
    }
    CHECK(victim != nullptr);
    victim->resident = false;
    std::erase(tree, victim);
    ++evictions;
  }

  // Pages for tokens [0, computed + len) of a sequence.
  static uint32_t more_pages(const ModelSequence &s, uint32_t len) { return (s.computed + len + 15) / 16 - static_cast<uint32_t>(s.pages.size()); }
  void extend(ModelSequence &s, uint32_t len) {
    for (uint32_t n = more_pages(s, len); n > 0; --n) {
      auto page = std::make_shared<ModelPage>();
      page->holders = 1;
      s.pages.push_back(page);
    }
    s.computed += len;
    while (s.script.size() <= s.computed) s.script.push_back(next_token(s.script, vocab_));
  }

  void close(int32_t slot, uint32_t commit) {
    ModelSequence s = std::move(open.at(slot));
    open.erase(slot);
    std::vector<PagePtr> path;
    for (size_t i = 0; i < std::min(commit, s.completed) / 16; ++i) {
      ModelPage *parent = path.empty() ? nullptr : path.back().get();
      PagePtr p = find(s.domain, parent, page_tokens(s.script, i));
      if (!p) {
        p = s.pages[i];
        if (p->holders > 1 && parent != (i == 0 ? nullptr : s.pages[i - 1].get())) break;
        insert(p, s.domain, parent, page_tokens(s.script, i));
      }
      path.push_back(p);
    }
    const uint32_t kept = std::min(commit, s.completed);
    if (kept % 16 && path.size() == kept / 16) keep_tail(s, kept, path);
    for (size_t i = s.pages.size(); i-- > 0;) {
      --s.pages[i]->holders;
      (i < path.size() ? path[i] : s.pages[i])->touched = ++clock_;
    }
  }

  void insert(const PagePtr &p, uint64_t domain, ModelPage *parent, const Tokens &tokens) {
    std::erase_if(tree, [&](const PagePtr &q) {
      const bool covered = q->tokens.size() < 16 && q->domain == domain && q->parent == parent && q->tokens.size() <= tokens.size() && std::equal(q->tokens.begin(), q->tokens.end(), tokens.begin());
      if (covered) q->resident = false;
      return covered;
    });
    *p = {domain, parent, tokens, p->holders, true, 0};
    tree.push_back(p);
  }

  void keep_tail(const ModelSequence &s, uint32_t kept, std::vector<PagePtr> &path) {
    ModelPage *parent = path.empty() ? nullptr : path.back().get();
    const PagePtr &page = s.pages[kept / 16];
    if (page->resident) return;
    const Tokens tokens(s.script.begin() + kept / 16 * 16, s.script.begin() + kept);
    // Of several, the one that came last is touched.
    const auto same = std::find_if(tree.rbegin(), tree.rend(), [&](const PagePtr &p) {
      return p->domain == s.domain && p->parent == parent && p->tokens.size() >= tokens.size() && std::equal(tokens.begin(), tokens.end(), p->tokens.begin());
    });
    if (same != tree.rend()) return path.push_back(*same);
    if (page->holders > 1) return;
    insert(page, s.domain, parent, tokens);
    path.push_back(page);
  }

  void clear() {
    for (const PagePtr &p : tree) p->resident = false;
    tree.clear();
  }

  uint64_t evictions = 0;

 private:
  uint32_t total_, vocab_;
  uint64_t clock_ = 0;
};

// What somebody who only reads events knows.
class Replay {
 public:
  struct Stored {
    int32_t parent;
    uint64_t domain;
    Tokens tokens;
  };
  std::map<int32_t, Stored> pages;

  void apply(const Event &e) {
    switch (e.kind) {
      case LS_EVENT_CLEARED: pages.clear(); return;
      case LS_EVENT_REMOVED:
        CHECK(pages.contains(e.page));
        for (const auto &[page, stored] : pages) CHECK(stored.parent != e.page);
        pages.erase(e.page);
        return;
      default:
        CHECK_EQ(e.kind, static_cast<int32_t>(LS_EVENT_STORED));
        CHECK(!pages.contains(e.page));
        CHECK(e.parent == -1 || pages.contains(e.parent));
        pages[e.page] = {e.parent, e.domain, e.tokens};
    }
  }
  // (domain, whole prefix) of every page.
  std::set<std::pair<uint64_t, Tokens>> prefixes() const {
    std::set<std::pair<uint64_t, Tokens>> all;
    for (const auto &[page, stored] : pages) {
      Tokens prefix = stored.tokens;
      for (int32_t up = stored.parent; up != -1; up = pages.at(up).parent) prefix.insert(prefix.begin(), pages.at(up).tokens.begin(), pages.at(up).tokens.end());
      CHECK(all.emplace(stored.domain, prefix).second);  // one page per content
    }
    return all;
  }
};

inline std::set<std::pair<uint64_t, Tokens>> prefixes(const Model &model) {
  std::set<std::pair<uint64_t, Tokens>> all;
  for (const PagePtr &p : model.tree) {
    if (p->tokens.size() < 16) continue;  // tails are not told
    Tokens prefix = p->tokens;
    for (const ModelPage *up = p->parent; up; up = up->parent) {
      CHECK(up->resident);
      prefix.insert(prefix.begin(), up->tokens.begin(), up->tokens.end());
    }
    CHECK(all.emplace(p->domain, prefix).second);
  }
  return all;
}

}  // namespace ls::test
