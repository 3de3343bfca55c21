#include "prefix_cache.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace ls {
namespace {

constexpr uint32_t kMaxScan = 64;  // children looked at for a common head

// Multiply and fold: both halves of the 128-bit product, so that high input bits reach the low bits that pick a bucket.
uint64_t mix(uint64_t h, uint64_t value) {
  __extension__ using u128 = unsigned __int128;
  const u128 product = static_cast<u128>(h ^ value) * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

PrefixCache::PrefixCache(PagePool &pool, uint64_t hash_seed, uint64_t hash_mask)
    : pool_(pool), events_(pool.total()), nodes_(pool.total()), buckets_(std::bit_ceil(size_t{pool.total()} + 1), kNone), seed_(hash_seed), mask_(hash_mask) {
  path_.reserve(pool.total());
}

uint64_t PrefixCache::hash(uint64_t domain, int32_t parent, const int32_t *tokens) const {
  uint64_t h = mix(mix(seed_, domain), static_cast<uint32_t>(parent));
  for (int i = 0; i < LS_PAGE_TOKENS; i += 2)
    h = mix(h, static_cast<uint32_t>(tokens[i]) | static_cast<uint64_t>(static_cast<uint32_t>(tokens[i + 1])) << 32);
  return h & mask_;
}

int32_t PrefixCache::find(uint64_t domain, int32_t parent, const int32_t *tokens) const {
  const uint64_t h = hash(domain, parent, tokens);
  for (int32_t page = buckets_[h & (buckets_.size() - 1)]; page != kNone; page = node(page).chain) {
    const Node &n = node(page);
    if (n.hash == h && n.parent == parent && n.domain == domain && std::memcmp(n.tokens.data(), tokens, sizeof n.tokens) == 0) return page;
  }
  return kNone;
}

void PrefixCache::match(uint64_t domain, const int32_t *tokens, uint32_t max_pages, std::vector<int32_t> &out) const {
  int32_t parent = kNone;
  for (uint32_t i = 0; i < max_pages; ++i) {
    parent = find(domain, parent, tokens + size_t{i} * LS_PAGE_TOKENS);
    if (parent == kNone) return;
    out.push_back(parent);
  }
}

int32_t PrefixCache::match_head(uint64_t domain, int32_t parent, const int32_t *tokens, uint32_t limit, uint32_t &count) const {
  int32_t best = kNone;
  count = 0;
  uint32_t seen = 0;
  for (int32_t page = first_child(parent); page != kNone && seen < kMaxScan && count < limit; page = node(page).next, ++seen) {
    const Node &n = node(page);
    if (n.domain != domain) continue;
    const uint32_t most = std::min(limit, n.count);
    uint32_t same = 0;
    while (same < most && n.tokens[same] == tokens[same]) ++same;
    if (same <= count) continue;
    best = page;
    count = same;
  }
  return best;
}

void PrefixCache::attach(std::span<const int32_t> path) {
  for (const int32_t page : path) {
    unlink_lru(page);
    pool_.hold(page);
  }
}

void PrefixCache::insert(int32_t page, uint64_t domain, int32_t parent, const int32_t *tokens, uint32_t count) {
  drop_covered_tails(domain, parent, tokens, count);
  Node &n = node(page);
  n.domain = domain;
  n.parent = parent;
  n.child = kNone;
  n.count = count;
  std::copy_n(tokens, count, n.tokens.begin());
  int32_t &first = first_child(parent);
  n.previous = kNone;
  n.next = first;
  if (first != kNone) node(first).previous = page;
  first = page;
  pool_.make_resident(page);
  if (count < LS_PAGE_TOKENS) return;
  n.hash = hash(domain, parent, tokens);
  int32_t &bucket = buckets_[n.hash & (buckets_.size() - 1)];
  n.chain = bucket;
  bucket = page;
  events_.stored(page);
}

// The rest of a sequence, `count` < 16 tokens: kept unless a sibling has them already.
void PrefixCache::keep_tail(int32_t page, uint64_t domain, int32_t parent, const int32_t *tokens, uint32_t count) {
  // The commit ends inside a page that was attached: it stays what it is, whatever siblings begin alike.
  if (pool_.resident(page)) return;
  uint32_t same;
  int32_t kept = match_head(domain, parent, tokens, count, same);
  if (same < count) {
    if (pool_.holders(page) > 1) return;  // attached before a clear, and still shared
    insert(page, domain, parent, tokens, count);
    kept = page;
  }
  path_.push_back(kept);
}

// Tails that the newcomer begins with. They have no holder: whoever copies one takes no hold.
void PrefixCache::drop_covered_tails(uint64_t domain, int32_t parent, const int32_t *tokens, uint32_t count) {
  uint32_t seen = 0;
  for (int32_t page = first_child(parent), next; page != kNone && seen < kMaxScan; page = next, ++seen) {
    const Node &n = node(page);
    next = n.next;
    if (n.count < LS_PAGE_TOKENS && n.count <= count && n.domain == domain && std::equal(tokens, tokens + n.count, n.tokens.begin())) remove(page);
  }
}

void PrefixCache::release(uint64_t domain, const int32_t *tokens, std::span<const int32_t> table, uint32_t commit) {
  const uint32_t commit_pages = commit / LS_PAGE_TOKENS;
  // path_[i]: the resident page with the content of table[i]; the same page, or an older one that makes table[i] a duplicate.
  path_.clear();
  int32_t parent = kNone;
  for (uint32_t i = 0; i < commit_pages; ++i) {
    const int32_t *page_tokens = tokens + size_t{i} * LS_PAGE_TOKENS;
    int32_t page = find(domain, parent, page_tokens);
    if (page == kNone) {
      page = table[i];
      // After a clear, others may still hold this page over another copy of its prefix. Under `parent`, which they do not hold, it
      // would break I1, so the path ends here; they bring it back when they finish.
      const bool own_prefix = parent == (i == 0 ? kNone : table[i - 1]);
      if (pool_.holders(page) > 1 && !own_prefix) break;
      insert(page, domain, parent, page_tokens, LS_PAGE_TOKENS);
    }
    path_.push_back(page);
    parent = page;
  }
  if (const uint32_t rest = commit % LS_PAGE_TOKENS; rest > 0 && path_.size() == commit_pages)
    keep_tail(table[commit_pages], domain, parent, tokens + size_t{commit_pages} * LS_PAGE_TOKENS, rest);
  // Deepest first keeps children before parents in the LRU list (I2).
  for (size_t i = table.size(); i-- > 0;) {
    pool_.drop(table[i]);
    const int32_t touched = i < path_.size() ? path_[i] : table[i];
    if (pool_.resident(touched) && pool_.holders(touched) == 0) make_newest(touched);
  }
}

void PrefixCache::evict() {
  remove(oldest_);
  ++evictions_;
}

// Takes a leaf out of the tree.
void PrefixCache::remove(int32_t page) {
  const Node &n = node(page);
  unlink_lru(page);
  if (n.previous != kNone) node(n.previous).next = n.next;
  else first_child(n.parent) = n.next;
  if (n.next != kNone) node(n.next).previous = n.previous;
  if (n.count == LS_PAGE_TOKENS) {
    int32_t *link = &buckets_[n.hash & (buckets_.size() - 1)];
    while (*link != page) link = &node(*link).chain;
    *link = n.chain;
    events_.removed(page);
  }
  pool_.end_residence(page);
}

void PrefixCache::clear() {
  for (uint32_t i = 0; i < pool_.total(); ++i) {
    const int32_t page = static_cast<int32_t>(i);
    if (!pool_.resident(page)) continue;
    unlink_lru(page);
    pool_.end_residence(page);
  }
  std::fill(buckets_.begin(), buckets_.end(), kNone);
  root_ = kNone;
  events_.cleared();
}

void PrefixCache::unlink_lru(int32_t page) {
  Node &n = node(page);
  if (!n.listed) return;
  if (n.older != kNone) node(n.older).newer = n.newer;
  else oldest_ = n.newer;
  if (n.newer != kNone) node(n.newer).older = n.older;
  else newest_ = n.older;
  n.listed = false;
}

void PrefixCache::make_newest(int32_t page) {
  unlink_lru(page);
  Node &n = node(page);
  n.older = newest_;
  n.newer = kNone;
  n.listed = true;
  if (newest_ != kNone) node(newest_).newer = page;
  else oldest_ = page;
  newest_ = page;
}

uint32_t PrefixCache::next_event_words() const {
  if (events_.empty()) return 0;
  switch (events_.front().kind) {
    case LS_EVENT_STORED: return 5 + LS_PAGE_TOKENS;
    case LS_EVENT_REMOVED: return 2;
    default: return 1;
  }
}

uint32_t PrefixCache::take_event(int32_t *words) {
  const uint32_t count = next_event_words();
  const EventLog::Event event = events_.front();
  events_.pop();
  words[0] = event.kind;
  if (event.kind != LS_EVENT_CLEARED) words[1] = event.page;
  if (event.kind == LS_EVENT_STORED) {
    // Still what was stored: a removal would have taken the event out of the log.
    const Node &n = node(event.page);
    words[2] = n.parent;
    words[3] = static_cast<int32_t>(static_cast<uint32_t>(n.domain));
    words[4] = static_cast<int32_t>(static_cast<uint32_t>(n.domain >> 32));
    std::copy(n.tokens.begin(), n.tokens.end(), words + 5);
  }
  return count;
}

}  // namespace ls
