// q, k, v made ready for attention: norm per head, both rope pairings, pages of every type.
#include <algorithm>
#include <random>

#include "attention_cases.h"
#include "../../cpu/ops.h"
#include "kernels/rope.h"

using namespace ls::cuda;
using namespace ls::cuda::cases;

namespace {

struct Case {
  uint32_t heads, kv_heads, dim;
  Element type;
  ls_rope_style style;
  bool norm, fused;
  KvType kv;
  KvScales scales;
};

float round_trip(float x, Element type) { return type == Element::bf16 ? bf16_value(bf16_bits(x)) : x; }

// What a page keeps of x: the nearest value of its type, the largest one beyond its range.
double nearest(double x, KvType type, float scale) {
  if (type == KvType::bf16) return x;  // the caller allows for the rounding
  const double limit = type == KvType::e4m3 ? 448 : 57344;
  return std::clamp(x / scale, -limit, limit) * scale;
}
double step(KvType type) { return type == KvType::bf16 ? 0x1p-8 : type == KvType::e4m3 ? 0x1p-4 : 0x1p-3; }

void run(const Case &c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const KvLayout layout{c.kv_heads, c.dim, c.kv};
  const uint32_t tokens = 5, q_width = c.heads * c.dim, kv_width = c.kv_heads * c.dim, half = c.dim / 2;
  const std::vector<int32_t> places{16 * 2 + 15, 16 * 0 + 0, -1, 16 * 1 + 7, 16 * 2 + 3};
  const uint32_t q_ld = c.fused ? q_width + 2 * kv_width : q_width, kv_ld = c.fused ? q_ld : kv_width;
  std::vector<float> q(size_t{tokens} * q_width), k(size_t{tokens} * kv_width), v(k.size()), q_norm(c.dim), k_norm(c.dim), table(size_t{tokens} * c.dim);
  for (auto *values : {&q, &k, &v})
    for (float &x : *values) x = round_trip(normal(random) * 2, c.type);
  v[0] = round_trip(1e6f, c.type), v[1] = round_trip(-1e6f, c.type);  // beyond the range of fp8
  for (auto *values : {&q_norm, &k_norm})
    for (float &x : *values) x = normal(random);
  for (size_t i = 0; i < table.size() / 2; ++i) {
    const double angle = normal(random) * 3;
    table[2 * i] = static_cast<float>(std::cos(angle)), table[2 * i + 1] = static_cast<float>(std::sin(angle));
  }

  // One fused matrix [q | k | v] or three; the fused one has all rows of q_ld.
  const size_t element = element_bytes(c.type), whole = c.fused ? size_t{tokens} * q_ld : q.size() + k.size() + v.size();
  Guarded<uint8_t> input(whole * element);
  const size_t k_at = c.fused ? q_width : q.size(), v_at = c.fused ? q_width + kv_width : q.size() + k.size();
  const auto put = [&](size_t at, uint32_t ld, uint32_t width, const std::vector<float> &values) {
    for (uint32_t t = 0; t < tokens; ++t)
      for (uint32_t i = 0; i < width; ++i) {
        uint8_t *to = input.data() + (at + size_t{t} * ld + i) * element;
        const float x = values[size_t{t} * width + i];
        const uint16_t bits = bf16_bits(x);
        std::memcpy(to, c.type == Element::bf16 ? static_cast<const void *>(&bits) : &x, element);
      }
  };
  put(0, q_ld, q_width, q), put(k_at, kv_ld, kv_width, k), put(v_at, kv_ld, kv_width, v);

  const Guarded<float> device_q_norm(q_norm), device_k_norm(k_norm), device_table(table);
  const Guarded<int32_t> device_places(places);
  Guarded<uint16_t> q_out(q.size());
  Guarded<uint8_t> pages(3 * layout.page_bytes());
  QkvPrepare args;
  args.q = input.data(), args.k = input.data() + k_at * element, args.v = input.data() + v_at * element;
  args.q_ld = q_ld, args.kv_ld = kv_ld, args.type = c.type, args.q_out = q_out.data();
  if (c.norm) args.q_norm = device_q_norm.data(), args.k_norm = device_k_norm.data();
  args.eps = 1e-6f, args.table = device_table.data(), args.style = c.style, args.places = device_places.data(), args.pages = pages.data();
  args.layout = layout, args.scales = c.scales, args.tokens = tokens, args.heads = c.heads;
  const bool in_place = !c.fused && c.type == Element::bf16;
  if (in_place) args.q_out = input.data();
  qkv_prepare(nullptr, args);
  finish();
  q_out.check_surroundings(), pages.check_surroundings();

  // The CPU's norm and rope in f32, and the same in double.
  const auto head = [&](const float *x, const std::vector<float> &norm, uint32_t t, std::vector<float> &cpu) {
    std::vector<double> y(x, x + c.dim), out(c.dim);
    cpu.assign(x, x + c.dim);
    if (c.norm) {
      double squares = 0;
      for (double one : y) squares += one * one;
      for (uint32_t i = 0; i < c.dim; ++i) y[i] = y[i] / std::sqrt(squares / c.dim + 1e-6) * norm[i];
      ls::cpu::kOps_avx2.rmsnorm(cpu.data(), norm.data(), cpu.data(), c.dim, 1e-6f);
    }
    std::vector<float> cosines(half), sines(half);
    for (uint32_t p = 0; p < half; ++p) {
      const uint32_t a = c.style == LS_ROPE_HALF ? p : 2 * p, b = c.style == LS_ROPE_HALF ? p + half : 2 * p + 1;
      cosines[p] = table[(size_t{t} * half + p) * 2], sines[p] = table[(size_t{t} * half + p) * 2 + 1];
      out[a] = y[a] * cosines[p] - y[b] * sines[p];
      out[b] = y[b] * cosines[p] + y[a] * sines[p];
    }
    ls::cpu::kOps_avx2.rope(cpu.data(), cosines.data(), sines.data(), 1, c.dim, c.style);
    return out;
  };
  std::vector<float> cpu;
  for (uint32_t t = 0; t < tokens; ++t)
    for (uint32_t h = 0; h < c.heads; ++h) {
      const std::vector<double> want = head(&q[size_t{t} * q_width + h * c.dim], q_norm, t, cpu);
      for (uint32_t i = 0; i < c.dim; ++i) {
        const size_t at = size_t{t} * q_width + h * c.dim + i;
        uint16_t bits = q_out[at];
        if (in_place) std::memcpy(&bits, input.data() + 2 * at, 2);
        CHECK_LE(std::fabs(bf16_value(bits) - want[i]), std::fabs(want[i]) * 0x1.02p-8 + 3e-6);
        CHECK_LE(std::fabs(bf16_value(bits) - cpu[i]), std::fabs(cpu[i]) * 0x1.02p-8 + 3e-6);
      }
    }

  const uint32_t row = layout.row_elements();
  std::vector<uint8_t> touched(pages.size());
  for (uint32_t t = 0; t < tokens; ++t) {
    if (places[t] < 0) continue;
    for (uint32_t h = 0; h < c.kv_heads; ++h)
      for (uint32_t side = 0; side < 2; ++side) {
        const float scale = side ? c.scales.v : c.scales.k, *in = &(side ? v : k)[size_t{t} * kv_width + h * c.dim];
        std::vector<double> want(in, in + c.dim);
        if (!side) want = head(in, k_norm, t, cpu);
        for (uint32_t i = 0; i < row; ++i) {
          const size_t at = static_cast<size_t>(places[t] / 16) * layout.page_bytes() + (2 * h + side) * layout.block_bytes() + (static_cast<uint32_t>(places[t]) % 16 * row + i) * layout.element_bytes();
          std::fill_n(&touched[at], layout.element_bytes(), 1);
          uint16_t bits = 0;
          std::memcpy(&bits, &pages[at], layout.element_bytes());
          const double got = c.kv == KvType::bf16 ? bf16_value(bits) : fp8_value(static_cast<uint8_t>(bits), c.kv) * scale;
          if (i >= c.dim) {
            CHECK_EQ(bits, 0);
            continue;
          }
          // V is copied: its rounding is exact.
          if (side && c.kv != KvType::bf16) CHECK_EQ(bits, fp8_bits(static_cast<float>(want[i]) / scale, c.kv));
          if (side && c.kv == KvType::bf16) CHECK_EQ(bits, bf16_bits(static_cast<float>(want[i])));
          const double near = nearest(want[i], c.kv, scale);
          CHECK_LE(std::fabs(got - near), std::fabs(near) * step(c.kv) * 1.01 + 0.01 * scale);
        }
      }
  }
  // Nothing else was written.
  for (size_t i = 0; i < pages.size(); ++i)
    if (!touched[i]) CHECK_EQ(pages[i], 0xff);
}

}  // namespace

TEST("q, k and v: head shapes, pairings, norms, page types, fused and separate matrices, in place") {
  const uint32_t shapes[][3] = {{4, 2, 64}, {9, 3, 80}, {3, 1, 128}, {2, 2, 18}, {1, 1, 2}, {5, 1, 256}, {2, 1, 96}};
  uint64_t i = 0;
  for (const auto &s : shapes)
    for (KvType kv : {KvType::bf16, KvType::e4m3, KvType::e5m2})
      for (ls_rope_style style : {LS_ROPE_HALF, LS_ROPE_INTERLEAVED})
        for (bool norm : {false, true}) {
          ++i;
          run({s[0], s[1], s[2], i % 3 ? Element::bf16 : Element::f32, style, norm, i % 2 == 0, kv, kv == KvType::bf16 ? KvScales{} : KvScales{0.125f, 0.5f}}, i);
        }
}

TEST("q alone by an index of its angles, and k and v alone") {
  const KvLayout layout{1, 64, KvType::bf16};
  std::mt19937_64 random(4);
  std::normal_distribution<float> normal;
  std::vector<float> table(size_t{3} * 64), q(size_t{2} * 64);
  for (float &x : table) x = normal(random);
  for (float &x : q) x = normal(random);
  const Guarded<float> device_table(table), device_q(q);
  const Guarded<int32_t> index(std::vector<int32_t>{2, 0}), places(std::vector<int32_t>{1, 2});
  Guarded<uint16_t> out(q.size());
  Guarded<uint8_t> pages(layout.page_bytes());
  QkvPrepare args;
  args.q = device_q.data(), args.q_ld = 64, args.type = Element::f32, args.q_out = out.data(), args.table = device_table.data(), args.index = index.data();
  args.layout = layout, args.tokens = 2, args.heads = 1;
  qkv_prepare(nullptr, args);
  finish();
  for (uint32_t t = 0; t < 2; ++t)
    for (uint32_t p = 0; p < 32; ++p) {
      const float *angle = &table[(t ? 0 : 2) * 64 + 2 * p], a = q[t * 64 + p], b = q[t * 64 + p + 32];
      CHECK_LE(std::fabs(bf16_value(out[t * 64 + p]) - (a * angle[0] - b * angle[1])), 0.03);
    }
  args.k = args.v = device_q.data(), args.kv_ld = 64, args.q = nullptr, args.q_out = nullptr, args.places = places.data(), args.pages = pages.data();
  qkv_prepare(nullptr, args);
  finish();
  const auto v_at = [&](uint32_t place, uint32_t i) { return *reinterpret_cast<const uint16_t *>(pages.data() + layout.block_bytes() + (place * 64 + i) * 2); };
  for (uint32_t i = 0; i < 64; ++i) {
    CHECK_EQ(v_at(1, i), bf16_bits(q[i]));
    CHECK_EQ(v_at(2, i), bf16_bits(q[64 + i]));
    CHECK_EQ(v_at(0, i), 0xffff);
  }
}
