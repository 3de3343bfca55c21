// Pages of finished sequences, kept for prompts that begin the same way. A tree: a page's key is (domain, parent page, its 16
// tokens), so equal tokens after different prefixes never meet. One node per resident page, stored under the page's id.
//
// The last page of a sequence is rarely full. It stays as a tail: a leaf of fewer than 16 tokens that nobody attaches and no event tells
// of, since others could not share it while they write on. But its content may be copied, as may the head of a full page, so that a
// prompt is computed from the very token on which it differs. No tail is a prefix of a sibling: the longer one makes it useless.
//
// Invariants
//  I1  Whoever holds a resident page holds its parent too. So a page without holders has no held descendant, and every cached page
//      can be evicted: cached = evictable.
//  I2  The LRU list is exactly the cached pages, and a child stands before its parent (a path is always refreshed from its deepest
//      page up). So the front of the list is a leaf: eviction takes it in O(1), children before parents, without a search.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "event_log.h"
#include "layerscale.h"
#include "page_pool.h"

namespace ls {

// Lookup is O(1) per page (hashed, tokens always compared), eviction O(1), clear O(pages of the pool). No recursion. Not thread-safe.
class PrefixCache {
 public:
  // hash_seed: secret of this process, so that a client cannot aim at one bucket. hash_mask: tests force collisions with it.
  PrefixCache(PagePool &pool, uint64_t hash_seed, uint64_t hash_mask = ~uint64_t{0});

  // Appends the pages of the longest resident prefix, at most max_pages, to out. Changes nothing (tokens: >= 16 * max_pages ids).
  void match(uint64_t domain, const int32_t *tokens, uint32_t max_pages, std::vector<int32_t> &out) const;
  // The child of `parent` (-1: the roots) that shares the most leading tokens with tokens[0, limit), limit <= 16; count: how many. -1 when
  // none shares any. Looks at the 64 children that came last, so that a parent of thousands costs no more.
  int32_t match_head(uint64_t domain, int32_t parent, const int32_t *tokens, uint32_t limit, uint32_t &count) const;
  // A sequence takes hold of a matched path.
  void attach(std::span<const int32_t> path);

  // Ends one sequence's hold on its block table. The pages of its first `commit` tokens (all computed) enter the tree; where the tree
  // already has the same content, the sequence's duplicate is dropped instead. What was touched becomes most recently used.
  void release(uint64_t domain, const int32_t *tokens, std::span<const int32_t> table, uint32_t commit);

  // Evicts the least recently used leaf; its page becomes free. Precondition: pool.cached_count() > 0.
  void evict();
  // Empties the tree. Cached pages become free; held ones do when their last holder releases them.
  void clear();

  uint64_t evictions() const { return evictions_; }
  bool events_pending() const { return !events_.empty(); }
  // Words of the next event (see ls_events_drain); 0 = none.
  uint32_t next_event_words() const;
  // Writes the next event and forgets it. Returns its words.
  uint32_t take_event(int32_t *words);

  // Empty = sound, else the first broken invariant.
  std::string check() const;

 private:
  static constexpr int32_t kNone = -1;
  struct Node {
    uint64_t domain = 0;
    uint64_t hash = 0;
    int32_t parent = kNone;
    int32_t chain = kNone;  // next page of the same hash bucket
    int32_t older = kNone, newer = kNone;
    int32_t child = kNone;                     // the one that came last
    int32_t next = kNone, previous = kNone;    // siblings, latest first
    uint32_t count = 0;   // tokens; fewer than 16 in a tail
    bool listed = false;  // in the LRU list
    std::array<int32_t, LS_PAGE_TOKENS> tokens{};
  };
  PagePool &pool_;
  EventLog events_;
  std::vector<Node> nodes_;       // by page id
  std::vector<int32_t> buckets_;  // a power of two
  std::vector<int32_t> path_;     // scratch of release()
  int32_t oldest_ = kNone, newest_ = kNone;
  int32_t root_ = kNone;  // the one that came last
  uint64_t seed_, mask_;
  uint64_t evictions_ = 0;

  Node &node(int32_t page) { return nodes_[static_cast<size_t>(page)]; }
  const Node &node(int32_t page) const { return nodes_[static_cast<size_t>(page)]; }
  uint64_t hash(uint64_t domain, int32_t parent, const int32_t *tokens) const;
  int32_t find(uint64_t domain, int32_t parent, const int32_t *tokens) const;
  int32_t &first_child(int32_t parent) { return parent == kNone ? root_ : node(parent).child; }
  int32_t first_child(int32_t parent) const { return parent == kNone ? root_ : node(parent).child; }
  void insert(int32_t page, uint64_t domain, int32_t parent, const int32_t *tokens, uint32_t count);
  void keep_tail(int32_t page, uint64_t domain, int32_t parent, const int32_t *tokens, uint32_t count);
  void drop_covered_tails(uint64_t domain, int32_t parent, const int32_t *tokens, uint32_t count);
  void remove(int32_t page);
  void unlink_lru(int32_t page);
  void make_newest(int32_t page);
  std::string check_tree() const;
  std::string check_lru() const;
};

}  // namespace ls
