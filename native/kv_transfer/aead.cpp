#include "aead.h"

#include <algorithm>
#include <cstring>

#include "bytes.h"

namespace ls::kv {
namespace {

// Four blocks side by side: element i of a vector belongs to block i.
typedef uint32_t Lanes __attribute__((vector_size(16)));
constexpr size_t kBlock = 64, kBatch = 4 * kBlock;

Lanes rotl(Lanes v, int n) { return v << n | v >> (32 - n); }

void quarter(Lanes &a, Lanes &b, Lanes &c, Lanes &d) {
  a += b, d = rotl(d ^ a, 16);
  c += d, b = rotl(b ^ c, 12);
  a += b, d = rotl(d ^ a, 8);
  c += d, b = rotl(b ^ c, 7);
}

// The key stream of blocks counter .. counter+3.
void key_stream(const AeadKey &key, const AeadNonce &nonce, uint32_t counter, uint8_t *out) {
  uint32_t words[16] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};
  for (int i = 0; i < 8; ++i) words[4 + i] = get<uint32_t>(key.data() + 4 * i);
  words[12] = counter;
  for (int i = 0; i < 3; ++i) words[13 + i] = get<uint32_t>(nonce.data() + 4 * i);
  Lanes start[16], x[16];
  for (int i = 0; i < 16; ++i) start[i] = Lanes{words[i], words[i], words[i], words[i]};
  start[12] += Lanes{0, 1, 2, 3};
  std::copy(std::begin(start), std::end(start), std::begin(x));
  for (int round = 0; round < 10; ++round) {
    quarter(x[0], x[4], x[8], x[12]), quarter(x[1], x[5], x[9], x[13]), quarter(x[2], x[6], x[10], x[14]), quarter(x[3], x[7], x[11], x[15]);
    quarter(x[0], x[5], x[10], x[15]), quarter(x[1], x[6], x[11], x[12]), quarter(x[2], x[7], x[8], x[13]), quarter(x[3], x[4], x[9], x[14]);
  }
  for (int i = 0; i < 16; ++i) {
    x[i] += start[i];
    for (size_t block = 0; block < 4; ++block) put(out + block * kBlock + 4 * static_cast<size_t>(i), static_cast<uint32_t>(x[i][block]));
  }
}

// Numbers modulo 2^130 - 5 in limbs of 44, 44 and 42 bits.
class Poly {
 public:
  explicit Poly(const uint8_t *key) {
    const uint64_t t0 = get<uint64_t>(key), t1 = get<uint64_t>(key + 8);
    r_[0] = t0 & 0xffc0fffffff;
    r_[1] = (t0 >> 44 | t1 << 20) & 0xfffffc0ffff;
    r_[2] = t1 >> 24 & 0x00ffffffc0f;
    pad_[0] = get<uint64_t>(key + 16);
    pad_[1] = get<uint64_t>(key + 24);
  }

  // The last block of a part is filled up with zeros (whole = true: the construction of RFC 8439 pads parts), or ended with a one.
  void add(Bytes data, bool whole) {
    for (; data.size() >= 16; data = data.subspan(16)) block(data.data(), uint64_t{1} << 40);
    if (data.empty()) return;
    uint8_t last[16] = {};
    std::copy(data.begin(), data.end(), last);
    if (!whole) last[data.size()] = 1;
    block(last, whole ? uint64_t{1} << 40 : 0);
  }

  AeadTag finish() {
    uint64_t carry = h_[1] >> 44;
    h_[1] &= k44;
    for (int i = 0; i < 2; ++i) {
      h_[2] += carry, carry = h_[2] >> 42, h_[2] &= k42;
      h_[0] += carry * 5, carry = h_[0] >> 44, h_[0] &= k44;
      h_[1] += carry, carry = h_[1] >> 44, h_[1] &= k44;
    }
    h_[2] += carry;
    // h - p, taken when it is not negative.
    uint64_t g0 = h_[0] + 5;
    carry = g0 >> 44, g0 &= k44;
    uint64_t g1 = h_[1] + carry;
    carry = g1 >> 44, g1 &= k44;
    const uint64_t g2 = h_[2] + carry - (uint64_t{1} << 42);
    const uint64_t take_g = (g2 >> 63) - 1;
    h_[0] = (h_[0] & ~take_g) | (g0 & take_g);
    h_[1] = (h_[1] & ~take_g) | (g1 & take_g);
    h_[2] = (h_[2] & ~take_g) | (g2 & take_g);
    h_[0] += pad_[0] & k44, carry = h_[0] >> 44, h_[0] &= k44;
    h_[1] += ((pad_[0] >> 44 | pad_[1] << 20) & k44) + carry, carry = h_[1] >> 44, h_[1] &= k44;
    h_[2] += (pad_[1] >> 24 & k42) + carry, h_[2] &= k42;
    AeadTag tag;
    put(tag.data(), h_[0] | h_[1] << 44);
    put(tag.data() + 8, h_[1] >> 20 | h_[2] << 24);
    return tag;
  }

 private:
  __extension__ typedef unsigned __int128 u128;
  static constexpr uint64_t k44 = 0xfffffffffff, k42 = 0x3ffffffffff;
  uint64_t r_[3], h_[3] = {}, pad_[2];

  void block(const uint8_t *m, uint64_t high_bit) {
    const uint64_t t0 = get<uint64_t>(m), t1 = get<uint64_t>(m + 8);
    h_[0] += t0 & k44;
    h_[1] += (t0 >> 44 | t1 << 20) & k44;
    h_[2] += (t1 >> 24 & k42) | high_bit;
    const uint64_t s1 = r_[1] * 20, s2 = r_[2] * 20;
    const auto times = [](uint64_t a, uint64_t b) { return static_cast<u128>(a) * b; };
    u128 d0 = times(h_[0], r_[0]) + times(h_[1], s2) + times(h_[2], s1);
    u128 d1 = times(h_[0], r_[1]) + times(h_[1], r_[0]) + times(h_[2], s2);
    u128 d2 = times(h_[0], r_[2]) + times(h_[1], r_[1]) + times(h_[2], r_[0]);
    d1 += static_cast<uint64_t>(d0 >> 44);
    d2 += static_cast<uint64_t>(d1 >> 44);
    h_[0] = (static_cast<uint64_t>(d0) & k44) + static_cast<uint64_t>(d2 >> 42) * 5;
    h_[1] = (static_cast<uint64_t>(d1) & k44) + (h_[0] >> 44);
    h_[0] &= k44;
    h_[2] = static_cast<uint64_t>(d2) & k42;
  }
};

AeadTag tag_of(const AeadKey &key, const AeadNonce &nonce, Bytes associated, Bytes cipher) {
  uint8_t stream[kBatch];
  key_stream(key, nonce, 0, stream);
  Poly poly(stream);
  poly.add(associated, true);
  poly.add(cipher, true);
  uint8_t sizes[16];
  put(sizes, uint64_t{associated.size()});
  put(sizes + 8, uint64_t{cipher.size()});
  poly.add(sizes, true);
  return poly.finish();
}

}  // namespace

void chacha20(const AeadKey &key, const AeadNonce &nonce, uint32_t counter, std::span<uint8_t> data) {
  uint8_t stream[kBatch];
  for (; !data.empty(); counter += 4) {
    key_stream(key, nonce, counter, stream);
    const size_t take = std::min(kBatch, data.size());
    for (size_t i = 0; i < take; ++i) data[i] ^= stream[i];
    data = data.subspan(take);
  }
}

AeadTag poly1305(const std::array<uint8_t, 32> &key, std::initializer_list<Bytes> parts) {
  Poly poly(key.data());
  for (const Bytes part : parts) poly.add(part, false);
  return poly.finish();
}

AeadTag aead_seal(const AeadKey &key, const AeadNonce &nonce, Bytes associated, std::span<uint8_t> data) {
  chacha20(key, nonce, 1, data);
  return tag_of(key, nonce, associated, data);
}

bool aead_open(const AeadKey &key, const AeadNonce &nonce, Bytes associated, std::span<uint8_t> data, const AeadTag &tag) {
  if (!equal_secret(tag_of(key, nonce, associated, data), tag)) return false;
  chacha20(key, nonce, 1, data);
  return true;
}

}  // namespace ls::kv
