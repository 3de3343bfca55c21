// ChaCha20-Poly1305 (RFC 8439), the cipher of transfers under a pre-shared key. Written out here since no crypto library is sure to be on
// the machine, and since this cipher is fast and free of secret-dependent branches and lookups in plain C++.
#pragma once
#include <array>
#include <cstdint>
#include <span>

#include "sha256.h"

namespace ls::kv {

using AeadKey = std::array<uint8_t, 32>;
using AeadNonce = std::array<uint8_t, 12>;
using AeadTag = std::array<uint8_t, 16>;

// Encrypts in place. A nonce is used once per key.
AeadTag aead_seal(const AeadKey &key, const AeadNonce &nonce, Bytes associated, std::span<uint8_t> data);
// Decrypts in place; false, with the data untouched, when the tag is not that of this text.
bool aead_open(const AeadKey &key, const AeadNonce &nonce, Bytes associated, std::span<uint8_t> data, const AeadTag &tag);

// The parts, for their test vectors.
void chacha20(const AeadKey &key, const AeadNonce &nonce, uint32_t counter, std::span<uint8_t> data);
AeadTag poly1305(const std::array<uint8_t, 32> &key, std::initializer_list<Bytes> parts);

}  // namespace ls::kv
