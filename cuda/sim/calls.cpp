// What kernels ask of the machine: barriers, warp calls, asynchronous copies, shared memory.
#include <sched.h>

#include <chrono>
#include <cstring>

#include "../device.h"
#include "machine.h"

namespace ls::cuda::sim {
namespace {

// A kernel that waits for another device gives up in the end, where a real one would hang.
constexpr auto kSpinLimit = std::chrono::seconds(60);

struct ExchangeArgs {
  uint64_t word, out;
  unsigned from;
};
struct BallotArgs {
  bool p;
  uint32_t out;
};
struct MatrixArgs {
  uint32_t *r;
  const void *row;
  int matrices;
  bool transposed;
};
struct ProductArgs {
  float *d;
  const uint32_t *a, *b;
  const float *c;
};

float low(uint32_t pair) { return bits_as<float>(pair << 16); }
float high(uint32_t pair) { return bits_as<float>(pair & 0xffff0000u); }

void do_load_matrix(void **args) {
  const auto lane = [&](unsigned i) { return static_cast<MatrixArgs *>(args[i]); };
  for (int j = 0; j < lane(0)->matrices; ++j) {
    uint16_t matrix[8][8];
    for (unsigned row = 0; row < 8; ++row) std::memcpy(matrix[row], lane(static_cast<unsigned>(j) * 8 + row)->row, 16);
    for (unsigned i = 0; i < kWarp; ++i) {
      const unsigned g = i / 4, t = i % 4 * 2;
      const bool flip = lane(i)->transposed;
      const uint32_t first = flip ? matrix[t][g] : matrix[g][t], second = flip ? matrix[t + 1][g] : matrix[g][t + 1];
      lane(i)->r[j] = first | second << 16;
    }
  }
}

// Sums of one product are kept in double and rounded once: hardware's own order is not documented, and lies within what tests allow.
void do_matrix_product(void **args) {
  const auto lane = [&](unsigned i) { return static_cast<ProductArgs *>(args[i]); };
  float a[16][16], b[8][16];  // b by columns
  for (unsigned i = 0; i < kWarp; ++i) {
    const unsigned g = i / 4, t = i % 4 * 2;
    const ProductArgs &p = *lane(i);
    for (unsigned j = 0; j < 4; ++j) {
      const unsigned row = g + j % 2 * 8, k = t + j / 2 * 8;
      a[row][k] = low(p.a[j]), a[row][k + 1] = high(p.a[j]);
    }
    for (unsigned j = 0; j < 2; ++j) b[g][t + j * 8] = low(p.b[j]), b[g][t + j * 8 + 1] = high(p.b[j]);
  }
  float sums[kWarp][4];
  for (unsigned i = 0; i < kWarp; ++i)
    for (unsigned j = 0; j < 4; ++j) {
      const float *row = a[i / 4 + j / 2 * 8], *col = b[i % 4 * 2 + j % 2];
      double sum = 0;
      for (unsigned k = 0; k < 16; ++k) sum += static_cast<double>(row[k] * col[k]);  // exact: 8-bit times 8-bit mantissas
      sums[i][j] = static_cast<float>(static_cast<double>(lane(i)->c[j]) + sum);
    }
  for (unsigned i = 0; i < kWarp; ++i) std::memcpy(lane(i)->d, sums[i], sizeof sums[i]);
}

void perform(const PendingCopy &copy) {
  if (copy.bytes) std::memcpy(copy.to, copy.from, copy.bytes);
  std::memset(static_cast<char *>(copy.to) + copy.bytes, 0, 16 - copy.bytes);
}

void check_shared(const char *op, const void *p, size_t bytes) {
  const Machine &m = machine();
  const auto *at = static_cast<const unsigned char *>(p);
  if (at < m.shared.get() || at + bytes > m.shared.get() + m.shared_bytes) machine().fail(std::string(op) + " outside shared memory");
}

}  // namespace

Fiber *self() { return machine().current; }
const Block *block() { return &machine().block; }

void block_barrier() {
  Machine &m = machine();
  m.current->state = State::at_block;
  m.yield();
}

void warp_barrier() { machine().collective("sync_warp", nullptr, nullptr); }

uint32_t ballot(bool p) {
  BallotArgs own{p, 0};
  machine().collective("ballot", &own, [](void **args) {
    uint32_t bits = 0;
    for (unsigned i = 0; i < kWarp; ++i) bits |= static_cast<uint32_t>(static_cast<BallotArgs *>(args[i])->p) << i;
    for (unsigned i = 0; i < kWarp; ++i) static_cast<BallotArgs *>(args[i])->out = bits;
  });
  return own.out;
}

uint64_t exchange(const char *op, uint64_t word, unsigned from) {
  ExchangeArgs own{word, 0, from};
  if (from >= kWarp) machine().fail(std::string(op) + " from lane " + std::to_string(from));
  machine().collective(op, &own, [](void **args) {
    for (unsigned i = 0; i < kWarp; ++i) {
      auto *lane = static_cast<ExchangeArgs *>(args[i]);
      lane->out = static_cast<ExchangeArgs *>(args[lane->from])->word;
    }
  });
  return own.out;
}

void load_matrix(uint32_t *r, const void *row, int matrices, bool transposed) {
  const char *op = matrices == 4 ? (transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4") : transposed ? "ldmatrix_x2_trans" : "ldmatrix_x2";
  // With two matrices the addresses of lanes 16.. are not looked at.
  if (lane_id() < static_cast<unsigned>(matrices) * 8) check_aligned(op, row, 16), check_shared(op, row, 16);
  MatrixArgs own{r, row, matrices, transposed};
  machine().collective(op, &own, do_load_matrix);
}

void matrix_product(float *d, const uint32_t *a, const uint32_t *b, const float *c) {
  ProductArgs own{d, a, b, c};
  machine().collective("mma_m16n8k16", &own, do_matrix_product);
}

void copy_async(void *to, const void *from, uint32_t bytes) {
  check_aligned("cp_async16", to, 16), check_shared("cp_async16", to, 16);
  if (bytes > 16) machine().fail("cp_async16 of " + std::to_string(bytes) + " bytes");
  if (bytes) check_aligned("cp_async16", from, 16);
  // Reads at once too, so that a bad address shows in the line that gave it.
  if (bytes) static_cast<void>(*static_cast<const volatile char *>(from)), static_cast<void>(static_cast<const volatile char *>(from)[bytes - 1]);
  self()->open.push_back({to, from, bytes});
}

void copy_commit() {
  Fiber &fiber = *self();
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}

void copy_wait(unsigned newest) {
  Fiber &fiber = *self();
  if (fiber.groups.size() <= newest) return;
  const size_t ready = fiber.groups.size() - newest;
  for (size_t i = 0; i < ready; ++i)
    for (const PendingCopy &copy : fiber.groups[i]) perform(copy);
  fiber.groups.erase(fiber.groups.begin(), fiber.groups.begin() + static_cast<std::ptrdiff_t>(ready));
}

void spin() {
  static thread_local uint64_t launch = 0;
  static thread_local std::chrono::steady_clock::time_point since;
  Machine &m = machine();
  // Time counts from the first wait after something else ran in this thread: switches grow by one per wait of a block that only waits.
  const auto now = std::chrono::steady_clock::now();
  if (m.switches - launch > 2 * m.block.threads) since = now;
  launch = m.switches;
  if (now - since > kSpinLimit) m.fail("waited too long for another block or device");
  sched_yield();
  m.yield();
}

void *dynamic_shared() { return machine().shared.get(); }

void *fixed_shared(const void *key, size_t bytes) {
  Machine &m = machine();
  const auto found = m.fixed.find(key);
  if (found != m.fixed.end()) return m.shared.get() + found->second;
  const size_t offset = m.fixed_used;
  m.fixed_used += (bytes + 15) / 16 * 16;
  if (m.fixed_used > kMaxSharedBytes) m.fail(std::to_string(m.fixed_used) + " bytes of shared memory; there are " + std::to_string(kMaxSharedBytes));
  std::memset(m.shared.get() + offset, 0xff, m.fixed_used - offset);
  if (m.shared_bytes < m.fixed_used) m.shared_bytes = m.fixed_used;
  m.fixed.emplace(key, offset);
  return m.shared.get() + offset;
}

void check_aligned(const char *op, const void *p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) machine().fail(std::string(op) + " of " + std::to_string(bytes) + " bytes at a misaligned address");
}

}  // namespace ls::cuda::sim
