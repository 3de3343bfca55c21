// SHA-256 and HMAC-SHA256 (FIPS 180-4, RFC 2104).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ls::kv {

using Digest = std::array<uint8_t, 32>;
using Bytes = std::span<const uint8_t>;

class Sha256 {
 public:
  void add(Bytes data);
  Digest finish();

 private:
  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  uint64_t bytes_ = 0;
  void compress(const uint8_t *block);
};

Digest sha256(Bytes data);
// Over the parts in their order, as one message.
Digest hmac_sha256(Bytes key, std::initializer_list<Bytes> parts);
// Whether both are equal; the time taken tells nothing about where they differ.
bool equal_secret(Bytes a, Bytes b);

}  // namespace ls::kv
