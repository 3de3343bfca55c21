#include "kv_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

namespace ls::cpu {

uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

namespace {

// The same for a row, without branches so that the compiler makes vectors of it.
void to_bf16(const float *from, uint16_t *to, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    const uint32_t quiet = bits >> 16 | 0x40u, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const uint32_t nan = -static_cast<uint32_t>((bits & 0x7fffffffu) > 0x7f800000u);
    to[i] = static_cast<uint16_t>((quiet & nan) | (rounded & ~nan));
  }
}

}  // namespace

float from_bf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// The last vector of a row of the last page may read over the end.
constexpr size_t kTail = 4096;

KvMemory::KvMemory(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, ls_dtype dtype)
    : layers_(layers), kv_heads_(kv_heads), head_dim_(head_dim), dtype_(dtype) {
  block_bytes_ = static_cast<size_t>(kPageTokens) * head_dim * (dtype == LS_DTYPE_BF16 ? 2 : 4);
  page_bytes_ = 2 * block_bytes_ * kv_heads;
}

KvMemory::~KvMemory() {
  if (base_) munmap(base_, mapped_);
}

Status KvMemory::reserve(uint32_t pages) {
  if (base_) return Status::fail(LS_STATE, "the KV pool exists already");
  if (!pages) return Status::fail(LS_INVALID, "pages is 0, expected at least 1");
  size_t per_layer = 0, total = 0;
  if (__builtin_mul_overflow(static_cast<size_t>(pages), page_bytes_, &per_layer) || __builtin_mul_overflow(per_layer, static_cast<size_t>(layers_), &total))
    return Status::fail(LS_NO_MEMORY, std::to_string(pages) + " KV pages do not fit the address space");
  void *mapped = mmap(nullptr, total + kTail, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED)
    return Status::fail(LS_NO_MEMORY, "cannot reserve " + std::to_string(total) + " bytes for " + std::to_string(pages) + " KV pages: " + std::strerror(errno));
  base_ = static_cast<uint8_t *>(mapped);
  mapped_ = total + kTail;
  pages_ = pages;
  return Status::good();
}

void KvMemory::copy(uint32_t from, uint32_t to) const {
  for (uint32_t l = 0; l < layers_; ++l) std::memcpy(layer(l) + to * page_bytes_, layer(l) + from * page_bytes_, page_bytes_);
}

void KvMemory::store(uint32_t layer_index, uint32_t page, uint32_t slot, const float *k, const float *v) const {
  uint8_t *block = layer(layer_index) + page * page_bytes_;
  const uint32_t d_count = head_dim_;
  for (uint32_t h = 0; h < kv_heads_; ++h, k += d_count, v += d_count) {
    uint8_t *k_block = block, *v_block = block + block_bytes_;
    block += 2 * block_bytes_;
    if (slot == 0) std::memset(v_block, 0, block_bytes_);
    if (dtype_ == LS_DTYPE_BF16) {
      uint16_t k_half[LS_MAX_HEAD_DIM], v_half[LS_MAX_HEAD_DIM];
      to_bf16(k, k_half, d_count);
      to_bf16(v, v_half, d_count);
      uint8_t *k_pair = k_block + slot * 4;
      for (uint32_t d = 0; d < d_count; d += 2, k_pair += kPageTokens * 4) std::memcpy(k_pair, k_half + d, 4);
      uint16_t *vb = reinterpret_cast<uint16_t *>(v_block) + static_cast<size_t>(slot / 2) * d_count * 2 + (slot & 1);
      for (uint32_t d = 0; d < d_count; ++d) vb[2 * static_cast<size_t>(d)] = v_half[d];
    } else {
      float *kb = reinterpret_cast<float *>(k_block) + slot;
      for (uint32_t d = 0; d < d_count; ++d) kb[static_cast<size_t>(d) * kPageTokens] = k[d];
      std::memcpy(reinterpret_cast<float *>(v_block) + static_cast<size_t>(slot) * d_count, v, static_cast<size_t>(d_count) * 4);
    }
  }
}

}  // namespace ls::cpu
