// A persistent pool for short parallel regions: helpers spin a few microseconds, then sleep on a futex. Work is claimed in chunks, and a
// region ends when all chunks are done, not when all helpers have shown up, so a helper that lost its core delays nobody.
#pragma once
#include <cstdint>
#include <memory>
#include <type_traits>

namespace ls::cpu {

class ThreadPool {
 public:
  // threads counts the caller: ThreadPool(2) starts one helper. 0 = default_threads().
  explicit ThreadPool(uint32_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool &) = delete;
  ThreadPool &operator=(const ThreadPool &) = delete;
  uint32_t size() const;

  // Cores this process may run on (its scheduler affinity), at least 1.
  static uint32_t default_threads();

  // Calls fn(chunk) for chunk in [0, chunks), each exactly once, on any thread; returns when all are done, their writes visible to the
  // caller. One caller at a time; not re-entrant. fn must not throw.
  template <class F>
  void run(uint32_t chunks, F &&fn) {
    run_raw(chunks, [](void *ctx, uint32_t chunk) { (*static_cast<std::remove_reference_t<F> *>(ctx))(chunk); }, const_cast<void *>(static_cast<const void *>(&fn)));
  }

 private:
  void run_raw(uint32_t chunks, void (*fn)(void *, uint32_t), void *ctx);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ls::cpu
