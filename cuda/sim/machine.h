// Insides of the simulator: the machine of one host thread.
#pragma once
#include <memory>
#include <random>
#include <unordered_map>

#include "fiber.h"
#include "simulator.h"

namespace ls::cuda::sim {

struct Warp {
  const char *op = nullptr;  // warp call under way
  unsigned lanes = 0, arrived = 0, done = 0;
};

// What a warp call does once all lanes are there: args[i] is lane i's.
using Collective = void (*)(void **args);

struct Machine {
  Block block;
  Fiber *current = nullptr;
  std::vector<std::unique_ptr<Stack>> stacks;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  void *main_stack = nullptr;  // the scheduler's context
  void *main_fake = nullptr;   // AddressSanitizer's part of it
  const void *main_bottom = nullptr;
  size_t main_bytes = 0;
  const std::function<void()> *thread = nullptr;
  std::unique_ptr<unsigned char, void (*)(void *)> shared{nullptr, nullptr};
  size_t shared_bytes = 0, fixed_used = 0;  // dynamic bytes first, then the fixed arrays
  size_t dynamic_bytes = 0;
  std::unordered_map<const void *, size_t> fixed;  // declaration -> offset
  std::string fault;
  std::mt19937_64 order;
  uint64_t switches = 0;
  bool running = false;

  Machine();
  void run_block();
  // From a fiber: lets the scheduler go on; returns when the fiber is chosen again.
  void yield();
  // From a fiber: ends the launch with a Fault.
  [[noreturn]] void fail(std::string what);
  void collective(const char *op, void *args, Collective body);

 private:
  void resume(Fiber &fiber);
  bool run_warp(unsigned warp);
  std::string where() const;
};

Machine &machine();

}  // namespace ls::cuda::sim
