// How the CUDA device keeps K and V.
//
// What one layer keeps of one page is contiguous, page_bytes() of it, head-major so that the shards of tensor-parallel ranks, one after the other,
// are the page of a single rank:
//   [kv head][K: 16 tokens x row | V: 16 tokens x row]      row = head_dim elements padded with zeros to a multiple of 16
// Elements are bf16, or fp8 (e4m3, e5m2) that stands for element * scale with one scale for K and one for V of a layer. Values beyond the range
// of fp8 are stored as its largest. Places that no token was written to hold anything: readers never look at them.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../../native/layerscale.h"

#ifdef __CUDACC__
#define LS_ANYWHERE __host__ __device__
#else
#define LS_ANYWHERE
#endif

namespace ls::cuda {

inline constexpr uint32_t kPageTokens = LS_PAGE_TOKENS;
inline constexpr uint32_t kMaxHeadDim = 256;  // of the attention kernels

enum class KvType : uint32_t { bf16, e4m3, e5m2 };

struct KvLayout {
  uint32_t kv_heads = 0;  // of this rank
  uint32_t head_dim = 0;  // even, <= kMaxHeadDim
  KvType type = KvType::bf16;

  LS_ANYWHERE constexpr uint32_t row_elements() const { return (head_dim + 15) / 16 * 16; }
  LS_ANYWHERE constexpr uint32_t element_bytes() const { return type == KvType::bf16 ? 2 : 1; }
  // One K or V block of one head: 16 rows.
  LS_ANYWHERE constexpr size_t block_bytes() const { return size_t{kPageTokens} * row_elements() * element_bytes(); }
  LS_ANYWHERE constexpr size_t page_bytes() const { return 2 * block_bytes() * kv_heads; }
  // KvFormat::id of native/backend.h; the CPU device has 1 and 2.
  constexpr uint32_t format_id() const { return 16 + static_cast<uint32_t>(type); }
};

// Of one layer. A stored element stands for element * scale; both are 1 for bf16.
struct KvScales {
  float k = 1, v = 1;
};

}  // namespace ls::cuda
