// Stacks and the switch between them (x86-64, System V).
#pragma once
#include <cstddef>

namespace ls::cuda::sim {

// A stack with an unreadable page below it, kept for reuse.
class Stack {
 public:
  explicit Stack(size_t bytes);
  ~Stack();
  Stack(const Stack &) = delete;
  Stack &operator=(const Stack &) = delete;
  // A stack pointer that starts entry() when switched to; entry must never return.
  void *prepare(void (*entry)()) const;
  // For AddressSanitizer: what a fiber left that will never go on is no longer marked as in use.
  void abandon() const;
  const void *bottom() const { return low_; }
  size_t bytes() const { return bytes_; }

 private:
  char *mapping_ = nullptr, *low_ = nullptr;
  size_t bytes_ = 0, mapped_ = 0;
};

// Saves the running context in *from and continues `to`.
extern "C" void ls_sim_switch(void **from, void *to);

}  // namespace ls::cuda::sim
