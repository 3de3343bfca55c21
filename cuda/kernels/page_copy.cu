// Page copies: a thread moves the same 16 bytes of a layer for every pair, so copies of copies come out right.
#include "page_copy.h"

#include "../device.h"

namespace ls::cuda {
namespace {

constexpr unsigned kThreads = 256;

LS_KERNEL LS_BOUNDS(kThreads, 1) void page_copy_kernel(void *const *layers, uint32_t pieces, const int32_t *pairs, const int32_t *count) {
  const uint32_t i = block_x() * kThreads + thread_x();
  if (i >= pieces) return;
  Bytes16 *layer = static_cast<Bytes16 *>(layers[block_y()]) + i;
  for (int32_t p = 0, n = *count; p < n; ++p) layer[static_cast<size_t>(pairs[2 * p + 1]) * pieces] = layer[static_cast<size_t>(pairs[2 * p]) * pieces];
}

}  // namespace

void page_copy(Stream stream, void *const *layers, uint32_t layer_count, size_t page_bytes, const int32_t *pairs, const int32_t *count) {
  const uint32_t pieces = static_cast<uint32_t>(page_bytes / sizeof(Bytes16));
  launch(page_copy_kernel, Dim{(pieces + kThreads - 1) / kThreads, layer_count}, Dim{kThreads}, 0, stream, layers, pieces, pairs, count);
}

}  // namespace ls::cuda
