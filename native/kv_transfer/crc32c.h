// CRC-32C (Castagnoli), the checksum of frames.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ls::kv {

// crc32c(crc32c(0, a), b) is the sum of a followed by b. By tables: frames are small, and pages have a sum of their own (page_sum.h).
uint32_t crc32c(uint32_t crc, const void *data, size_t bytes);

}  // namespace ls::kv
