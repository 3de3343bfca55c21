// One-shot all-reduce over peer memory.
//   area of a rank: flags (kMaxRanks, kReduceBlocks) u32, epochs (kReduceBlocks) u32, {1 once a wait was in vain, 0, 0, 0} u32, then two halves of
//   max_elements wire elements
// Flag [r][b] holds the epoch that block b of rank r has published. A block's epoch is the number of its calls, kept in memory so that a graph
// can be replayed.
#include "all_reduce.h"

#include "elements.cuh"

namespace ls::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr size_t kFlagWords = size_t{kMaxRanks} * kReduceBlocks;
constexpr size_t kHeadBytes = (kFlagWords + kReduceBlocks + 4) * 4;
static_assert(kHeadBytes % 16 == 0);

template <class Wire>
LS_DEVICE Wire *half_of(void *area, size_t max_elements, uint32_t epoch) {
  return reinterpret_cast<Wire *>(static_cast<uint8_t *>(area) + kHeadBytes) + (epoch & 1) * ((max_elements + 7) / 8 * 8);
}

// Volatile: another device wrote it, and no cache of this one may keep what the half held two calls ago.
LS_DEVICE float load_wire(const float *p) { return *static_cast<const volatile float *>(p); }
LS_DEVICE float load_wire(const bf16 *p) { return bits_as<float>(static_cast<uint32_t>(*reinterpret_cast<const volatile uint16_t *>(p)) << 16); }

template <class Wire, class Part>
LS_KERNEL LS_BOUNDS(kThreads, 1) void all_reduce_kernel(AllReduce g, const Part *part, float *x, size_t n) {
  LS_SHARED(void *, areas, kMaxRanks);  // parameters cannot be indexed by a variable without a copy in local memory
  const unsigned block = block_x(), thread = thread_x();
  LS_UNROLL
  for (unsigned r = 0; r < kMaxRanks; ++r)
    if (thread == r) areas[r] = g.areas[r];
  sync_block();
  uint32_t *own = static_cast<uint32_t *>(areas[g.rank]), *epochs = own + kFlagWords;
  volatile uint32_t *in_vain = epochs + kReduceBlocks;  // here and not at the host: it is looked at in every call
  const uint32_t epoch = epochs[block] + 1;

  // Every block has its own elements, the same on all ranks.
  const size_t stride = size_t{grid_x()} * kThreads, first = size_t{block} * kThreads + thread;
  Wire *mine = half_of<Wire>(areas[g.rank], g.max_elements, epoch);
  for (size_t i = first; i < n; i += stride) store_element(mine + i, load_element(part + i));
  fence_system();
  sync_block();
  if (thread < g.ranks) {
    if (thread != g.rank) store_release(static_cast<uint32_t *>(areas[thread]) + size_t{g.rank} * kReduceBlocks + block, epoch);
    const uint32_t *flag = own + size_t{thread} * kReduceBlocks + block;
    // Signed distance: epochs wrap around, and a rank may be one call ahead.
    // Nobody waits again once a wait was in vain: a step has two sums a layer, and each would take the whole limit.
    if (thread != g.rank && *in_vain == 0)
      for (uint64_t looks = 0; static_cast<int32_t>(load_acquire(flag) - epoch) < 0; spin_pause())
        if (++looks > g.spin_limit) {
          *in_vain = 1;
          *static_cast<volatile int32_t *>(g.error) = 1 + static_cast<int32_t>(thread);
          break;
        }
  }
  sync_block();
  if (thread == 0) epochs[block] = epoch;

  for (size_t i = first; i < n; i += stride) {
    float sum = 0;
    for (uint32_t r = 0; r < g.ranks; ++r) sum += load_wire(half_of<Wire>(areas[r], g.max_elements, epoch) + i);
    x[i] += sum;
  }
}

LS_KERNEL LS_BOUNDS(kThreads, 1) void residual_add_kernel(const float *sum, float *x, size_t n) {
  const size_t i = (size_t{block_x()} * kThreads + thread_x()) * 4;
  if (i >= n) return;
  Float4 to = load_elements4(x + i);
  const Float4 from = load_elements4(sum + i);
  for (int e = 0; e < 4; ++e) to.v[e] += from.v[e];
  store_elements4(x + i, to);
}

template <class Wire>
void run(Stream stream, const AllReduce &group, const void *part, Element part_type, float *x, size_t n) {
  // A fixed number of blocks: the epochs of all blocks move together, whatever the size of a call.
  if (part_type == Element::f32) launch(all_reduce_kernel<Wire, float>, Dim{kReduceBlocks}, Dim{kThreads}, 0, stream, group, static_cast<const float *>(part), x, n);
  else launch(all_reduce_kernel<Wire, bf16>, Dim{kReduceBlocks}, Dim{kThreads}, 0, stream, group, static_cast<const bf16 *>(part), x, n);
}

}  // namespace

size_t all_reduce_bytes(size_t max_elements) { return kHeadBytes + 2 * ((max_elements + 7) / 8 * 8) * sizeof(float); }

void all_reduce_add(Stream stream, const AllReduce &group, const void *part, Element part_type, float *x, size_t n) {
  group.wire == Element::f32 ? run<float>(stream, group, part, part_type, x, n) : run<bf16>(stream, group, part, part_type, x, n);
}

void residual_add(Stream stream, const float *sum, float *x, size_t n) {
  launch(residual_add_kernel, Dim{static_cast<unsigned>((n / 4 + kThreads - 1) / kThreads)}, Dim{kThreads}, 0, stream, sum, x, n);
}

}  // namespace ls::cuda
