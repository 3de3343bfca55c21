// Sum of a matrix over the ranks of a tensor-parallel group, through memory that all of them can reach.
//
// One shot: each rank puts its part into its own exchange buffer, tells every other rank by a flag in that rank's memory, waits for theirs, and
// adds all parts in the order of the ranks, so every rank has the same bits. Two halves of the buffer alternate: a rank can only be one call
// ahead, because it waits for the others inside each call. A block works with the blocks of its number on the other ranks alone.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../runtime.h"
#include "element.h"

namespace ls::cuda {

inline constexpr uint32_t kMaxRanks = 8;
inline constexpr uint32_t kReduceBlocks = 64;

// Memory of one rank's exchange area for sums of up to max_elements. Zeroed before the first call.
size_t all_reduce_bytes(size_t max_elements);

struct AllReduce {
  void *areas[kMaxRanks] = {};  // exchange area of every rank, as this device addresses it
  uint32_t rank = 0, ranks = 1;
  size_t max_elements = 0;      // the same everywhere
  Element wire = Element::f32;  // elements in the exchange buffer
  uint64_t spin_limit = 1u << 26;  // looks at a flag before the call gives up
  // Device or mapped host word: set to 1 + the silent rank on giving up; the sum is then wrong. Calls after that wait for nobody.
  int32_t *error = nullptr;
};
// x[i] += sum over ranks of part[i], i < n.   part (n) f32 or bf16 (the rank's own)   x (n) f32, the same on every rank before and after
void all_reduce_add(Stream stream, const AllReduce &group, const void *part, Element part_type, float *x, size_t n);

// x[i] += sum[i], i < n: what is left when something else has summed the parts.   n % 4 == 0, both 16-byte aligned
void residual_add(Stream stream, const float *sum, float *x, size_t n);

}  // namespace ls::cuda
