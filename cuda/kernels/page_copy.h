// Copies of whole pages over all layers.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../runtime.h"

namespace ls::cuda {

// For each of pairs[0..*count), in this order: page pairs[i].to = page pairs[i].from, in every layer. count is read on the device.
//   layers (layer_count) device array of the base addresses of the layers   pairs (., 2) {from, to}   page_bytes: a multiple of 16
void page_copy(Stream stream, void *const *layers, uint32_t layer_count, size_t page_bytes, const int32_t *pairs, const int32_t *count);

}  // namespace ls::cuda
