// The scheduler: which fiber runs, and what barriers mean.
#include "machine.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "../device.h"

#ifdef __SANITIZE_ADDRESS__
extern "C" {
void __sanitizer_start_switch_fiber(void **fake_stack_save, const void *bottom, size_t size);
void __sanitizer_finish_switch_fiber(void *fake_stack_save, const void **bottom_old, size_t *size_old);
}
#endif

namespace ls::cuda::sim {
namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStackBytes = 512 * 1024;
#else
constexpr size_t kStackBytes = 128 * 1024;
#endif
constexpr unsigned kMaxThreads = 1024;

void fiber_main() {
  Machine &m = machine();
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &m.main_bottom, &m.main_bytes);
#endif
  for (;;) {
    (*m.thread)();
    Fiber &fiber = *m.current;
    if (!fiber.open.empty()) m.fail("a thread ended with cp_async that was never committed");
    fiber.state = State::done;
    ++m.warps[fiber.thread / kWarp].done;
    m.yield();
  }
}

}  // namespace

Machine &machine() {
  static thread_local Machine m;
  return m;
}

Machine::Machine() : shared(nullptr, [](void *p) { std::free(p); }) {
  const char *seed = std::getenv("LAYERSCALE_SIM_SEED");
  order.seed(seed ? std::strtoull(seed, nullptr, 10) : 1);
}

void Machine::resume(Fiber &fiber) {
  current = &fiber;
  ++switches;
#ifdef __SANITIZE_ADDRESS__
  const Stack &stack = *stacks[fiber.thread];
  __sanitizer_start_switch_fiber(&main_fake, stack.bottom(), stack.bytes());
#endif
  ls_sim_switch(&main_stack, fiber.stack_pointer);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(main_fake, nullptr, nullptr);
#endif
  if (!fault.empty()) throw Fault(fault + where());
}

void Machine::yield() {
  Fiber &fiber = *current;
#ifdef __SANITIZE_ADDRESS__
  // Nowhere to keep it: the fiber ends here, and its fake stack (of detect_stack_use_after_return) is freed.
  void *fake = nullptr;
  __sanitizer_start_switch_fiber(fiber.state == State::done ? nullptr : &fake, main_bottom, main_bytes);
#endif
  ls_sim_switch(&fiber.stack_pointer, main_stack);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, &main_bottom, &main_bytes);
#endif
}

// The fiber never goes on, so no destructor of its frames runs: the text is moved out, and nothing is left behind.
void Machine::fail(std::string what) {
  std::string().swap(fault);
  fault = std::move(what);
  for (;;) yield();
}

std::string Machine::where() const {
  return " (thread " + std::to_string(current->thread) + " of block " + std::to_string(block.index.x) + "," + std::to_string(block.index.y) + "," + std::to_string(block.index.z) + ", " +
         std::to_string(block.threads) + " threads a block)";
}

void Machine::collective(const char *op, void *args, Collective body) {
  Fiber &fiber = *current;
  const unsigned first = fiber.thread / kWarp * kWarp;
  Warp &warp = warps[fiber.thread / kWarp];
  if (warp.done) fail(std::string(op) + " after another lane of the warp has ended");
  if (warp.arrived == 0) warp.op = op;
  else if (std::strcmp(warp.op, op) != 0) fail(std::string(op) + " while other lanes of the warp are in " + warp.op);
  fiber.args = args;
  if (++warp.arrived < warp.lanes) {
    fiber.state = State::at_warp;
    yield();
    return;
  }
  void *all[kWarp];
  for (unsigned i = 0; i < warp.lanes; ++i) {
    all[i] = fibers[first + i].args;
    fibers[first + i].state = State::ready;
  }
  warp.arrived = 0;
  if (body) body(all);
}

// Lanes in turn, each until it waits. False when none could run.
bool Machine::run_warp(unsigned warp) {
  bool ran = false;
  for (unsigned i = 0; i < warps[warp].lanes; ++i) {
    Fiber &fiber = fibers[warp * kWarp + i];
    if (fiber.state != State::ready) continue;
    resume(fiber);
    ran = true;
  }
  return ran;
}

void Machine::run_block() {
  fixed.clear();
  fixed_used = dynamic_bytes;
  std::memset(shared.get(), 0xff, shared_bytes);  // NaN in every float type
  for (unsigned i = 0; i < block.threads; ++i) {
    Fiber &fiber = fibers[i];
    fiber.thread = i;
    fiber.state = State::ready;
    fiber.groups.clear(), fiber.open.clear();
    fiber.stack_pointer = stacks[i]->prepare(fiber_main);
  }
  const unsigned count = block.threads / kWarp;
  for (Warp &warp : warps) warp = {nullptr, kWarp, 0, 0};
  for (;;) {
    // From a random warp on: the first that can run.
    const unsigned start = static_cast<unsigned>(order() % count);
    bool ran = false;
    for (unsigned i = 0; i < count && !ran; ++i) ran = run_warp((start + i) % count);
    if (ran) continue;
    unsigned done = 0, at_block = 0;
    for (unsigned i = 0; i < block.threads; ++i) done += fibers[i].state == State::done, at_block += fibers[i].state == State::at_block;
    if (done == block.threads) return;
    if (at_block == block.threads) {
      for (unsigned i = 0; i < block.threads; ++i) fibers[i].state = State::ready;
      continue;
    }
    const unsigned at_warp = block.threads - done - at_block;
    std::string what = "divergent barrier: " + std::to_string(at_block) + " threads in sync_block, " + std::to_string(at_warp) + " in a warp call, " + std::to_string(done) + " ended";
    for (unsigned w = 0; w < count; ++w)
      if (warps[w].arrived) what += std::string("; warp ") + std::to_string(w) + " in " + warps[w].op + " with " + std::to_string(warps[w].arrived) + " lanes";
    throw Fault(what + where());
  }
}

void run_grid(const Dim &grid, const Dim &block, size_t smem, const std::function<void()> &thread) {
  Machine &m = machine();
  const unsigned threads = block.x * block.y * block.z;
  if (block.y != 1 || block.z != 1) throw Fault("blocks have one dimension here, not " + std::to_string(block.x) + "x" + std::to_string(block.y) + "x" + std::to_string(block.z));
  if (threads == 0 || threads > kMaxThreads || threads % kWarp != 0) throw Fault(std::to_string(threads) + " threads a block; expected a multiple of 32 up to 1024");
  if (grid.y > 65535 || grid.z > 65535 || grid.x > 0x7fffffff) throw Fault("grid of " + std::to_string(grid.x) + "x" + std::to_string(grid.y) + "x" + std::to_string(grid.z) + " blocks is too large");
  if (smem > kMaxSharedBytes) throw Fault(std::to_string(smem) + " bytes of shared memory; there are " + std::to_string(kMaxSharedBytes));
  if (m.running) throw Fault("a kernel launched from a kernel");
  while (m.stacks.size() < threads) m.stacks.push_back(std::make_unique<Stack>(kStackBytes));
  m.fibers.resize(threads);
  m.warps.resize(threads / kWarp);
  if (!m.shared) m.shared.reset(static_cast<unsigned char *>(std::aligned_alloc(128, kMaxSharedBytes + 1024)));
  m.dynamic_bytes = (smem + 127) / 128 * 128;
  m.shared_bytes = m.dynamic_bytes ? m.dynamic_bytes : 128;
  m.block.grid = {grid.x, grid.y, grid.z};
  m.block.threads = threads;
  m.thread = &thread;
  m.fault.clear();
  m.running = true;
  struct Reset {
    Machine &m;
    ~Reset() {
      m.running = false;
      // A fault leaves fibers in the middle of a kernel.
      for (size_t i = 0; i < m.fibers.size(); ++i)
        if (std::exchange(m.fibers[i].state, State::done) != State::done) m.stacks[i]->abandon();
    }
  } reset{m};
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        m.block.index = {x, y, z};
        m.run_block();
      }
}

void set_seed(uint64_t seed) { machine().order.seed(seed); }
uint64_t switches() { return machine().switches; }

}  // namespace ls::cuda::sim
