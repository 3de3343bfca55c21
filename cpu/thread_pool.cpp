#include "thread_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace ls::cpu {
namespace {

// A helper that saw no work for this long sleeps. Regions of one forward pass follow each other within a few microseconds.
constexpr int64_t kHelperSpinNs = 20'000;
// The caller waits this long for the last chunk before it gives its core away: with every core busy, the helper that holds the chunk may need it.
constexpr int64_t kCallerSpinNs = 20'000;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// Spins until ready() or the time is over.
template <class Ready>
bool spin(int64_t ns, Ready &&ready) {
  const int64_t end = now_ns() + ns;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      _mm_pause();
    }
  } while (now_ns() < end);
  return ready();
}

void futex_wait(std::atomic<uint32_t> &word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t> &word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}
static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace

// claim = epoch << 32 | chunks not yet claimed. A claim is a compare-and-swap of the whole word, so a helper that read fn, ctx and chunks
// of an older region cannot claim from a newer one; and while one chunk of a region is unclaimed, the caller cannot have gone on to overwrite them.
struct ThreadPool::State {
  alignas(64) std::atomic<uint64_t> claim{0};
  alignas(64) std::atomic<uint32_t> done{0};  // chunks finished in this region; the caller sleeps on it
  std::atomic<uint32_t> caller_sleeps{0};
  alignas(64) std::atomic<uint32_t> wake{0};  // helpers sleep on it
  std::atomic<uint32_t> sleepers{0};
  std::atomic<bool> stop{false};
  alignas(64) std::atomic<void (*)(void *, uint32_t)> fn{nullptr};
  std::atomic<void *> ctx{nullptr};
  std::atomic<uint32_t> chunks{0};
  uint32_t epoch = 0;
  std::vector<std::thread> helpers;

  // Runs chunks of the open region until none is left to claim.
  void work() {
    uint64_t word = claim.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(word) > 0) {
      const auto f = fn.load(std::memory_order_relaxed);
      void *const c = ctx.load(std::memory_order_relaxed);
      const uint32_t total = chunks.load(std::memory_order_relaxed);
      if (!claim.compare_exchange_weak(word, word - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      f(c, total - static_cast<uint32_t>(word));
      // seq_cst on done and caller_sleeps: either this thread sees the sleeper, or the sleeper sees the last chunk.
      if (done.fetch_add(1, std::memory_order_seq_cst) + 1 == total && caller_sleeps.load(std::memory_order_seq_cst)) futex_wake(done, 1);
      word = claim.load(std::memory_order_acquire);
    }
  }

  bool has_work() const { return static_cast<uint32_t>(claim.load(std::memory_order_acquire)) > 0; }

  void helper() {
    while (!stop.load(std::memory_order_acquire)) {
      if (!spin(kHelperSpinNs, [&] { return has_work() || stop.load(std::memory_order_relaxed); })) {
        const uint32_t seen = wake.load(std::memory_order_seq_cst);
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        if (static_cast<uint32_t>(claim.load(std::memory_order_seq_cst)) == 0 && !stop.load(std::memory_order_seq_cst)) futex_wait(wake, seen);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
      }
      work();
    }
  }

  void rouse(uint32_t count) {
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
    wake.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(wake, static_cast<int>(count));
  }
};

uint32_t ThreadPool::default_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());  // more cores than cpu_set_t holds
}

ThreadPool::ThreadPool(uint32_t threads) : state_(std::make_unique<State>()) {
  if (threads == 0) threads = default_threads();
  state_->helpers.reserve(threads - 1);
  for (uint32_t i = 1; i < threads; ++i) {
    state_->helpers.emplace_back([s = state_.get()] { s->helper(); });
    pthread_setname_np(state_->helpers.back().native_handle(), "ls-compute");
  }
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true, std::memory_order_seq_cst);
  state_->wake.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(state_->wake, INT32_MAX);
  for (std::thread &t : state_->helpers) t.join();
}

uint32_t ThreadPool::size() const { return static_cast<uint32_t>(state_->helpers.size()) + 1; }

void ThreadPool::run_raw(uint32_t chunks, void (*fn)(void *, uint32_t), void *ctx) {
  State &s = *state_;
  if (chunks == 0) return;
  if (chunks == 1 || s.helpers.empty()) {
    for (uint32_t i = 0; i < chunks; ++i) fn(ctx, i);
    return;
  }
  s.fn.store(fn, std::memory_order_relaxed);
  s.ctx.store(ctx, std::memory_order_relaxed);
  s.chunks.store(chunks, std::memory_order_relaxed);
  s.done.store(0, std::memory_order_relaxed);
  s.claim.store(static_cast<uint64_t>(++s.epoch) << 32 | chunks, std::memory_order_seq_cst);
  s.rouse(chunks - 1);
  s.work();
  const auto finished = [&] { return s.done.load(std::memory_order_acquire) == chunks; };
  if (spin(kCallerSpinNs, finished)) return;
  s.caller_sleeps.store(1, std::memory_order_seq_cst);
  for (uint32_t seen; (seen = s.done.load(std::memory_order_seq_cst)) != chunks;) futex_wait(s.done, seen);
  s.caller_sleeps.store(0, std::memory_order_relaxed);
}

}  // namespace ls::cpu
