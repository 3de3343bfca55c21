// The checksum of a page's KV on the wire.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ls::kv {

// Two running sums in each of eight lanes of 64 bits (Fletcher's idea, as ZFS uses it): over words w[8 i + lane], little-endian,
// A += w, B += A, modulo 2^64; the last step is filled up with zeros. A notices a changed word, B words that changed places. The sixteen
// sums are mixed into 32 bits. Finds accidents, not attackers. Adding vectors costs a fraction of what a CRC does, which matters: each
// page is summed once on either side, and a transfer is otherwise two copies.
uint32_t page_sum(const void *data, size_t bytes);

}  // namespace ls::kv
