// The invariants of the prefix cache, walked in full.
#include <bit>

#include "prefix_cache.h"

namespace ls {
namespace {
std::string page_text(int32_t page) { return "page " + std::to_string(page); }
}  // namespace

std::string PrefixCache::check() const {
  if (std::string text = check_tree(); !text.empty()) return text;
  if (std::string text = check_lru(); !text.empty()) return text;
  return events_.check();
}

std::string PrefixCache::check_tree() const {
  const uint32_t total = pool_.total();
  uint32_t residents = 0, full = 0, chained = 0, siblings = 0;
  for (uint32_t i = 0; i < total; ++i) {
    const int32_t page = static_cast<int32_t>(i);
    if (!pool_.resident(page)) {
      if (events_.stored_pending(page)) return page_text(page) + " left the tree with its STORED event pending";
      continue;
    }
    ++residents;
    const Node &n = node(page);
    if (n.count < 1 || n.count > LS_PAGE_TOKENS) return page_text(page) + " has " + std::to_string(n.count) + " tokens";
    const bool tail = n.count < LS_PAGE_TOKENS;
    full += !tail;
    if (tail && n.child != kNone) return page_text(page) + " is a tail and has children";
    if (tail && pool_.holders(page) > 0) return page_text(page) + " is a tail and is held";
    if (tail && events_.stored_pending(page)) return page_text(page) + " is a tail and has a STORED event pending";
    if (!tail && find(n.domain, n.parent, n.tokens.data()) != page) return page_text(page) + " is not found under its own key";
    if (n.parent == kNone) continue;
    if (n.parent < 0 || static_cast<uint32_t>(n.parent) >= total || !pool_.resident(n.parent))
      return page_text(page) + " has parent " + std::to_string(n.parent) + ", which is not in the tree";
    if (node(n.parent).domain != n.domain) return page_text(page) + " is in another domain than its parent";
    if (pool_.holders(page) > 0 && pool_.holders(n.parent) == 0) return page_text(page) + " is held, its parent " + std::to_string(n.parent) + " is not";
  }
  const auto walk_siblings = [&](int32_t parent) -> std::string {
    int32_t previous = kNone;
    for (int32_t page = first_child(parent); page != kNone; previous = page, page = node(page).next)
      if (++siblings > residents || !pool_.resident(page) || node(page).parent != parent || node(page).previous != previous) return "children of page " + std::to_string(parent) + ": broken link at page " + std::to_string(page);
    return {};
  };
  if (std::string text = walk_siblings(kNone); !text.empty()) return text;
  for (uint32_t i = 0; i < total; ++i)
    if (pool_.resident(static_cast<int32_t>(i)))
      if (std::string text = walk_siblings(static_cast<int32_t>(i)); !text.empty()) return text;
  if (siblings != residents) return "lists of children hold " + std::to_string(siblings) + " pages, the tree " + std::to_string(residents);
  for (const int32_t bucket : buckets_)
    for (int32_t page = bucket; page != kNone; page = node(page).chain)
      if (++chained > full) return "hash chains hold more pages than the tree";
  if (chained != full) return "hash chains hold " + std::to_string(chained) + " pages, the tree " + std::to_string(full) + " full ones";
  // Each page reaches a root: walk up until a page already known to.
  std::vector<uint8_t> rooted(total, 0);
  std::vector<int32_t> walk;
  for (uint32_t i = 0; i < total; ++i) {
    if (!pool_.resident(static_cast<int32_t>(i))) continue;
    walk.clear();
    for (int32_t page = static_cast<int32_t>(i); page != kNone && !rooted[static_cast<size_t>(page)]; page = node(page).parent) {
      walk.push_back(page);
      if (walk.size() > residents) return page_text(static_cast<int32_t>(i)) + " is on a cycle of parents";
    }
    for (const int32_t page : walk) rooted[static_cast<size_t>(page)] = 1;
  }
  return {};
}

std::string PrefixCache::check_lru() const {
  constexpr uint32_t kUnlisted = ~uint32_t{0};
  std::vector<uint32_t> rank(pool_.total(), kUnlisted);
  uint32_t listed = 0;
  int32_t older = kNone;
  for (int32_t page = oldest_; page != kNone; page = node(page).newer) {
    if (listed >= pool_.total() || !node(page).listed || node(page).older != older) return "LRU list: broken link at page " + std::to_string(page);
    if (!pool_.resident(page) || pool_.holders(page) > 0) return "LRU list: page " + std::to_string(page) + " is not a cached page";
    rank[static_cast<size_t>(page)] = listed++;
    older = page;
  }
  if (older != newest_) return "LRU list: the last page is not the newest";
  if (listed != pool_.cached_count()) return "LRU list has " + std::to_string(listed) + " pages, cached is " + std::to_string(pool_.cached_count());
  for (uint32_t i = 0; i < pool_.total(); ++i) {
    const Node &n = nodes_[i];
    if (n.listed != (rank[i] != kUnlisted)) return page_text(static_cast<int32_t>(i)) + " is marked as listed and is not in the LRU list";
    if (rank[i] == kUnlisted || n.parent == kNone || rank[static_cast<size_t>(n.parent)] == kUnlisted) continue;
    if (rank[i] > rank[static_cast<size_t>(n.parent)]) return page_text(static_cast<int32_t>(i)) + " would be evicted after its parent " + std::to_string(n.parent);
  }
  return {};
}

}  // namespace ls
