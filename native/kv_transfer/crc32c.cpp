#include "crc32c.h"

#include <array>
#include <cstring>

namespace ls::kv {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // reflected
using Table = std::array<std::array<uint32_t, 256>, 8>;

// [0][b]: byte b through the register; [k][b]: the same with k zero bytes after it.
constexpr Table make_table() {
  Table t{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int i = 0; i < 8; ++i) crc = crc & 1 ? crc >> 1 ^ kPolynomial : crc >> 1;
    t[0][b] = crc;
  }
  for (size_t k = 1; k < t.size(); ++k)
    for (uint32_t b = 0; b < 256; ++b) t[k][b] = t[k - 1][b] >> 8 ^ t[0][t[k - 1][b] & 0xff];
  return t;
}
constexpr Table kTable = make_table();

}  // namespace

uint32_t crc32c(uint32_t crc, const void *data, size_t bytes) {
  const auto *p = static_cast<const uint8_t *>(data);
  uint32_t state = ~crc;
  for (; bytes >= 8; bytes -= 8, p += 8) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    v ^= state;
    state = kTable[7][v & 0xff] ^ kTable[6][v >> 8 & 0xff] ^ kTable[5][v >> 16 & 0xff] ^ kTable[4][v >> 24 & 0xff] ^ kTable[3][v >> 32 & 0xff] ^ kTable[2][v >> 40 & 0xff] ^
            kTable[1][v >> 48 & 0xff] ^ kTable[0][v >> 56];
  }
  for (; bytes > 0; --bytes) state = state >> 8 ^ kTable[0][(state ^ *p++) & 0xff];
  return ~state;
}

}  // namespace ls::kv
