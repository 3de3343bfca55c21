#include <sys/mman.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "linear_impl.h"

namespace ls::cpu {
namespace {

size_t block_bytes(ls_dtype dtype) { return dtype == LS_DTYPE_Q8_0 ? 34 : dtype == LS_DTYPE_Q4_0 ? 18 : 20; }

uint16_t read16(const uint8_t *p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

// Where weight k of row r lies in one interleaved block of Q8_0.
size_t q8_place(uint32_t group, uint32_t r, uint32_t k) { return k / 4 * 4 * group + r / 4 * 16 + k % 4 / 2 * 8 + r % 4 * 2 + k % 2; }

uint64_t read64(const uint8_t *p) {
  uint64_t v;
  std::memcpy(&v, p, 8);
  return v;
}
void write16(uint8_t *p, uint64_t v) {
  const uint16_t word = static_cast<uint16_t>(v);
  std::memcpy(p, &word, 2);
}

// One block of row r of a group: bytes with an offset of 128, in pairs (see q8_place). Start-up time is this loop: 8 bytes at once.
void place_q8(const uint8_t *src, uint8_t *dst, uint32_t group, uint32_t r) {
  dst += q8_place(group, r, 0);
  for (uint32_t k = 0; k < 32; k += 8, dst += 8 * group) {
    const uint64_t v = read64(src + k) ^ 0x8080808080808080u;
    write16(dst, v);
    write16(dst + 8, v >> 16);
    write16(dst + 4 * group, v >> 32);
    write16(dst + 4 * group + 8, v >> 48);
  }
}

// Four nibbles, one in the low bits of each 16-bit lane, side by side.
uint64_t gather_nibbles(uint64_t lanes) {
  lanes &= 0x000f000f000f000fu;
  return lanes | lanes >> 12 | lanes >> 24 | lanes >> 36;
}

// The same for 4-bit weights: word h of chunk c holds weights 8c + h, 8c + h + 2, + 4, + 6 from low to high. In the file, low nibbles of the 16 bytes are weights
// 0..15 and high ones 16..31.
void place_q4(const uint8_t *src, uint8_t *dst, uint32_t group, uint32_t r) {
  for (uint32_t half = 0; half < 2; ++half) {
    const uint64_t v = read64(src + 8 * half);
    uint8_t *low = dst + (half * group + r) * 4, *high = dst + ((half + 2) * group + r) * 4;
    write16(low, gather_nibbles(v));
    write16(low + 2, gather_nibbles(v >> 8));
    write16(high, gather_nibbles(v >> 4));
    write16(high + 2, gather_nibbles(v >> 12));
  }
}

}  // namespace

float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) return std::copysign(std::ldexp(static_cast<float>(mantissa), -24), sign ? -1.0f : 1.0f);
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

Status WeightMemory::allocate(size_t bytes) {
  constexpr size_t kHuge = 2u << 20, kBlock = 32u << 20;
  // The block that still has room; it lives as long as a matrix in it.
  static std::mutex mutex;
  static std::weak_ptr<uint8_t> open_block;
  static size_t open_used = 0;
  const size_t rounded = (bytes + 63) / 64 * 64;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<uint8_t> block = open_block.lock();
  size_t offset = open_used;
  if (!block || kBlock - open_used < rounded) {
    const size_t size = rounded < kBlock ? kBlock : (rounded + kHuge - 1) / kHuge * kHuge;
    void *p = std::aligned_alloc(kHuge, size);
    if (!p) return Status::fail(LS_NO_MEMORY, "no memory for " + std::to_string(bytes) + " bytes of weights");
    madvise(p, size, MADV_HUGEPAGE);  // only a wish: without huge pages everything works, slower
    block.reset(static_cast<uint8_t *>(p), [](uint8_t *q) { std::free(q); });
    offset = 0;
    if (size == kBlock) open_block = block;
  }
  if (block == open_block.lock()) open_used = offset + rounded;
  block_ = block;
  data_ = block.get() + offset;
  size_ = bytes;
  return Status::good();
}

Status quant_repack(const TensorView &view, uint32_t group, ThreadPool &pool, QuantMatrix &matrix, WeightMemory &memory) {
  const size_t blocks = view.cols / 32, groups = (view.rows + group - 1) / group, source_row = blocks * block_bytes(view.dtype);
  const size_t scales = view.dtype == LS_DTYPE_Q4_1 ? 2 : 1, quants = view.dtype == LS_DTYPE_Q8_0 ? 32 : 16;  // f16 and bytes per block and row
  matrix.dtype = view.dtype;
  matrix.rows = view.rows, matrix.cols = view.cols, matrix.group = group;
  matrix.quant_offset = (blocks * scales * group * 2 + 63) / 64 * 64;
  matrix.group_bytes = matrix.quant_offset + blocks * quants * group;
  if (Status s = memory.allocate(groups * matrix.group_bytes); !s.ok()) return s;
  matrix.data = memory.data();
  const uint32_t per_chunk = 4;  // groups
  pool.run(static_cast<uint32_t>((groups + per_chunk - 1) / per_chunk), [&](uint32_t chunk) {
    for (size_t g = size_t{chunk} * per_chunk; g < groups && g < size_t{chunk + 1} * per_chunk; ++g) {
      uint8_t *base = memory.data() + g * matrix.group_bytes;
      std::memset(base, 0, matrix.quant_offset);
      if ((g + 1) * group > view.rows) std::memset(base, 0, matrix.group_bytes);
      for (uint32_t r = 0; r < group && g * group + r < view.rows; ++r) {
        const uint8_t *src = view.data + (g * group + r) * source_row;
        for (size_t b = 0; b < blocks; ++b, src += block_bytes(view.dtype)) {
          uint8_t *dst = base + matrix.quant_offset + b * quants * group;
          std::memcpy(base + (b * group + r) * 2, src, 2);
          if (view.dtype == LS_DTYPE_Q4_1) std::memcpy(base + ((blocks + b) * group + r) * 2, src + 2, 2);
          if (view.dtype == LS_DTYPE_Q8_0) place_q8(src + 2, dst, group, r);
          else place_q4(src + 2 * scales, dst, group, r);
        }
      }
    }
  });
  return Status::good();
}

void quant_row(const QuantMatrix &w, uint32_t row, float *y) {
  const size_t blocks = w.cols / 32, g = row / w.group, r = row % w.group;
  const uint8_t *base = w.data + g * w.group_bytes, *quants = base + w.quant_offset;
  for (size_t b = 0; b < blocks; ++b, y += 32) {
    const float d = f16_to_f32(read16(base + (b * w.group + r) * 2));
    if (w.dtype == LS_DTYPE_Q8_0) {
      const uint8_t *q = quants + b * 32 * w.group;
      for (size_t k = 0; k < 32; ++k) y[k] = d * static_cast<float>(q[q8_place(w.group, static_cast<uint32_t>(r), static_cast<uint32_t>(k))] - 128);
      continue;
    }
    const float m = w.dtype == LS_DTYPE_Q4_1 ? f16_to_f32(read16(base + ((blocks + b) * w.group + r) * 2)) : 0.0f;
    const uint8_t *q = quants + b * 16 * w.group;
    for (size_t k = 0; k < 32; ++k) {
      const int v = read16(q + ((k / 8 * w.group + r) * 2 + k % 2) * 2) >> (4 * (k % 8 / 2)) & 15;
      y[k] = w.dtype == LS_DTYPE_Q4_1 ? d * static_cast<float>(v) + m : d * static_cast<float>(v - 8);  // the product is exact: at most 15 bits
    }
  }
}

}  // namespace ls::cpu
