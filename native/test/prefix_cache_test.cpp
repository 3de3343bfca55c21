// Page pool, event log and prefix cache, without an engine.
#include "prefix_cache.h"

#include "check.h"
#include "harness.h"

using ls::EventLog;
using ls::PagePool;
using ls::PrefixCache;
using ls::test::range;
using ls::test::Tokens;

namespace {

// Pool and cache, and sequences as plain page lists.
struct Fixture {
  PagePool pool;
  PrefixCache cache;
  explicit Fixture(uint32_t pages, uint64_t mask = ~uint64_t{0}) : pool(pages), cache(pool, 42, mask) {}

  std::vector<int32_t> match(const Tokens &tokens, uint64_t domain = 0) {
    std::vector<int32_t> path;
    cache.match(domain, tokens.data(), static_cast<uint32_t>(tokens.size() / LS_PAGE_TOKENS), path);
    return path;
  }
  // A sequence over whole pages: what is cached is attached, the rest taken (evicting).
  std::vector<int32_t> open(const Tokens &tokens, uint64_t domain = 0) {
    std::vector<int32_t> table = match(tokens, domain);
    cache.attach(table);
    while (table.size() < tokens.size() / LS_PAGE_TOKENS) {
      if (pool.free_count() == 0) cache.evict();
      table.push_back(pool.take());
    }
    return table;
  }
  void close(const Tokens &tokens, const std::vector<int32_t> &table, uint64_t domain = 0, uint32_t commit = ~0u) {
    cache.release(domain, tokens.data(), table, std::min<uint32_t>(commit, static_cast<uint32_t>(table.size())) * LS_PAGE_TOKENS);
  }
  std::vector<int32_t> serve(const Tokens &tokens, uint64_t domain = 0) {
    const std::vector<int32_t> table = open(tokens, domain);
    close(tokens, table, domain);
    return table;
  }
  void check(const std::vector<std::vector<int32_t>> &open_tables = {}) {
    std::vector<uint32_t> holders(pool.total(), 0);
    for (const auto &table : open_tables)
      for (const int32_t page : table) ++holders[static_cast<size_t>(page)];
    CHECK_EQ(pool.check(holders), std::string());
    CHECK_EQ(cache.check(), std::string());
  }
  std::string drain() {
    std::string text;
    int32_t w[32];
    while (cache.events_pending()) {
      cache.take_event(w);
      text += w[0] == LS_EVENT_STORED ? "+" + std::to_string(w[1]) + "<" + std::to_string(w[2]) + " " : w[0] == LS_EVENT_REMOVED ? "-" + std::to_string(w[1]) + " " : "clear ";
    }
    return text;
  }
};

Tokens join(const Tokens &a, const Tokens &b) {
  Tokens all = a;
  all.insert(all.end(), b.begin(), b.end());
  return all;
}

}  // namespace

TEST("pool: states of a page and their counts") {
  PagePool pool(3);
  const int32_t a = pool.take(), b = pool.take();
  CHECK_EQ(a, 0);
  CHECK_EQ(b, 1);
  CHECK_EQ(pool.held_count(), 2u);
  pool.make_resident(a);
  pool.drop(a);
  CHECK_EQ(pool.cached_count(), 1u);
  pool.hold(a);
  pool.hold(a);
  CHECK_EQ(pool.cached_count(), 0u);
  CHECK_EQ(pool.held_count(), 2u);
  pool.end_residence(a);  // held: it stays
  CHECK_EQ(pool.free_count(), 1u);
  pool.drop(a);
  pool.drop(a);
  pool.drop(b);
  CHECK_EQ(pool.free_count(), 3u);
  CHECK_EQ(pool.check({0, 0, 0}), std::string());
}

TEST("pool: the check compares holders with block tables") {
  PagePool pool(2);
  pool.take();
  CHECK(pool.check({1, 0}).empty());
  CHECK(!pool.check({0, 0}).empty());
  CHECK(!pool.check({2, 0}).empty());
}

TEST("events: a page stored and removed before anyone looked leaves nothing") {
  EventLog log(4);
  log.stored(1);
  log.stored(2);
  log.removed(2);
  CHECK_EQ(log.front().page, 1);
  log.pop();
  CHECK(log.empty());
  log.removed(1);
  log.stored(1);  // new content under the same id
  log.removed(1);
  CHECK_EQ(static_cast<int>(log.front().kind), static_cast<int>(LS_EVENT_REMOVED));
  log.pop();
  CHECK(log.empty());
  CHECK_EQ(log.check(), std::string());
}

TEST("events: a clear voids what came before") {
  EventLog log(4);
  log.stored(1);
  log.cleared();
  log.stored(3);
  log.cleared();
  CHECK_EQ(static_cast<int>(log.front().kind), static_cast<int>(LS_EVENT_CLEARED));
  log.pop();
  CHECK(log.empty());
}

TEST("prefix: the longest resident prefix is found, page by page") {
  Fixture f(8);
  const Tokens a = range(0, 48);
  const auto table = f.serve(a);
  f.check();
  CHECK(f.match(a) == table);
  Tokens b = a;
  b[40] = 999;
  CHECK_EQ(f.match(b).size(), 2u);
  b[0] = 999;
  CHECK_EQ(f.match(b).size(), 0u);
  // The same 16 tokens after another prefix are another page.
  CHECK_EQ(f.match(join(range(16, 16), range(16, 16))).size(), 0u);
}

TEST("prefix: domains share nothing") {
  Fixture f(8);
  f.serve(range(0, 32), 1);
  CHECK_EQ(f.match(range(0, 32), 2).size(), 0u);
  CHECK_EQ(f.match(range(0, 32), uint64_t{1} << 32 | 1).size(), 0u);
  f.serve(range(0, 32), 2);
  CHECK_EQ(f.pool.cached_count(), 4u);
  CHECK_EQ(f.match(range(0, 32), 1).size(), 2u);
  f.check();
}

TEST("prefix: equal hashes never alias") {
  Fixture f(64, 0);  // every key in one bucket with one hash
  for (int32_t i = 0; i < 10; ++i) f.serve(range(i * 100, 48), static_cast<uint64_t>(i % 3));
  f.check();
  for (int32_t i = 0; i < 10; ++i) CHECK_EQ(f.match(range(i * 100, 48), static_cast<uint64_t>(i % 3)).size(), 3u);
  CHECK_EQ(f.match(range(1000, 48)).size(), 0u);
  for (int i = 0; i < 15; ++i) f.cache.evict();
  f.check();
}

TEST("prefix: a duplicate finish frees its pages and stores nothing") {
  Fixture f(8);
  const Tokens a = range(0, 48);
  const auto first = f.open(a), second = f.open(a);
  f.close(a, first);
  CHECK_EQ(f.drain(), std::string("+0<-1 +1<0 +2<1 "));
  f.close(a, second);
  CHECK_EQ(f.drain(), std::string());
  CHECK_EQ(f.pool.cached_count(), 3u);
  CHECK_EQ(f.pool.free_count(), 5u);
  CHECK(f.match(a) == first);
  f.check();
}

TEST("prefix: a duplicate prefix hangs its new tail under the page that was there") {
  Fixture f(8);
  const Tokens a = range(0, 32), b = range(0, 48);
  const auto first = f.open(a), second = f.open(b);
  f.close(a, first);
  f.drain();
  f.close(b, second);
  CHECK_EQ(f.drain(), "+" + std::to_string(second[2]) + "<" + std::to_string(first[1]) + " ");
  CHECK_EQ(f.match(b).size(), 3u);
  f.check();
}

TEST("eviction: children before parents, least recently used first") {
  Fixture f(8);
  f.serve(range(0, 48));    // pages 0 1 2
  f.serve(range(100, 48));  // pages 3 4 5
  f.serve(range(0, 48));    // refreshed
  f.drain();
  for (int i = 0; i < 6; ++i) {
    f.cache.evict();
    f.check();
  }
  CHECK_EQ(f.drain(), std::string("-5 -4 -3 -2 -1 -0 "));
}

TEST("eviction: a touched prefix outlives an older branch of itself and a younger stranger stays too") {
  Fixture f(16);
  const Tokens root = range(0, 16);
  f.serve(join(root, range(100, 16)));  // root 0, branch 1
  f.serve(range(500, 16));              // stranger 2
  const auto again = f.open(root);      // touches the root alone
  f.close(root, again, 0, 0);
  f.drain();
  f.cache.evict();
  f.cache.evict();
  f.cache.evict();
  CHECK_EQ(f.drain(), std::string("-1 -2 -0 "));
}

TEST("eviction: pages that a sequence holds stay") {
  Fixture f(4);
  const Tokens a = range(0, 32);
  f.serve(a);
  const auto held = f.open(a);
  CHECK_EQ(f.pool.cached_count(), 0u);
  const auto other = f.open(range(100, 32));
  CHECK_EQ(f.pool.free_count(), 0u);
  f.check({held, other});
  CHECK(f.match(a) == held);
}

TEST("clear: held pages leave the tree and come back when their sequence finishes") {
  Fixture f(8);
  const Tokens a = range(0, 48);
  f.serve(a);
  const Tokens b = range(0, 32);
  const auto held = f.open(b);
  f.drain();
  f.cache.clear();
  CHECK_EQ(f.drain(), std::string("clear "));
  CHECK_EQ(f.pool.cached_count(), 0u);
  CHECK_EQ(f.pool.held_count(), 2u);
  CHECK_EQ(f.match(a).size(), 0u);
  f.check({held});
  f.close(b, held);
  CHECK_EQ(f.drain(), std::string("+0<-1 +1<0 "));
  f.check();
}

TEST("clear: a page that others still hold is not hung under a prefix that they do not hold") {
  Fixture f(16);
  const Tokens a = range(0, 32);
  f.serve(a);
  const auto one = f.open(a), two = f.open(a);  // both hold pages 0 1
  f.cache.clear();
  const Tokens root = range(0, 16);
  f.serve(root);  // a fresh copy of the first page
  f.drain();
  f.close(a, one);
  f.check({two});
  CHECK_EQ(f.drain(), std::string());
  f.close(a, two);  // the last holder brings it back
  f.check();
  CHECK_EQ(f.match(a).size(), 2u);
  CHECK_EQ(f.pool.cached_count(), 2u);
}

TEST("clear: a shared prefix may come back while another sequence still holds it") {
  Fixture f(16);
  const Tokens a = range(0, 32);
  f.serve(a);
  const auto one = f.open(a), two = f.open(a);
  f.cache.clear();
  f.close(a, one);
  f.check({two});
  CHECK_EQ(f.match(a).size(), 2u);
  CHECK_EQ(f.pool.cached_count(), 0u);
  f.close(a, two);
  f.check();
  CHECK_EQ(f.pool.cached_count(), 2u);
}

TEST("a chain of 100,000 pages: match, evict, clear, check, without recursion") {
  constexpr uint32_t kPages = 100'000;
  Fixture f(kPages + 1);
  Tokens tokens(size_t{kPages} * LS_PAGE_TOKENS);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i % 977);
  f.serve(tokens);
  f.check();
  CHECK_EQ(f.match(tokens).size(), size_t{kPages});
  for (int i = 0; i < 50'000; ++i) f.cache.evict();
  f.check();
  CHECK_EQ(f.match(tokens).size(), size_t{50'000});
  CHECK_EQ(f.cache.evictions(), uint64_t{50'000});
  f.cache.clear();
  f.check();
  CHECK_EQ(f.pool.free_count(), kPages + 1);
}

TEST("tails: leaves that give their head to copies, are told to nobody and go with the longer ones") {
  Fixture f(16);
  const auto keep = [&](const Tokens &tokens) {  // a sequence that ends anywhere
    std::vector<int32_t> table = f.open(tokens);
    if (tokens.size() % LS_PAGE_TOKENS) table.push_back(f.pool.take());
    f.cache.release(0, tokens.data(), table, static_cast<uint32_t>(tokens.size()));
    f.check();
    return table;
  };
  const auto head = [&](int32_t parent, const Tokens &tokens, uint64_t domain = 0) {
    uint32_t count;
    const int32_t page = f.cache.match_head(domain, parent, tokens.data(), static_cast<uint32_t>(std::min<size_t>(tokens.size(), 16)), count);
    return std::pair(page, count);
  };
  const auto table = keep(range(0, 21));
  CHECK_EQ(f.pool.cached_count(), 2u);
  CHECK_EQ(f.drain(), "+" + std::to_string(table[0]) + "<-1 ");
  CHECK(head(table[0], range(16, 9)) == std::pair(table[1], 5u));
  CHECK(head(table[0], range(16, 3)) == std::pair(table[1], 3u));
  CHECK(head(table[0], range(17, 9)) == std::pair(-1, 0u));
  CHECK(head(table[0], range(16, 9), 1) == std::pair(-1, 0u));
  CHECK(head(-1, join(range(0, 7), range(100, 9))) == std::pair(table[0], 7u));  // the head of a full page
  keep(range(0, 18));  // has no more than the tail has
  CHECK_EQ(f.pool.cached_count(), 2u);
  const auto longer = keep(range(0, 25));
  CHECK_EQ(f.pool.cached_count(), 2u);
  CHECK(head(table[0], range(16, 16)) == std::pair(longer[1], 9u));
  keep(join(range(0, 20), range(200, 3)));  // another continuation stays beside it
  CHECK_EQ(f.pool.cached_count(), 3u);
  f.drain();
  const auto full = keep(range(0, 32));  // covers the first
  CHECK_EQ(f.drain(), "+" + std::to_string(full[1]) + "<" + std::to_string(table[0]) + " ");
  CHECK_EQ(f.pool.cached_count(), 3u);
  f.cache.evict();
  f.check();
  CHECK_EQ(f.drain(), std::string());  // the tail was the oldest leaf
  CHECK(head(table[0], join(range(16, 4), range(200, 3))) == std::pair(full[1], 4u));
  f.cache.clear();
  f.check();
  CHECK(head(-1, range(0, 16)) == std::pair(-1, 0u));
}

TEST("events stay bounded when nobody drains them") {
  Fixture f(8);
  for (int32_t i = 0; i < 1000; ++i) f.serve(range(i * 10, 48));
  size_t events = 0;
  int32_t w[32];
  while (f.cache.events_pending()) {
    f.cache.take_event(w);
    ++events;
  }
  CHECK_LE(events, size_t{17});
  f.check();
}
