// Random weight matrices in the layouts of files, with the weights they stand for, and their packed form.
#pragma once
#include <cstring>
#include <random>
#include <vector>

#include "device.h"
#include "guarded.h"
#include "kernels/linear.h"

namespace ls::cuda {

inline std::mt19937 &rng() {
  static std::mt19937 engine(20240611);
  return engine;
}
inline float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(rng()); }

inline const char *name_of(ls_dtype dtype) {
  static const char *names[] = {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"};
  return names[dtype];
}
inline constexpr ls_dtype kWeightTypes[] = {LS_DTYPE_F32, LS_DTYPE_F16, LS_DTYPE_BF16, LS_DTYPE_Q8_0, LS_DTYPE_Q4_0, LS_DTYPE_Q4_1};

struct Weights {
  std::vector<uint8_t> bytes;  // begins 2 bytes early: files promise no more than that
  std::vector<double> dense;   // (rows, cols)
  TensorView view;

  Weights(ls_dtype dtype, uint32_t rows, uint32_t cols) : bytes(2) {
    const auto put = [&](const auto &value) {
      const auto *p = reinterpret_cast<const uint8_t *>(&value);
      bytes.insert(bytes.end(), p, p + sizeof value);
    };
    for (size_t i = 0; i < size_t{rows} * cols; ++i) {
      if (dtype <= LS_DTYPE_BF16) {
        const float f = uniform(-1, 1) * (i % 5 ? 1.0f : 1e-3f);
        if (dtype == LS_DTYPE_F32) put(f), dense.push_back(f);
        if (dtype == LS_DTYPE_F16) put(__float2half_rn(f)), dense.push_back(__half2float(__float2half_rn(f)));
        if (dtype == LS_DTYPE_BF16) put(__float2bfloat16_rn(f)), dense.push_back(__bfloat162float(__float2bfloat16_rn(f)));
      } else if (i % 32 == 0) {
        block(dtype, put);
      }
    }
    view = {bytes.data() + 2, bytes.size() - 2, dtype, rows, cols};
  }

 private:
  template <class Put>
  void block(ls_dtype dtype, const Put &put) {
    const __half d = __float2half_rn(uniform(-0.02f, 0.02f)), m = __float2half_rn(uniform(-0.2f, 0.05f));
    put(d);
    if (dtype == LS_DTYPE_Q4_1) put(m);
    uint8_t q[32];
    const size_t count = dtype == LS_DTYPE_Q8_0 ? 32 : 16;
    for (size_t i = 0; i < count; ++i) put(q[i] = static_cast<uint8_t>(rng()()));
    for (size_t i = 0; i < 32; ++i) {
      const int nibble = i < 16 ? q[i] & 15 : q[i - 16] >> 4;
      if (dtype == LS_DTYPE_Q8_0) dense.push_back(static_cast<double>(__half2float(d)) * static_cast<int8_t>(q[i]));
      else if (dtype == LS_DTYPE_Q4_0) dense.push_back(static_cast<double>(__half2float(d)) * (nibble - 8));
      else dense.push_back(static_cast<double>(__half2float(d)) * nibble + static_cast<double>(__half2float(m)));
    }
  }
};

// A packed matrix in guarded memory.
struct Packed {
  Guarded<uint8_t> memory;
  Linear linear;

  Packed(const Weights &weights, const WeightSlice &slice) : memory(linear_bytes(weights.view.dtype, slice.rows, slice.cols)) {
    const Status status = linear_check(weights.view.dtype, slice);
    if (!status.ok()) throw std::runtime_error(status.text);
    // In two parts, as several threads would.
    const uint32_t tiles = linear_tiles(slice.rows), first = tiles / 2;
    linear_pack(weights.view, slice, 0, first, memory.data());
    linear_pack(weights.view, slice, first, tiles - first, memory.data() + first * linear_tile_bytes(weights.view.dtype, slice.cols));
    linear = {weights.view.dtype, slice.rows, slice.cols, memory.data(), nullptr};
  }
  explicit Packed(const Weights &weights) : Packed(weights, {0, weights.view.rows, 0, weights.view.cols}) {}
};

}  // namespace ls::cuda
