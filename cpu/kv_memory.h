// Paged K/V memory of the CPU device.
//
// One anonymous mapping, [layer][page][kv head][K block | V block]; a block holds 16 tokens of one head. What one layer keeps of one page is
// contiguous (page_bytes()), so that it can be staged or sent layer by layer. Untouched pages cost no memory. The arrangement is the same for
// every instruction set, so engines exchange pages as they are; another arrangement needs another KvFormat id in backend.cpp.
//   f32    K [head_dim][16]        V [16][head_dim]        (K transposed: 16 keys are one vector)
//   bf16   K [head_dim/2][16][2]   V [8][head_dim][2]      (pairs of dims · pairs of tokens, the operand layout of bf16 tile and dot instructions;
//                                                           one load gives two f32 vectors by a shift and a mask)
#pragma once
#include <cstddef>
#include <cstdint>

#include "../native/backend.h"

namespace ls::cpu {

inline constexpr uint32_t kPageTokens = LS_PAGE_TOKENS;

class KvMemory {
 public:
  KvMemory(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, ls_dtype dtype);
  ~KvMemory();
  KvMemory(const KvMemory &) = delete;
  KvMemory &operator=(const KvMemory &) = delete;

  // Maps `pages` pages over all layers. LS_NO_MEMORY when address space is refused, LS_STATE on a second call.
  Status reserve(uint32_t pages);

  uint32_t pages() const { return pages_; }
  ls_dtype dtype() const { return dtype_; }
  // Bytes of one K (or V) block of one head.
  size_t block_bytes() const { return block_bytes_; }
  // Bytes that one layer keeps of one page.
  size_t page_bytes() const { return page_bytes_; }
  // Base of a layer; page p of it begins at layer(l) + p * page_bytes().
  uint8_t *layer(uint32_t index) const { return base_ + static_cast<size_t>(index) * pages_ * page_bytes_; }

  // Copies what all layers keep of one page.
  void copy(uint32_t from, uint32_t to) const;
  // Stores K and V (kv_heads * head_dim floats each) of one token at place `slot` (0..15) of a page. Storing slot 0 clears the page's other
  // V places, so that a masked (zero) weight never meets what an earlier owner of the page left there.
  void store(uint32_t layer_index, uint32_t page, uint32_t slot, const float *k, const float *v) const;

 private:
  uint32_t layers_, kv_heads_, head_dim_, pages_ = 0;
  ls_dtype dtype_;
  size_t block_bytes_, page_bytes_, mapped_ = 0;
  uint8_t *base_ = nullptr;
};

// Round to nearest even; a NaN stays a NaN.
uint16_t to_bf16(float value);
float from_bf16(uint16_t value);

}  // namespace ls::cpu
