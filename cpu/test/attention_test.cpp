// Paged attention against a double reference, and the promise that blocking, batching, threads and page ids change no bit.
#include <algorithm>
#include <array>
#include <cstring>

#include "check.h"
#include "support.h"

using namespace ls::cpu;
using support::Random;

namespace {

struct Setup {
  AttentionShape shape;
  ls_dtype dtype;
  uint32_t length;
  std::vector<float> q, k, v;  // (length, heads*dim), (length, kv_heads*dim)

  Setup(uint32_t heads, uint32_t kv_heads, uint32_t dim, ls_dtype type, uint32_t n, uint64_t seed) : shape{heads, kv_heads, dim, 1.0f / std::sqrt(static_cast<float>(dim))}, dtype(type), length(n) {
    Random random(seed);
    q = random.normals(static_cast<size_t>(n) * heads * dim, 2);
    k = random.normals(static_cast<size_t>(n) * kv_heads * dim, 1.5f);
    v = random.normals(static_cast<size_t>(n) * kv_heads * dim);
  }
  uint32_t q_dim() const { return shape.heads * shape.head_dim; }
  uint32_t kv_dim() const { return shape.kv_heads * shape.head_dim; }
};

float stored(float x, ls_dtype dtype) { return dtype == LS_DTYPE_BF16 ? from_bf16(to_bf16(x)) : x; }

// Tiles round the scaled q (and the weights, which no reference repeats) to bf16.
bool tiles(const AttentionKernels &kernels, const Setup &s) { return std::strstr(kernels.name, "amx") && s.dtype == LS_DTYPE_BF16 && s.shape.head_dim % 32 == 0; }

std::vector<double> reference(const Setup &s, bool rounded) {
  std::vector<double> out(static_cast<size_t>(s.length) * s.q_dim());
  const uint32_t group = s.shape.heads / s.shape.kv_heads, dim = s.shape.head_dim;
  std::vector<double> score(s.length);
  for (uint32_t t = 0; t < s.length; ++t) {
    for (uint32_t h = 0; h < s.shape.heads; ++h) {
      const float *q = &s.q[static_cast<size_t>(t) * s.q_dim() + h * dim];
      double top = -1e300, sum = 0;
      for (uint32_t j = 0; j <= t; ++j) {
        score[j] = 0;
        for (uint32_t d = 0; d < dim; ++d) score[j] += (rounded ? static_cast<double>(from_bf16(to_bf16(q[d] * s.shape.scale))) : static_cast<double>(q[d]) * s.shape.scale) * stored(s.k[static_cast<size_t>(j) * s.kv_dim() + h / group * dim + d], s.dtype);
        top = std::max(top, score[j]);
      }
      for (uint32_t j = 0; j <= t; ++j) sum += score[j] = std::exp(score[j] - top);
      for (uint32_t j = 0; j <= t; ++j)
        for (uint32_t d = 0; d < dim; ++d)
          out[static_cast<size_t>(t) * s.q_dim() + h * dim + d] += score[j] / sum * stored(s.v[static_cast<size_t>(j) * s.kv_dim() + h / group * dim + d], s.dtype);
    }
  }
  return out;
}

// Random page ids, pages full of NaN before use: what is not written must not be seen.
struct Paged {
  KvMemory memory;
  std::vector<int32_t> pages;
  Paged(const Setup &s, uint32_t layers, uint64_t seed) : memory(layers, s.shape.kv_heads, s.shape.head_dim, s.dtype) {
    const uint32_t needed = (s.length + 15) / 16, total = needed + 5;
    CHECK(memory.reserve(total).ok());
    for (uint32_t i = 0; i < total; ++i) pages.push_back(static_cast<int32_t>(i));
    Random random(seed);
    for (uint32_t i = total; i > 1; --i) std::swap(pages[i - 1], pages[random.below(i)]);
    std::memset(memory.layer(0), 0xff, static_cast<size_t>(layers) * total * memory.page_bytes());
  }
  void store(const Setup &s, uint32_t layer, uint32_t from, uint32_t to) {
    for (uint32_t t = from; t < to; ++t) memory.store(layer, static_cast<uint32_t>(pages[t / 16]), t % 16, &s.k[static_cast<size_t>(t) * s.kv_dim()], &s.v[static_cast<size_t>(t) * s.kv_dim()]);
  }
};

// The whole sequence in chunks of `chunk` tokens; K and V are stored chunk by chunk as a step does.
std::vector<float> chunked(const Setup &s, const AttentionKernels &kernels, uint32_t chunk, uint32_t threads, uint64_t seed) {
  const uint32_t layer = seed % 2;
  Paged paged(s, 2, seed);
  ThreadPool pool(threads);
  Attention attention(s.shape, kernels);
  std::vector<float> out(s.q.size(), NAN);
  for (uint32_t start = 0; start < s.length; start += chunk) {
    const uint32_t len = std::min(chunk, s.length - start);
    paged.store(s, layer, start, start + len);
    attention.plan({{0, start, len, paged.pages.data()}}, threads);
    attention.run(pool, paged.memory, layer, &s.q[static_cast<size_t>(start) * s.q_dim()], &out[static_cast<size_t>(start) * s.q_dim()]);
  }
  return out;
}

bool same_bits(const std::vector<float> &a, const std::vector<float> &b) { return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0; }

void check_close(const std::vector<float> &got, const std::vector<double> &want, bool rounded, const std::string &what) {
  const double allowed = rounded ? 1e-2 : 2e-5;
  for (size_t i = 0; i < got.size(); ++i)
    if (!(std::fabs(got[i] - want[i]) <= allowed)) check::fail(__FILE__, __LINE__, what + ": element " + std::to_string(i) + " is " + std::to_string(got[i]) + ", expected " + std::to_string(want[i]));
}

}  // namespace

TEST("attention equals a double reference for every head shape, page dtype and kernel table") {
  const uint32_t shapes[][3] = {{9, 3, 64}, {4, 4, 64}, {8, 1, 64}, {16, 8, 128}, {14, 2, 64}, {10, 2, 80}, {6, 3, 18}, {3, 1, 2}, {2, 1, 512}, {7, 7, 96}};
  const uint32_t lengths[] = {1, 2, 15, 16, 17, 33, 100, 255, 256, 257, 300};
  for (const AttentionKernels *kernels : support::attention_tables()) {
    uint32_t i = 0;
    for (const auto &shape : shapes) {
      for (ls_dtype dtype : {LS_DTYPE_F32, LS_DTYPE_BF16}) {
        for (uint32_t repeat = 0; repeat < 2; ++repeat, ++i) {
          const Setup s(shape[0], shape[1], shape[2], dtype, lengths[i % 11], i);
          const std::string what = std::string(kernels->name) + " " + std::to_string(shape[0]) + "/" + std::to_string(shape[1]) + "x" + std::to_string(shape[2]) + " length " + std::to_string(s.length);
          check_close(chunked(s, *kernels, s.length, 1 + i % 2, i), reference(s, tiles(*kernels, s)), tiles(*kernels, s), what);
        }
      }
    }
  }
}

TEST("attention of 600 keys equals a double reference") {
  for (const AttentionKernels *kernels : support::attention_tables()) {
    for (ls_dtype dtype : {LS_DTYPE_F32, LS_DTYPE_BF16}) {
      const Setup s(6, 2, 64, dtype, 600, 77);
      check_close(chunked(s, *kernels, 600, 2, 5), reference(s, tiles(*kernels, s)), tiles(*kernels, s), kernels->name);
    }
  }
}

TEST("chunks, threads and page ids change no bit of attention") {
  for (const AttentionKernels *kernels : support::attention_tables()) {
    for (const auto &shape : {std::array<uint32_t, 3>{9, 3, 64}, {4, 2, 128}, {3, 3, 80}, {16, 1, 32}}) {
      for (ls_dtype dtype : {LS_DTYPE_F32, LS_DTYPE_BF16}) {
        // The tile unit of the emulation is slow.
        const bool slow = kernels == &kAttention_emuamx;
        if (slow && (dtype == LS_DTYPE_F32 || shape[0] != 9)) continue;
        const uint32_t length = slow ? 290 : 530;
        const Setup s(shape[0], shape[1], shape[2], dtype, length, 9 + shape[2]);
        const std::vector<float> whole = chunked(s, *kernels, length, 2, 1);
        for (uint32_t chunk : slow ? std::vector<uint32_t>{1, 31, 100} : std::vector<uint32_t>{1, 3, 16, 31, 100, 256, 529})
          for (uint32_t threads : {1u, 3u}) {
            if (slow && threads > 1 && chunk > 1) continue;
            if (!same_bits(whole, chunked(s, *kernels, chunk, threads, chunk + threads))) check::fail(__FILE__, __LINE__, std::string(kernels->name) + ": chunks of " + std::to_string(chunk) + " with " + std::to_string(threads) + " threads differ");
          }
      }
    }
  }
}

TEST("a sequence has the same bits alone and in a batch") {
  for (const AttentionKernels *kernels : support::attention_tables()) {
    const Setup a(9, 3, 64, LS_DTYPE_BF16, 300, 1), b(9, 3, 64, LS_DTYPE_BF16, 300, 2);
    const std::vector<float> alone = chunked(a, *kernels, 300, 2, 4), other = chunked(b, *kernels, 300, 2, 4);
    // One pool: sequence a uses even pages, b odd ones. A decode of a (last token), a chunk of b, another decode of a prefix of b, a chunk of a.
    KvMemory memory(1, 3, 64, LS_DTYPE_BF16);
    CHECK(memory.reserve(80).ok());
    std::vector<int32_t> pages_a, pages_b;
    for (int32_t i = 0; i < 19; ++i) pages_a.push_back(2 * (18 - i)), pages_b.push_back(2 * i + 1);
    for (uint32_t t = 0; t < 300; ++t) {
      memory.store(0, static_cast<uint32_t>(pages_a[t / 16]), t % 16, &a.k[t * 192], &a.v[t * 192]);
      memory.store(0, static_cast<uint32_t>(pages_b[t / 16]), t % 16, &b.k[t * 192], &b.v[t * 192]);
    }
    const std::vector<AttentionSequence> rows = {{0, 299, 1, pages_a.data()}, {1, 40, 100, pages_b.data()}, {101, 260, 1, pages_b.data()}, {102, 7, 50, pages_a.data()}};
    std::vector<float> q(152 * 576), out(152 * 576), want(152 * 576);
    for (size_t r = 0; r < rows.size(); ++r) {
      const bool first = rows[r].pages == pages_a.data();
      const size_t from = static_cast<size_t>(rows[r].start) * 576, to = static_cast<size_t>(rows[r].first_row) * 576, n = static_cast<size_t>(rows[r].len) * 576;
      std::copy_n((first ? a : b).q.begin() + static_cast<long>(from), n, q.begin() + static_cast<long>(to));
      std::copy_n((first ? alone : other).begin() + static_cast<long>(from), n, want.begin() + static_cast<long>(to));
    }
    ThreadPool pool(2);
    Attention attention(a.shape, *kernels);
    attention.plan(rows, 2);
    attention.run(pool, memory, 0, q.data(), out.data());
    CHECK(same_bits(out, want));
  }
}

TEST("KV memory refuses what it cannot map and a second pool") {
  KvMemory memory(4, 2, 64, LS_DTYPE_F32);
  CHECK_EQ(memory.reserve(0).code, LS_INVALID);
  CHECK_EQ(memory.page_bytes(), size_t{2 * 2 * 16 * 64 * 4});
  CHECK(memory.reserve(1000000).ok());  // 64 GiB of untouched pages cost nothing
  CHECK_EQ(memory.reserve(1).code, LS_STATE);
  KvMemory vast(1024, 65535, 512, LS_DTYPE_F32);
  CHECK_EQ(vast.reserve(4294967295u).code, LS_NO_MEMORY);
}

TEST("bf16 rounds to nearest even and keeps NaN") {
  CHECK_EQ(to_bf16(1.0f), 0x3f80);
  CHECK_EQ(to_bf16(1.00390625f), 0x3f80);            // half way: to even
  CHECK_EQ(to_bf16(1.01171875f), 0x3f82);
  CHECK_EQ(to_bf16(-2.5f), 0xc020);
  CHECK(std::isnan(from_bf16(to_bf16(NAN))));
  CHECK(std::isinf(from_bf16(to_bf16(INFINITY))));
}
