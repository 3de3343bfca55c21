// CRC-32C (Castagnoli), the checksum of frames and pages.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ls::kv {

// crc32c(crc32c(0, a), b) is the sum of a followed by b. Uses the processor's instruction where there is one.
uint32_t crc32c(uint32_t crc, const void *data, size_t bytes);
// The same without that instruction; for tests.
uint32_t crc32c_portable(uint32_t crc, const void *data, size_t bytes);

}  // namespace ls::kv
