// Runs CUDA kernels on the host: a fiber per thread, block after block. Warps run in a seeded random order; a lane runs until it waits at a
// barrier or a warp call. Faults (divergent barriers, mixed warp calls, misaligned accesses, too much shared memory) are thrown by the launch as Fault.
// All state belongs to the calling thread: several threads may simulate at once.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace ls::cuda {
struct Dim;
}

namespace ls::cuda::sim {

class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

enum class State : uint8_t { ready, at_warp, at_block, done };

struct PendingCopy {
  void *to;
  const void *from;
  uint32_t bytes;
};

struct Fiber {
  void *stack_pointer = nullptr;
  unsigned thread = 0;
  State state = State::done;
  void *args = nullptr;                            // of the warp call it waits in
  std::vector<std::vector<PendingCopy>> groups;    // committed and not waited for, oldest first
  std::vector<PendingCopy> open;                   // not committed
};

struct Block {
  Index index, grid;
  unsigned threads = 0;
};

// The running thread and its block.
Fiber *self();
const Block *block();

void block_barrier();
void warp_barrier();
uint32_t ballot(bool p);
// Lane `from`'s word; every lane names its own source.
uint64_t exchange(const char *op, uint64_t word, unsigned from);
void load_matrix(uint32_t *r, const void *row, int matrices, bool transposed);
void matrix_product(float *d, const uint32_t *a, const uint32_t *b, const float *c);
void copy_async(void *to, const void *from, uint32_t bytes);
void copy_commit();
void copy_wait(unsigned newest);
void spin();
void *dynamic_shared();
void *fixed_shared(const void *key, size_t bytes);
void check_aligned(const char *op, const void *p, size_t bytes);

// Runs `thread` once for every thread of the grid.
void run_grid(const Dim &grid, const Dim &block, size_t smem, const std::function<void()> &thread);

// Order of warps from now on, on this thread. LAYERSCALE_SIM_SEED, else 1, at first.
void set_seed(uint64_t seed);
// Fiber switches so far on this thread.
uint64_t switches();

}  // namespace ls::cuda::sim
