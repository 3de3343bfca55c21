// What two workers must have in common for the bytes of a KV page to mean the same to both. It travels in the prefill worker's answer and
// again on the transfer connection, and is compared field by field before anything is allocated.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "sha256.h"

namespace ls::kv {

struct Layout {
  Digest model{};   // of the model's configuration, as the caller defines it
  Digest scales{};  // of a quantised cache's scales; zeros when it has none
  uint32_t layers = 0, kv_heads = 0, head_dim = 0, page_tokens = 0;
  uint32_t dtype = 0;       // ls_dtype of the cache
  uint32_t format = 0;      // arrangement of the elements inside a page, as the device defines it
  uint32_t ranks = 1;       // tensor-parallel ranks
  uint64_t page_bytes = 0;  // one layer of one page
  bool operator==(const Layout &) const = default;
};

constexpr size_t kLayoutBytes = 128;

// version u32 = 1, layers, kv_heads, head_dim, page_tokens, dtype, format, ranks: u32 each · page_bytes u64 · model 32 · scales 32 · 24 zero bytes
void encode_layout(const Layout &layout, uint8_t *out);
// An error text, or empty. The values are compared, never used for a size.
std::string decode_layout(std::span<const uint8_t> bytes, Layout &out);
// The first field that differs with both values, or empty: "layers is 30 at the sender and 28 here".
std::string layout_difference(const Layout &sender, const Layout &receiver, const char *sender_name, const char *receiver_name);

}  // namespace ls::kv
