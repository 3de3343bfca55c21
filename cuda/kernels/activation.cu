// Gated activation, four elements a thread.   gate, up (rows, n), ld apart    out (rows, n) bf16
#include "activation.h"

#include "elements.cuh"

namespace ls::cuda {
namespace {

constexpr unsigned kThreads = 256;

LS_DEVICE float silu(float x) { return divide_fast(x, 1.0f + exp_fast(-x)); }

template <class T, bool kVector>
LS_KERNEL LS_BOUNDS(kThreads, 1) void silu_mul_kernel(const T *gate, const T *up, uint32_t ld, bf16 *out, uint32_t n) {
  constexpr uint32_t kWidth = kVector ? 4 : 1;
  const uint32_t i = (block_y() * kThreads + thread_x()) * kWidth;
  if (i >= n) return;
  const size_t row = block_x(), in = row * ld + i, to = row * n + i;
  if constexpr (kVector) {
    Float4 g = load_elements4(gate + in);
    const Float4 u = load_elements4(up + in);
    for (int e = 0; e < 4; ++e) g.v[e] = silu(g.v[e]) * u.v[e];
    store_elements4(out + to, g);
  } else {
    store_element(out + to, silu(load_element(gate + in)) * load_element(up + in));
  }
}

template <class T>
void run(Stream stream, const void *gate, const void *up, uint32_t ld, void *out, uint32_t rows, uint32_t n) {
  const auto *g = static_cast<const T *>(gate), *u = static_cast<const T *>(up);
  // Halves of one matrix are aligned to four elements only where n is.
  if (n % 4 == 0 && ld % 4 == 0) launch(silu_mul_kernel<T, true>, Dim{rows, (n / 4 + kThreads - 1) / kThreads}, Dim{kThreads}, 0, stream, g, u, ld, static_cast<bf16 *>(out), n);
  else launch(silu_mul_kernel<T, false>, Dim{rows, (n + kThreads - 1) / kThreads}, Dim{kThreads}, 0, stream, g, u, ld, static_cast<bf16 *>(out), n);
}

}  // namespace

void silu_mul(Stream stream, const void *gate, const void *up, uint32_t ld, Element type, void *out, uint32_t rows, uint32_t n) {
  type == Element::f32 ? run<float>(stream, gate, up, ld, out, rows, n) : run<bf16>(stream, gate, up, ld, out, rows, n);
}

}  // namespace ls::cuda
