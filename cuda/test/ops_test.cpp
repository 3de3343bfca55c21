// The small operations against double precision, and against the CPU's where it has them.
#include <algorithm>
#include <cmath>
#include <random>

#include "attention_cases.h"
#include "../../cpu/ops.h"
#include "kernels/activation.h"
#include "kernels/embedding.h"
#include "kernels/page_copy.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"

using namespace ls::cuda;
using cases::bf16_bits;
using cases::bf16_value;

namespace {

std::mt19937_64 random_source(7);

std::vector<float> normals(size_t n, float scale = 1) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> out(n);
  for (float &x : out) x = normal(random_source);
  return out;
}
// Bytes of values in an element type; the values become what was kept.
std::vector<uint8_t> stored(std::vector<float> &values, Element type) {
  std::vector<uint8_t> out(values.size() * element_bytes(type));
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == Element::bf16) {
      const uint16_t bits = bf16_bits(values[i]);
      std::memcpy(&out[2 * i], &bits, 2);
      values[i] = bf16_value(bits);
    } else {
      std::memcpy(&out[4 * i], &values[i], 4);
    }
  }
  return out;
}
float element_at(const uint8_t *p, size_t i, Element type) {
  uint32_t bits = 0;
  if (type == Element::bf16) return std::memcpy(&bits, p + 2 * i, 2), bf16_value(static_cast<uint16_t>(bits));
  return std::memcpy(&bits, p + 4 * i, 4), bits_as<float>(bits);
}
// Within rounding to bf16 (or f32) of what was computed in double.
void check_rounded(float got, double want, Element type, double size = 0) {
  CHECK_LE(std::fabs(got - want), std::max(std::fabs(want), size) * (type == Element::bf16 ? 0x1.04p-8 : 2e-6) + 1e-30);
}

}  // namespace

TEST("embedding: exact rows of every dtype, carried tokens") {
  for (ls_dtype dtype : {LS_DTYPE_F32, LS_DTYPE_F16, LS_DTYPE_BF16, LS_DTYPE_Q8_0, LS_DTYPE_Q4_0, LS_DTYPE_Q4_1}) {
    const bool quantised = dtype >= LS_DTYPE_Q8_0;
    for (uint32_t hidden : quantised ? std::vector<uint32_t>{32, 96, 576} : std::vector<uint32_t>{1, 33, 300}) {
      const uint32_t vocab = 11;
      std::vector<uint8_t> bytes;
      std::vector<float> values;
      const auto put16 = [&](uint16_t h) { bytes.push_back(static_cast<uint8_t>(h)), bytes.push_back(static_cast<uint8_t>(h >> 8)); };
      const auto put_half = [&](float f) { return put16(bits_as<uint16_t>(__float2half(f))), __half2float(__float2half(f)); };
      if (!quantised) {
        for (float f : normals(size_t{vocab} * hidden)) {
          if (dtype == LS_DTYPE_F16) values.push_back(put_half(f));
          else if (dtype == LS_DTYPE_BF16) put16(bf16_bits(f)), values.push_back(bf16_value(bf16_bits(f)));
          else bytes.resize(bytes.size() + 4), std::memcpy(&bytes[bytes.size() - 4], &f, 4), values.push_back(f);
        }
      } else {
        for (size_t block = 0; block < size_t{vocab} * hidden / 32; ++block) {
          const float d = put_half(0.01f * static_cast<float>(1 + random_source() % 9)), m = dtype == LS_DTYPE_Q4_1 ? put_half(-0.3f) : 0;
          uint8_t q[32];
          for (uint8_t &x : q) x = static_cast<uint8_t>(random_source());
          bytes.insert(bytes.end(), q, q + (dtype == LS_DTYPE_Q8_0 ? 32 : 16));
          for (int i = 0; i < 32; ++i) {
            const int nibble = i < 16 ? q[i] & 15 : q[i - 16] >> 4;
            values.push_back(dtype == LS_DTYPE_Q8_0 ? d * static_cast<int8_t>(q[i]) : dtype == LS_DTYPE_Q4_0 ? d * static_cast<float>(nibble - 8) : d * static_cast<float>(nibble) + m);
          }
        }
      }
      const Guarded<uint8_t> table(bytes);
      const std::vector<int32_t> ids{3, 0, -1, 10, -3, 11, 3}, carried{5, 1, 9};
      const std::vector<int32_t> meant{3, 0, 5, 10, 9, 0, 3};  // an id outside the vocabulary is row 0
      const Guarded<int32_t> tokens(ids), carry(carried);
      Guarded<float> x(ids.size() * hidden);
      embedding(nullptr, table.data(), dtype, vocab, hidden, tokens.data(), carry.data(), static_cast<uint32_t>(ids.size()), x.data());
      finish();
      x.check_surroundings();
      for (size_t t = 0; t < ids.size(); ++t)
        for (uint32_t i = 0; i < hidden; ++i) CHECK_EQ(x[t * hidden + i], values[static_cast<size_t>(meant[t]) * hidden + i]);
    }
  }
}

TEST("rmsnorm: residual addition, rows by index, both element types") {
  const float eps = 1e-5f;
  for (uint32_t n : {1u, 3u, 64u, 100u, 257u, 1024u, 5120u})
    for (int variant = 0; variant < 8; ++variant) {
      const Element delta_type = variant & 1 ? Element::bf16 : Element::f32, y_type = variant & 2 ? Element::bf16 : Element::f32;
      const bool has_delta = variant & 4, indexed = variant % 3 == 0;
      const std::vector<int32_t> index{2, -1, 0, 3};
      const uint32_t rows = 4;
      const std::vector<float> x0 = normals(size_t{rows} * n, 2), weight = normals(n);
      std::vector<float> d = normals(size_t{rows} * n);
      const Guarded<uint8_t> delta(stored(d, delta_type));
      const Guarded<float> w(weight);
      const Guarded<int32_t> device_index(index);
      Guarded<float> x(x0);
      Guarded<uint8_t> y(size_t{rows} * n * element_bytes(y_type));
      rmsnorm(nullptr, {x.data(), has_delta ? delta.data() : nullptr, delta_type, w.data(), indexed ? device_index.data() : nullptr, y.data(), y_type, rows, n, eps});
      finish();
      y.check_surroundings();
      std::vector<bool> read(rows);
      for (uint32_t r = 0; r < rows; ++r) {
        const int32_t from = indexed ? index[r] : static_cast<int32_t>(r);
        if (from < 0) {
          for (size_t i = 0; i < size_t{n} * element_bytes(y_type); ++i) CHECK_EQ(y[r * size_t{n} * element_bytes(y_type) + i], 0xff);
          continue;
        }
        read[static_cast<size_t>(from)] = true;
        std::vector<double> sum(n);
        double squares = 0;
        std::vector<float> cpu_in(n), cpu_out(n);
        for (uint32_t i = 0; i < n; ++i) {
          const size_t at = static_cast<size_t>(from) * n + i;
          cpu_in[i] = has_delta ? x0[at] + d[at] : x0[at];
          CHECK_EQ(x[at], cpu_in[i]);
          sum[i] = cpu_in[i];
          squares += sum[i] * sum[i];
        }
        ls::cpu::kOps_avx2.rmsnorm(cpu_in.data(), weight.data(), cpu_out.data(), n, eps);
        for (uint32_t i = 0; i < n; ++i) {
          const float got = element_at(y.data(), r * size_t{n} + i, y_type);
          check_rounded(got, sum[i] / std::sqrt(squares / n + eps) * weight[i], y_type);
          check_rounded(got, cpu_out[i], y_type);
        }
      }
      for (uint32_t r = 0; r < rows; ++r)
        if (!read[r])
          for (uint32_t i = 0; i < n; ++i) CHECK_EQ(x[r * size_t{n} + i], x0[r * size_t{n} + i]);
    }
}

TEST("gathered rows") {
  const std::vector<int32_t> index{4, 0, -1, 4};
  const Guarded<int32_t> device_index(index);
  for (uint32_t words : {1u, 7u, 600u}) {
    const std::vector<float> values = normals(size_t{5} * words);
    const Guarded<float> from(values);
    Guarded<float> to(size_t{4} * words);
    gather_rows(nullptr, from.data(), device_index.data(), to.data(), 4, words * 4);
    finish();
    for (uint32_t r = 0; r < 4; ++r)
      for (uint32_t i = 0; i < words; ++i) {
        if (index[r] < 0) CHECK_EQ(bits_as<uint32_t>(to[size_t{r} * words + i]), 0xffffffffu);
        else CHECK_EQ(to[size_t{r} * words + i], values[static_cast<size_t>(index[r]) * words + i]);
      }
  }
}

TEST("rope angles equal the double reference at any position") {
  std::vector<int32_t> positions{0, 1, 2, 100, 4095, 131071, (1 << 24) - 1};
  for (uint32_t dim : {2u, 18u, 64u, 256u}) {
    std::vector<float> inv_freq;
    for (uint32_t i = 0; i < dim / 2; ++i) inv_freq.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / dim)));
    const Guarded<int32_t> p(positions);
    const Guarded<float> f(inv_freq);
    const uint32_t tokens = static_cast<uint32_t>(positions.size());
    Guarded<float> table(size_t{tokens} * dim);
    rope_table(nullptr, p.data(), f.data(), tokens, dim, 1.25f, table.data());
    finish();
    table.check_surroundings();
    for (uint32_t t = 0; t < tokens; ++t)
      for (uint32_t i = 0; i < dim / 2; ++i) {
        const double angle = static_cast<float>(positions[t]) * inv_freq[i];
        CHECK_LE(std::fabs(table[(size_t{t} * dim / 2 + i) * 2] - 1.25 * std::cos(angle)), 2e-7);
        CHECK_LE(std::fabs(table[(size_t{t} * dim / 2 + i) * 2 + 1] - 1.25 * std::sin(angle)), 2e-7);
      }
  }
}

TEST("silu of gate times up, halves of one matrix and matrices of their own") {
  for (uint32_t n : {1u, 6u, 64u, 1030u, 2048u})
    for (Element type : {Element::f32, Element::bf16})
      for (bool fused : {false, true}) {
        const uint32_t rows = 3, ld = fused ? 2 * n : n;
        std::vector<float> values = normals(size_t{rows} * ld * (fused ? 1 : 2), 4);
        values[0] = 100, values[1] = -100;
        const Guarded<uint8_t> memory(stored(values, type));
        const size_t up = fused ? n : size_t{rows} * n;
        Guarded<uint16_t> out(size_t{rows} * n);
        silu_mul(nullptr, memory.data(), memory.data() + up * element_bytes(type), ld, type, out.data(), rows, n);
        finish();
        out.check_surroundings();
        for (uint32_t r = 0; r < rows; ++r)
          for (uint32_t i = 0; i < n; ++i) {
            const double g = values[size_t{r} * ld + i], u = values[up + size_t{r} * ld + i];
            float cpu = 0;
            ls::cpu::kOps_avx2.silu_mul(&values[size_t{r} * ld + i], &values[up + size_t{r} * ld + i], &cpu, 1);
            check_rounded(bf16_value(out[size_t{r} * n + i]), g / (1 + std::exp(-g)) * u, Element::bf16);
            check_rounded(bf16_value(out[size_t{r} * n + i]), cpu, Element::bf16);
          }
      }
}

TEST("page copies happen in their order, in every layer, as many as the device word says") {
  for (size_t page_bytes : {size_t{32}, size_t{4096}, size_t{5008}}) {
    const uint32_t pages = 6, layer_count = 3;
    std::vector<uint8_t> content(pages * page_bytes);
    for (uint8_t &b : content) b = static_cast<uint8_t>(random_source());
    Guarded<uint8_t> first(content), second(content), third(content);
    const Guarded<void *> layers(std::vector<void *>{first.data(), second.data(), third.data()});
    const std::vector<int32_t> pairs{0, 1, 1, 2, 3, 0, 4, 5};  // the copy of a copy; a source that is overwritten later; one beyond the count
    const Guarded<int32_t> device_pairs(pairs), count(std::vector<int32_t>{3});
    page_copy(nullptr, layers.data(), layer_count, page_bytes, device_pairs.data(), count.data());
    finish();
    std::vector<uint8_t> want = content;
    for (size_t p = 0; p < 3; ++p) std::copy_n(want.begin() + static_cast<long>(pairs[2 * p] * static_cast<long>(page_bytes)), page_bytes, want.begin() + static_cast<long>(pairs[2 * p + 1] * static_cast<long>(page_bytes)));
    for (const auto *layer : {&first, &second, &third}) CHECK(layer->values() == want);
  }
}
