#include "page_sum.h"

#include <cstring>

namespace ls::kv {
namespace {

constexpr size_t kLanes = 8, kStep = 8 * kLanes;
// Baseline instructions add two lanes at once; the compiler cuts this type to what the machine has.
typedef uint64_t Lanes __attribute__((vector_size(16)));

// Invertible in h and in v each: one changed sum always changes the 64 bits before they are folded.
uint64_t mix(uint64_t h, uint64_t v) {
  h = (h ^ v) * 0x9E3779B97F4A7C15u;
  return h ^ h >> 29;
}

}  // namespace

uint32_t page_sum(const void *data, size_t bytes) {
  const auto *p = static_cast<const uint8_t *>(data);
  Lanes a[4] = {}, b[4] = {};
  const auto step = [&](const uint8_t *at) {
    for (int i = 0; i < 4; ++i) {
      Lanes w;
      std::memcpy(&w, at + 16 * i, 16);
      a[i] += w;
      b[i] += a[i];
    }
  };
  size_t left = bytes;
  for (; left >= kStep; left -= kStep, p += kStep) step(p);
  if (left > 0) {
    uint8_t last[kStep] = {};
    std::memcpy(last, p, left);
    step(last);
  }
  uint64_t h = bytes;
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) h = mix(mix(h, a[i][j]), b[i][j]);
  return static_cast<uint32_t>(h ^ h >> 32);
}

}  // namespace ls::kv
