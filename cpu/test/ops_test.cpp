// Small operations against double references, at sizes around the vector widths.
#include <algorithm>
#include <cstring>

#include "check.h"
#include "support.h"

using namespace ls::cpu;
using support::Random;

namespace {

const uint32_t kSizes[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 576, 577, 1024};

void close(float got, double want, double relative, double absolute, const std::string &what) {
  if (!(std::fabs(got - want) <= relative * std::fabs(want) + absolute)) check::fail(__FILE__, __LINE__, what + " is " + std::to_string(got) + ", expected " + std::to_string(want));
}

}  // namespace

TEST("rmsnorm equals a double reference, also in place") {
  for (const OpsKernels *ops : support::ops_tables()) {
    Random random(1);
    for (uint32_t n : kSizes) {
      const std::vector<float> x = random.normals(n, 3), w = random.normals(n);
      std::vector<float> y(n + 1, 77.0f), z = x;
      ops->rmsnorm(x.data(), w.data(), y.data(), n, 1e-5f);
      ops->rmsnorm(z.data(), w.data(), z.data(), n, 1e-5f);
      double sum = 0;
      for (float v : x) sum += static_cast<double>(v) * v;
      const double scale = 1.0 / std::sqrt(sum / n + 1e-5);
      for (uint32_t i = 0; i < n; ++i) close(y[i], x[i] * scale * w[i], 1e-6, 1e-9, std::string(ops->name) + " rmsnorm of " + std::to_string(n));
      CHECK_EQ(y[n], 77.0f);
      CHECK(std::memcmp(y.data(), z.data(), n * 4) == 0);
    }
  }
}

TEST("rope rotates pairs of both styles") {
  for (const OpsKernels *ops : support::ops_tables()) {
    Random random(2);
    for (uint32_t dim : {2u, 4u, 18u, 64u, 80u, 128u, 512u}) {
      for (ls_rope_style style : {LS_ROPE_HALF, LS_ROPE_INTERLEAVED}) {
        const uint32_t heads = 3, half = dim / 2;
        std::vector<float> x = random.normals(heads * dim), cos(half), sin(half);
        const std::vector<float> before = x;
        for (uint32_t i = 0; i < half; ++i) {
          const float angle = random.uniform() * 6;
          cos[i] = std::cos(angle), sin[i] = std::sin(angle);
        }
        ops->rope(x.data(), cos.data(), sin.data(), heads, dim, style);
        for (uint32_t h = 0; h < heads; ++h) {
          for (uint32_t i = 0; i < half; ++i) {
            const uint32_t a = h * dim + (style == LS_ROPE_HALF ? i : 2 * i), b = style == LS_ROPE_HALF ? a + half : a + 1;
            close(x[a], static_cast<double>(before[a]) * cos[i] - static_cast<double>(before[b]) * sin[i], 1e-6, 1e-6, "first of pair");
            close(x[b], static_cast<double>(before[b]) * cos[i] + static_cast<double>(before[a]) * sin[i], 1e-6, 1e-6, "second of pair");
          }
        }
      }
    }
  }
}

TEST("silu times up equals a double reference, extremes included") {
  for (const OpsKernels *ops : support::ops_tables()) {
    Random random(3);
    for (uint32_t n : kSizes) {
      std::vector<float> gate = random.normals(n, 5);
      const std::vector<float> up = random.normals(n);
      const float extremes[] = {0.0f, -0.0f, 100.0f, -100.0f, 1e30f, -1e30f, -87.5f, -88.5f};
      for (uint32_t i = 0; i < 8 && i < n; ++i) gate[i * (n / 8 ? n / 8 : 1) % n] = extremes[i];
      std::vector<float> out(n + 1, 5.0f);
      ops->silu_mul(gate.data(), up.data(), out.data(), n);
      for (uint32_t i = 0; i < n; ++i) close(out[i], gate[i] / (1.0 + std::exp(-static_cast<double>(gate[i]))) * up[i], 1e-6, 1e-30, std::string(ops->name) + " silu of " + std::to_string(gate[i]));
      CHECK_EQ(out[n], 5.0f);
    }
  }
}

TEST("logit statistics: largest, lowest index of ties, sum of exp, NaN and infinities") {
  for (const OpsKernels *ops : support::ops_tables()) {
    Random random(4);
    for (uint32_t n : kSizes) {
      std::vector<float> x = random.normals(n, 4);
      const uint32_t a = random.below(n), b = random.below(n);
      x[a] = x[b] = 30.0f;
      const LogitStats s = ops->logit_stats(x.data(), n);
      CHECK(!s.broken);
      CHECK_EQ(s.largest, 30.0f);
      CHECK_EQ(s.index, std::min(a, b));
      double sum = 0;
      for (float v : x) sum += std::exp(static_cast<double>(v) - 30.0);
      close(s.sum, sum, 1e-5, 0, "sum");
      for (float bad : {NAN, INFINITY}) {
        for (uint32_t at : {0u, n / 2, n - 1}) {
          std::vector<float> y = x;
          y[at] = bad;
          CHECK(ops->logit_stats(y.data(), n).broken);
        }
      }
      std::vector<float> y = x;
      y[(a + 1) % n] = -INFINITY;
      CHECK(!ops->logit_stats(y.data(), n).broken);
    }
  }
}

TEST("weights are exp of scaled distances and their sum") {
  for (const OpsKernels *ops : support::ops_tables()) {
    Random random(5);
    for (uint32_t n : kSizes) {
      const std::vector<float> x = random.normals(n, 4);
      std::vector<float> w(n + 1, 9.0f);
      const float sum = ops->weigh(x.data(), 20.0f, 0.7f, w.data(), n);
      double total = 0;
      for (uint32_t i = 0; i < n; ++i) {
        const double want = std::exp((static_cast<double>(x[i]) - 20.0) * 0.7f);
        close(w[i], want, 3e-6, 0, "weight");
        total += want;
      }
      close(sum, total, 1e-5, 0, "sum");
      CHECK_EQ(w[n], 9.0f);
    }
  }
}

TEST("find_above finds the first value over the threshold") {
  for (const OpsKernels *ops : support::ops_tables()) {
    for (uint32_t n : kSizes) {
      const std::vector<float> low(n, 1.0f);
      CHECK_EQ(ops->find_above(low.data(), 0, n, 1.0f), n);
      CHECK_EQ(ops->find_above(low.data(), n, n, 0.0f), n);
      for (uint32_t at = 0; at < n; ++at) {
        std::vector<float> x = low;
        x[at] = 2.0f;
        x[n - 1] = std::max(x[n - 1], 1.5f);
        CHECK_EQ(ops->find_above(x.data(), 0, n, 1.0f), at);
        CHECK_EQ(ops->find_above(x.data(), at, n, 1.75f), at);
        if (at + 1 < n) CHECK_EQ(ops->find_above(x.data(), at + 1, n, 1.0f), n - 1);
      }
    }
  }
}
