#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

// state: the register, not inverted.
uint32_t portable(uint32_t state, const uint8_t *p, size_t n) {
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    v ^= state;
    state = kTable[7][v & 0xff] ^ kTable[6][v >> 8 & 0xff] ^ kTable[5][v >> 16 & 0xff] ^ kTable[4][v >> 24 & 0xff] ^ kTable[3][v >> 32 & 0xff] ^ kTable[2][v >> 40 & 0xff] ^
            kTable[1][v >> 48 & 0xff] ^ kTable[0][v >> 56];
  }
  for (; n > 0; --n) state = state >> 8 ^ kTable[0][(state ^ *p++) & 0xff];
  return state;
}

#if defined(__x86_64__)
// Two ways side by side, since they use different units of the core: carry-less multiplication folds the first part of a block, 64 bytes a
// step, while the crc32 instruction takes the second part, 40 bytes a step in one chain. Both are then put together.
constexpr size_t kSteps = 32, kFolded = 64 * kSteps, kChained = 40 * kSteps;

// x^n modulo the polynomial; bit 31 is x^0.
uint32_t x_power(uint32_t n) {
  uint32_t v = 0x80000000u;
  for (; n > 0; --n) v = v & 1 ? v >> 1 ^ kPolynomial : v >> 1;
  return v;
}

// A multiplication of 64-bit halves brings x^33 with it, so a half moves by D bits with x^(D - 33), the low one, which stands 64 bits before
// the other, with x^(D + 31).
struct Constants {
  uint64_t far_low = x_power(512 + 31), far_high = x_power(512 - 33);    // 64 bytes
  uint64_t near_low = x_power(128 + 31), near_high = x_power(128 - 33);  // 16 bytes
  std::array<std::array<uint32_t, 256>, 4> chained{};                    // the register's bytes after kChained zero bytes
  Constants() {
    for (uint32_t byte = 0; byte < 4; ++byte)
      for (uint32_t bit = 0; bit < 8; ++bit) {
        uint32_t image = uint32_t{1} << (8 * byte + bit);
        for (size_t i = 0; i < kChained; ++i) image = image >> 8 ^ kTable[0][image & 0xff];
        for (uint32_t b = 0; b < 256; ++b)
          if (b >> bit & 1) chained[byte][b] ^= image;
      }
  }
};

__attribute__((target("sse4.2,pclmul"))) inline __m128i fold(__m128i x, __m128i k, __m128i next) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next);
}

__attribute__((target("sse4.2,pclmul"))) uint32_t hardware(uint32_t state, const uint8_t *p, size_t n) {
  static const Constants c;
  const __m128i far = _mm_set_epi64x(static_cast<int64_t>(c.far_high), static_cast<int64_t>(c.far_low));
  const __m128i near = _mm_set_epi64x(static_cast<int64_t>(c.near_high), static_cast<int64_t>(c.near_low));
  const auto word = [](const uint8_t *at) {
    uint64_t v;
    std::memcpy(&v, at, 8);
    return v;
  };
  const auto load = [](const uint8_t *at) __attribute__((target("sse4.2,pclmul"))) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(at)); };
  for (; n >= kFolded + kChained; n -= kFolded + kChained, p += kFolded + kChained) {
    const uint8_t *folded = p, *chained = p + kFolded;
    __m128i x0 = _mm_xor_si128(load(folded), _mm_cvtsi32_si128(static_cast<int>(state)));
    __m128i x1 = load(folded + 16), x2 = load(folded + 32), x3 = load(folded + 48);
    uint64_t chain = 0;
    for (size_t step = 0;; ++step) {
      for (size_t i = 0; i < 40; i += 8) chain = _mm_crc32_u64(chain, word(chained + i));
      if (step == kSteps - 1) break;
      folded += 64;
      chained += 40;
      x0 = fold(x0, far, load(folded));
      x1 = fold(x1, far, load(folded + 16));
      x2 = fold(x2, far, load(folded + 32));
      x3 = fold(x3, far, load(folded + 48));
    }
    const __m128i x = fold(fold(fold(x0, near, x1), near, x2), near, x3);
    const auto first = static_cast<uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(x))), static_cast<uint64_t>(_mm_extract_epi64(x, 1))));
    state = c.chained[0][first & 0xff] ^ c.chained[1][first >> 8 & 0xff] ^ c.chained[2][first >> 16 & 0xff] ^ c.chained[3][first >> 24] ^ static_cast<uint32_t>(chain);
  }
  uint64_t rest = state;
  for (; n >= 8; n -= 8, p += 8) rest = _mm_crc32_u64(rest, word(p));
  state = static_cast<uint32_t>(rest);
  for (; n > 0; --n) state = _mm_crc32_u8(state, *p++);
  return state;
}
#endif

}  // namespace

uint32_t crc32c_portable(uint32_t crc, const void *data, size_t bytes) { return ~portable(~crc, static_cast<const uint8_t *>(data), bytes); }

uint32_t crc32c(uint32_t crc, const void *data, size_t bytes) {
#if defined(__x86_64__)
  static const bool supported = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
  if (supported) return ~hardware(~crc, static_cast<const uint8_t *>(data), bytes);
#endif
  return crc32c_portable(crc, data, bytes);
}

}  // namespace ls::kv
