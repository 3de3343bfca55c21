// Random matrices in the layouts of the files, with the weights they stand for.
#pragma once
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "../linear_impl.h"

namespace ls::cpu {

inline std::mt19937 &rng() {
  static std::mt19937 engine(20240611);
  return engine;
}
inline float uniform(float lo, float hi) { return std::uniform_real_distribution<float>(lo, hi)(rng()); }

inline uint16_t to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
// Round to nearest even within f16's normal range, by search among the two neighbours: independent of the code under test but for f16_to_f32.
inline uint16_t to_f16(float f) {
  uint16_t best = 0;
  const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
  const float a = std::fabs(f);
  uint16_t lo = 0, hi = 0x7bff;
  while (lo < hi) {
    const uint16_t mid = static_cast<uint16_t>((lo + hi + 1) / 2);
    if (f16_to_f32(mid) <= a) lo = mid;
    else hi = static_cast<uint16_t>(mid - 1);
  }
  best = lo;
  if (lo < 0x7bff && f16_to_f32(static_cast<uint16_t>(lo + 1)) - a < a - f16_to_f32(lo)) best = static_cast<uint16_t>(lo + 1);
  return static_cast<uint16_t>(best | sign);
}

inline const char *name_of(ls_dtype d) {
  static const char *names[] = {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"};
  return names[d];
}

// Bytes of a random matrix in a file's layout, at an offset that leaves them only 2-byte aligned, with the weights they stand for.
struct Matrix {
  std::vector<uint8_t> bytes;
  std::vector<float> dense;
  TensorView view;
};

inline std::shared_ptr<Matrix> random_matrix(ls_dtype dtype, uint32_t rows, uint32_t cols) {
  auto m = std::make_shared<Matrix>();
  std::vector<uint8_t> &b = m->bytes;
  b.assign(2, 0);  // the vector's memory is 16-byte aligned, the matrix is not
  const auto put16 = [&](uint16_t h) { b.push_back(static_cast<uint8_t>(h)), b.push_back(static_cast<uint8_t>(h >> 8)); };
  if (dtype <= LS_DTYPE_BF16) {
    for (size_t i = 0; i < size_t{rows} * cols; ++i) {
      const float f = uniform(-1, 1);
      if (dtype == LS_DTYPE_F32) {
        m->dense.push_back(f);
        uint8_t raw[4];
        std::memcpy(raw, &f, 4);
        b.insert(b.end(), raw, raw + 4);
      } else if (dtype == LS_DTYPE_F16) {
        put16(to_f16(f)), m->dense.push_back(f16_to_f32(to_f16(f)));
      } else {
        put16(to_bf16(f)), m->dense.push_back(from_bf16(to_bf16(f)));
      }
    }
  } else {
    for (size_t block = 0; block < size_t{rows} * cols / 32; ++block) {
      const uint16_t d = to_f16(uniform(0.001f, 0.02f)), mm = to_f16(uniform(-0.2f, 0.05f));
      put16(d);
      if (dtype == LS_DTYPE_Q4_1) put16(mm);
      uint8_t q[32];
      for (uint8_t &v : q) v = static_cast<uint8_t>(rng()());
      if (dtype == LS_DTYPE_Q8_0) {
        b.insert(b.end(), q, q + 32);
        for (uint8_t v : q) m->dense.push_back(f16_to_f32(d) * static_cast<float>(static_cast<int8_t>(v)));
      } else {
        b.insert(b.end(), q, q + 16);
        for (int k = 0; k < 32; ++k) {
          const int v = k < 16 ? q[k] & 15 : q[k - 16] >> 4;
          m->dense.push_back(dtype == LS_DTYPE_Q4_1 ? f16_to_f32(d) * static_cast<float>(v) + f16_to_f32(mm) : f16_to_f32(d) * static_cast<float>(v - 8));
        }
      }
    }
  }
  m->view = {b.data() + 2, b.size() - 2, dtype, rows, cols};
  return m;
}

inline std::vector<float> random_rows(uint32_t m, uint32_t ld) {
  std::vector<float> x(size_t{m} * ld);
  for (float &v : x) v = uniform(-2, 2);
  return x;
}

}  // namespace ls::cpu
