// Every chunk runs exactly once and its writes are visible after run(), through sleeping and late helpers and many back-to-back regions.
#include "../thread_pool.h"

#include <sched.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "../../native/test/check.h"

using ls::cpu::ThreadPool;

namespace {

// Plain (not atomic) writes: a missing happens-before shows under ThreadSanitizer, a chunk run twice or never shows in the counts.
void regions(ThreadPool &pool, uint32_t rounds, uint32_t chunks) {
  std::vector<uint32_t> count(chunks);
  for (uint32_t round = 1; round <= rounds; ++round) {
    pool.run(chunks, [&](uint32_t c) { ++count[c]; });
    for (uint32_t c = 0; c < chunks; ++c) CHECK_EQ(count[c], round);
  }
}

}  // namespace

TEST("thread pool: every chunk exactly once, for any number of threads and chunks") {
  for (uint32_t threads : {1u, 2u, 3u, 5u}) {
    ThreadPool pool(threads);
    CHECK_EQ(pool.size(), threads);
    for (uint32_t chunks : {0u, 1u, 2u, 3u, 7u, 64u, 1000u}) regions(pool, 200, chunks);
  }
}

TEST("thread pool: regions of different size back to back, so that late helpers meet the next one") {
  ThreadPool pool(4);
  std::atomic<uint64_t> sum{0};
  uint64_t expected = 0;
  for (uint32_t round = 0; round < 20000; ++round) {
    const uint32_t chunks = 2 + round % 5;
    std::vector<uint64_t> local(chunks);  // dies with the region: a helper that came too late would write into freed memory
    pool.run(chunks, [&](uint32_t c) { local[c] = uint64_t{round} * 8 + c; });
    for (uint32_t c = 0; c < chunks; ++c) sum += local[c], expected += uint64_t{round} * 8 + c;
  }
  CHECK_EQ(sum.load(), expected);
}

TEST("thread pool: helpers that went to sleep are woken") {
  ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    // Longer than the helpers spin: they are asleep, or fall asleep while the region opens. Nothing here depends on which.
    std::this_thread::sleep_for(std::chrono::microseconds(30 * round));
    // Three chunks that each wait for the others: only three threads running at once can finish it.
    std::atomic<uint32_t> arrived{0};
    pool.run(3, [&](uint32_t) {
      ++arrived;
      while (arrived.load() < 3) sched_yield();
    });
    CHECK_EQ(arrived.load(), 3u);
  }
}

TEST("thread pool: the caller waits for a slow last chunk of a helper") {
  ThreadPool pool(2);
  for (int round = 0; round < 20; ++round) {
    std::atomic<bool> helper_has_one{false};
    bool slow_done = false;
    const std::thread::id caller = std::this_thread::get_id();
    pool.run(2, [&](uint32_t) {
      if (std::this_thread::get_id() == caller) {
        while (!helper_has_one.load()) sched_yield();  // the other chunk is the helper's
        return;
      }
      helper_has_one = true;
      std::this_thread::sleep_for(std::chrono::microseconds(500));  // beyond the caller's spin: it sleeps and must be woken
      slow_done = true;
    });
    CHECK(slow_done);
  }
}

TEST("thread pool: starts and stops at once, used or not") {
  for (int i = 0; i < 200; ++i) {
    ThreadPool pool(1 + i % 4);
    if (i % 2) regions(pool, 2, 5);
  }
}

TEST("thread pool: the default size is the affinity of the process") {
  cpu_set_t before, one;
  CHECK_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  CHECK_EQ(ThreadPool::default_threads(), static_cast<uint32_t>(CPU_COUNT(&before)));
  CHECK_EQ(ThreadPool(0).size(), ThreadPool::default_threads());
  int cpu = 0;
  while (!CPU_ISSET(cpu, &before)) ++cpu;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  CHECK_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  const uint32_t pinned = ThreadPool::default_threads();
  CHECK_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
  CHECK_EQ(pinned, 1u);
}
