// Streams of the simulator: threads that run what they are given in order. Events and graphs with them.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../../native/backend.h"

using Work = std::function<void()>;

struct CUstream_st {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  uint64_t submitted = 0, completed = 0;
  bool stop = false, capturing = false;
  std::vector<Work> recorded;  // while capturing
  std::string fault;           // of a kernel; nothing runs any more
  std::thread thread;

  void push(Work work) {
    {
      const std::lock_guard lock(mutex);
      if (capturing) return recorded.push_back(std::move(work));
      queue.push_back(std::move(work));
      ++submitted;
    }
    changed.notify_all();
  }
  ls::Status wait(uint64_t ticket) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return completed >= ticket; });
    return fault.empty() ? ls::Status::good() : ls::Status::fail(LS_INTERNAL, "simulated kernel: " + fault);
  }
  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stop || !queue.empty(); });
      if (queue.empty()) return;
      Work work = std::move(queue.front());
      queue.pop_front();
      const bool healthy = fault.empty();
      lock.unlock();
      std::string problem;
      try {
        if (healthy) work();
      } catch (const std::exception &e) {
        problem = e.what();
      }
      lock.lock();
      if (!problem.empty()) fault = problem;
      ++completed;
      changed.notify_all();
    }
  }
};

struct CUevent_st {
  std::mutex mutex;
  CUstream_st *stream = nullptr;
  uint64_t ticket = 0;  // of the stream's work, all that was submitted when the event was recorded
};

struct CUgraphExec_st {
  std::vector<Work> work;
};
