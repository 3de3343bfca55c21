// Embedding lookup: a block a token.   table (vocab, hidden) as in the file    x (count, hidden) f32
#include "embedding.h"

#include "../device.h"

namespace ls::cuda {
namespace {

constexpr unsigned kThreads = 256;

LS_DEVICE float half_value(const uint8_t *p) { return __half2float(bits_as<half>(load_global(reinterpret_cast<const uint16_t *>(p)))); }

// Element i of a row that begins at `row`. Rows of quantised blocks are 2-byte aligned.
template <ls_dtype D>
LS_DEVICE float element(const uint8_t *row, uint32_t i) {
  if constexpr (D == LS_DTYPE_F32) {
    return load_global(reinterpret_cast<const float *>(row) + i);
  } else if constexpr (D == LS_DTYPE_F16) {
    return half_value(row + 2 * i);
  } else if constexpr (D == LS_DTYPE_BF16) {
    return bits_as<float>(static_cast<uint32_t>(load_global(reinterpret_cast<const uint16_t *>(row) + i)) << 16);
  } else if constexpr (D == LS_DTYPE_Q8_0) {
    const uint8_t *block = row + i / 32 * 34;
    return half_value(block) * static_cast<float>(static_cast<int8_t>(load_global(block + 2 + i % 32)));
  } else {
    constexpr unsigned kHead = D == LS_DTYPE_Q4_0 ? 2 : 4, kBytes = kHead + 16;
    const uint8_t *block = row + i / 32 * kBytes;
    const unsigned byte = load_global(block + kHead + i % 16);
    const float q = static_cast<float>(i % 32 < 16 ? byte & 15 : byte >> 4);
    // d*q is exact, so a fused multiply-add is no different.
    if constexpr (D == LS_DTYPE_Q4_0) return half_value(block) * (q - 8);
    else return half_value(block) * q + half_value(block + 2);
  }
}

template <ls_dtype D>
LS_KERNEL LS_BOUNDS(kThreads, 1) void embedding_kernel(const uint8_t *table, size_t row_bytes, uint32_t vocab, uint32_t hidden, const int32_t *tokens, const int32_t *carry, float *x) {
  int32_t token = tokens[block_x()];
  if (token < 0) token = carry[~token];
  const uint8_t *row = table + (static_cast<uint32_t>(token) < vocab ? static_cast<size_t>(token) : 0) * row_bytes;
  float *out = x + static_cast<size_t>(block_x()) * hidden;
  for (uint32_t i = thread_x(); i < hidden; i += kThreads) out[i] = element<D>(row, i);
}

}  // namespace

void embedding(Stream stream, const void *table, ls_dtype dtype, uint32_t vocab, uint32_t hidden, const int32_t *tokens, const int32_t *carry, uint32_t count, float *x) {
  const auto run = [&]<ls_dtype D>(size_t row_bytes) { launch(embedding_kernel<D>, Dim{count}, Dim{kThreads}, 0, stream, static_cast<const uint8_t *>(table), row_bytes, vocab, hidden, tokens, carry, x); };
  const size_t blocks = hidden / 32;
  switch (dtype) {
    case LS_DTYPE_F32: return run.template operator()<LS_DTYPE_F32>(size_t{hidden} * 4);
    case LS_DTYPE_F16: return run.template operator()<LS_DTYPE_F16>(size_t{hidden} * 2);
    case LS_DTYPE_BF16: return run.template operator()<LS_DTYPE_BF16>(size_t{hidden} * 2);
    case LS_DTYPE_Q8_0: return run.template operator()<LS_DTYPE_Q8_0>(blocks * 34);
    case LS_DTYPE_Q4_0: return run.template operator()<LS_DTYPE_Q4_0>(blocks * 18);
    case LS_DTYPE_Q4_1: return run.template operator()<LS_DTYPE_Q4_1>(blocks * 20);
  }
}

}  // namespace ls::cuda
