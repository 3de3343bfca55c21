// Every format, shape and row count against a double reference; bitwise equality of rows over row counts, thread counts and calls; every variant this
// machine runs, and the emulated ones always.
#include <cstdlib>

#include "../../native/test/check.h"
#include "../isa.h"
#include "../linear_impl.h"
#include "linear_cases.h"

using namespace ls;
using namespace ls::cpu;

namespace {

std::vector<const LinearKernels *> variants() {
  std::vector<const LinearKernels *> all{&linear_kernels_emu512(), &linear_kernels_emuamx()};
  const CpuFeatures &f = cpu_features();
  if (f.avx2) all.push_back(&linear_kernels_avx2());
  if (f.avx512) all.push_back(&linear_kernels_avx512());
  if (f.vnni) all.push_back(&linear_kernels_avx512vnni());
  if (f.amx) all.push_back(&linear_kernels_amx());
  return all;
}

LinearPtr prepare(const LinearKernels &k, const TensorView &view, ThreadPool &pool) {
  LinearPtr w;
  const Status s = linear_prepare_with(k, view, pool, w);
  if (!s.ok()) check::fail(__FILE__, __LINE__, s.text);
  return w;
}

std::vector<float> forward(ThreadPool &pool, const Linear &w, const float *x, uint32_t m, uint32_t ldx, const float *bias = nullptr) {
  std::vector<float> y(size_t{m} * linear_rows(w), NAN);
  const LinearOut out{&w, bias, y.data(), linear_rows(w), false};
  linear_forward(pool, x, m, ldx, &out, 1);
  return y;
}

bool same_bits(const float *a, const float *b, size_t n) { return std::memcmp(a, b, n * sizeof(float)) == 0; }

// Against the double sum over what the variant is meant to multiply. The bound per output follows from the format: f32 accumulation over K terms of
// |w||x|, 2^-16 of the block maximum per activation where they are 16-bit integers, nothing more where tiles round them to bf16 (the reference rounds too).
void check_against_reference(const LinearKernels &k, const Matrix &matrix, const Linear &w, const std::vector<float> &x, uint32_t m, uint32_t ldx, const std::vector<float> &y) {
  const uint32_t rows = matrix.view.rows, cols = matrix.view.cols;
  const bool tiles = w.path == Linear::Path::tiles, quants = w.path == Linear::Path::quants;
  for (uint32_t t = 0; t < m; ++t) {
    for (uint32_t r = 0; r < rows; ++r) {
      double sum = 0, magnitude = 0, rounding = 0;
      for (uint32_t b = 0; b < cols; b += 32) {
        double top = 0;
        const uint32_t end = std::min(cols, b + 32);
        for (uint32_t c = b; c < end; ++c) top = std::max(top, std::fabs(double{x[size_t{t} * ldx + c]}));
        for (uint32_t c = b; c < end; ++c) {
          const float xv = x[size_t{t} * ldx + c], wv = matrix.dense[size_t{r} * cols + c];
          const double p = double{wv} * double{tiles ? from_bf16(to_bf16(xv)) : xv};
          sum += p, magnitude += std::fabs(p), rounding += std::fabs(double{wv}) * top;
        }
      }
      const double bound = magnitude * 1e-6 + (quants ? rounding * 0.51 / 32767 : 0) + 1e-6;
      const double error = std::fabs(double{y[size_t{t} * rows + r]} - sum);
      if (!(error <= bound)) check::fail(__FILE__, __LINE__, std::string(k.name) + " " + name_of(matrix.view.dtype) + " " + std::to_string(rows) + "x" + std::to_string(cols) + " m=" + std::to_string(m) + " t=" + std::to_string(t) + " row=" + std::to_string(r) + ": error " + check::show(error) + ", bound " + check::show(bound));
    }
  }
}

std::vector<std::pair<uint32_t, uint32_t>> shapes_of(ls_dtype d) {
  if (d <= LS_DTYPE_BF16) return {{1, 1}, {3, 7}, {9, 16}, {17, 31}, {37, 33}, {8, 64}, {70, 96}, {33, 130}, {129, 288}};
  return {{1, 32}, {7, 32}, {8, 64}, {16, 96}, {37, 160}, {129, 288}};
}

void all_row_counts(ls_dtype dtype) {
  ThreadPool one(1), two(2), three(3);
  for (auto [rows, cols] : shapes_of(dtype)) {
    const auto matrix = random_matrix(dtype, rows, cols);
    const uint32_t ldx = cols + 3;
    const std::vector<float> x = random_rows(100, ldx), bias = random_rows(1, rows);
    for (const LinearKernels *k : variants()) {
      const LinearPtr w = prepare(*k, matrix->view, two);
      CHECK_EQ(linear_rows(*w), rows);
      CHECK_EQ(linear_cols(*w), cols);
      // One row at a time on one thread is the yardstick for bits.
      std::vector<float> alone;
      for (uint32_t t = 0; t < 100; ++t) {
        const std::vector<float> y = forward(one, *w, x.data() + size_t{t} * ldx, 1, ldx);
        alone.insert(alone.end(), y.begin(), y.end());
      }
      check_against_reference(*k, *matrix, *w, x, 100, ldx, alone);
      for (uint32_t m : {1u, 2u, 3u, 4u, 5u, 7u, 15u, 16u, 17u, 33u, 100u}) {
        for (ThreadPool *pool : {&one, &two, &three}) {
          const std::vector<float> y = forward(*pool, *w, x.data(), m, ldx);
          if (!same_bits(y.data(), alone.data(), y.size())) check::fail(__FILE__, __LINE__, std::string(k->name) + " " + name_of(dtype) + " " + std::to_string(rows) + "x" + std::to_string(cols) + ": bits differ at m=" + std::to_string(m) + " on " + std::to_string(pool->size()) + " threads");
        }
        // Bias and accumulation: exactly one rounded addition each.
        std::vector<float> y(size_t{m} * (rows + 5)), expected;
        for (float &v : y) v = uniform(-1, 1);
        expected = y;
        for (uint32_t t = 0; t < m; ++t)
          for (uint32_t r = 0; r < rows; ++r) expected[size_t{t} * (rows + 5) + r] += alone[size_t{t} * rows + r] + bias[r];
        const LinearOut out{w.get(), bias.data(), y.data(), rows + 5, true};
        linear_forward(three, x.data(), m, ldx, &out, 1);
        CHECK(same_bits(y.data(), expected.data(), y.size()));
      }
    }
  }
}

}  // namespace

TEST("linear: f32 against the reference, equal bits for any row and thread count") { all_row_counts(LS_DTYPE_F32); }
TEST("linear: f16 against the reference, equal bits for any row and thread count") { all_row_counts(LS_DTYPE_F16); }
TEST("linear: bf16 against the reference, equal bits for any row and thread count") { all_row_counts(LS_DTYPE_BF16); }
TEST("linear: q8_0 against the reference, equal bits for any row and thread count") { all_row_counts(LS_DTYPE_Q8_0); }
TEST("linear: q4_0 against the reference, equal bits for any row and thread count") { all_row_counts(LS_DTYPE_Q4_0); }
TEST("linear: q4_1 against the reference, equal bits for any row and thread count") { all_row_counts(LS_DTYPE_Q4_1); }

TEST("linear: several matrices of mixed formats in one call give the bits of separate calls") {
  ThreadPool one(1), three(3);
  const uint32_t cols = 288;
  const ls_dtype dtypes[] = {LS_DTYPE_Q8_0, LS_DTYPE_BF16, LS_DTYPE_Q4_1, LS_DTYPE_F16, LS_DTYPE_Q4_0, LS_DTYPE_F32, LS_DTYPE_BF16, LS_DTYPE_Q4_0, LS_DTYPE_Q8_0, LS_DTYPE_BF16};  // more than one call's table
  for (const LinearKernels *k : variants()) {
    for (uint32_t m : {1u, 3u, 40u}) {
      const std::vector<float> x = random_rows(m, cols);
      std::vector<std::shared_ptr<Matrix>> matrices;
      std::vector<LinearPtr> ws;
      std::vector<std::vector<float>> ys;
      std::vector<LinearOut> outs;
      for (ls_dtype d : dtypes) {
        const uint32_t rows = 40 + 33 * static_cast<uint32_t>(ws.size());
        matrices.push_back(random_matrix(d, rows, cols));
        ws.push_back(prepare(*k, matrices.back()->view, one));
        ys.emplace_back(size_t{m} * rows, NAN);
        outs.push_back({ws.back().get(), nullptr, ys.back().data(), rows, false});
      }
      linear_forward(three, x.data(), m, cols, outs.data(), static_cast<uint32_t>(outs.size()));
      for (size_t i = 0; i < ws.size(); ++i) {
        const std::vector<float> y = forward(one, *ws[i], x.data(), m, cols);
        CHECK(same_bits(y.data(), ys[i].data(), y.size()));
      }
    }
  }
}

TEST("linear: a long K and many tokens cross token blocks and L2 strips with equal bits") {
  ThreadPool two(2);
  for (ls_dtype d : {LS_DTYPE_BF16, LS_DTYPE_Q8_0, LS_DTYPE_Q4_1}) {
    const auto matrix = random_matrix(d, 24, 4096);
    const std::vector<float> x = random_rows(70, 4096);
    for (const LinearKernels *k : variants()) {
      const LinearPtr w = prepare(*k, matrix->view, two);
      const std::vector<float> all = forward(two, *w, x.data(), 70, 4096);
      for (uint32_t t = 0; t < 70; t += 23) {
        const std::vector<float> y = forward(two, *w, x.data() + size_t{t} * 4096, 1, 4096);
        CHECK(same_bits(y.data(), all.data() + size_t{t} * 24, 24));
      }
    }
  }
}

TEST("linear: quantised extremes neither overflow nor lose exactness") {
  ThreadPool one(1);
  for (ls_dtype d : {LS_DTYPE_Q8_0, LS_DTYPE_Q4_0, LS_DTYPE_Q4_1}) {
    const auto matrix = random_matrix(d, 16, 64);
    const size_t block = d == LS_DTYPE_Q8_0 ? 34 : d == LS_DTYPE_Q4_0 ? 18 : 20, scales = d == LS_DTYPE_Q4_1 ? 4 : 2;
    uint8_t *p = matrix->bytes.data() + 2;
    for (size_t b = 0; b < 32; ++b) {
      const uint16_t one16 = 0x3c00, zero16 = 0;
      std::memcpy(p + b * block, &one16, 2);
      if (d == LS_DTYPE_Q4_1) std::memcpy(p + b * block + 2, &zero16, 2);
      std::memset(p + b * block + scales, d == LS_DTYPE_Q8_0 ? 0x80 : 0xff, block - scales);  // -128 | 15
    }
    const float weight = d == LS_DTYPE_Q8_0 ? -128.0f : d == LS_DTYPE_Q4_0 ? 7.0f : 15.0f;
    for (float sign : {1.0f, -1.0f}) {
      const std::vector<float> x(64, sign * 32767.0f);  // the scale is exactly 1
      for (const LinearKernels *k : variants()) {
        const LinearPtr w = prepare(*k, matrix->view, one);
        for (float y : forward(one, *w, x.data(), 1, 64)) CHECK_EQ(y, 64 * weight * sign * 32767.0f);
      }
    }
  }
}

TEST("linear: zero and tiny activations give zero, a NaN or infinity reaches every output of its row only") {
  ThreadPool one(1);
  for (ls_dtype d : {LS_DTYPE_BF16, LS_DTYPE_F32, LS_DTYPE_Q8_0, LS_DTYPE_Q4_0, LS_DTYPE_Q4_1}) {
    const auto matrix = random_matrix(d, 20, 64);
    for (const LinearKernels *k : variants()) {
      const LinearPtr w = prepare(*k, matrix->view, one);
      std::vector<float> x(64, 0.0f);
      for (float y : forward(one, *w, x.data(), 1, 64)) CHECK_EQ(y, 0.0f);
      std::fill(x.begin(), x.end(), 1e-38f);
      for (float y : forward(one, *w, x.data(), 1, 64)) CHECK(std::fabs(y) < 1e-34f);
      for (float poison : {NAN, INFINITY}) {
        std::vector<float> rows = random_rows(3, 64);
        rows[64 + 37] = poison;
        const std::vector<float> y = forward(one, *w, rows.data(), 3, 64);
        for (uint32_t r = 0; r < 20; ++r) {
          CHECK(std::isfinite(y[r]));
          CHECK(!std::isfinite(y[20 + r]) || matrix->dense[r * 64 + 37] == 0.0f);
          CHECK(std::isfinite(y[40 + r]));
        }
      }
    }
  }
}

TEST("linear_row: the exact dequantised row in every format") {
  ThreadPool two(2);
  for (int d = LS_DTYPE_F32; d <= LS_DTYPE_Q4_1; ++d) {
    const auto matrix = random_matrix(static_cast<ls_dtype>(d), 37, 96);
    for (const LinearKernels *k : variants()) {
      const LinearPtr w = prepare(*k, matrix->view, two);
      std::vector<float> y(96);
      for (uint32_t r = 0; r < 37; ++r) {
        linear_row(*w, r, y.data());
        CHECK(same_bits(y.data(), matrix->dense.data() + size_t{r} * 96, 96));
      }
    }
  }
}

TEST("linear_row: f16 special values") {
  ThreadPool one(1);
  const uint16_t h[] = {0x0000, 0x8000, 0x0001, 0x03ff, 0x0400, 0x3c00, 0xc000, 0x7bff, 0x7c00, 0xfc00};
  const float expected[] = {0.0f, -0.0f, 5.9604645e-8f, 6.0975552e-5f, 6.1035156e-5f, 1.0f, -2.0f, 65504.0f, INFINITY, -INFINITY};
  LinearPtr w = prepare(linear_kernels_emu512(), {reinterpret_cast<const uint8_t *>(h), sizeof(h), LS_DTYPE_F16, 1, 10}, one);
  float y[10];
  linear_row(*w, 0, y);
  CHECK(same_bits(y, expected, 10));
}

TEST("linear: repacked weights take about the bytes of the file") {
  ThreadPool one(1);
  for (ls_dtype d : {LS_DTYPE_Q8_0, LS_DTYPE_Q4_0, LS_DTYPE_Q4_1}) {
    const auto matrix = random_matrix(d, 64, 576);
    for (const LinearKernels *k : variants()) {
      const LinearPtr w = prepare(*k, matrix->view, one);
      CHECK_LE(linear_owned_bytes(*w), matrix->view.bytes * 102 / 100);
      CHECK_LE(matrix->view.bytes, linear_owned_bytes(*w));
    }
  }
}

TEST("linear_prepare: refuses what it cannot multiply, by name") {
  ThreadPool one(1);
  LinearPtr w;
  const auto matrix = random_matrix(LS_DTYPE_Q8_0, 4, 32);
  TensorView view = matrix->view;
  view.cols = 40;
  Status s = linear_prepare(view, one, w);
  CHECK_EQ(s.code, LS_INVALID);
  CHECK(s.text.find("multiple of 32") != std::string::npos);
  view = matrix->view;
  view.bytes -= 1;
  s = linear_prepare(view, one, w);
  CHECK_EQ(s.code, LS_INVALID);
  CHECK(s.text.find("expected 136") != std::string::npos);
  view = matrix->view;
  view.rows = 0;
  CHECK_EQ(linear_prepare(view, one, w).code, LS_INVALID);
  CHECK(!w);
}

TEST("detect_isa: the variable forces an available variant and refuses the rest by name") {
  const char *old = std::getenv("LAYERSCALE_CPU_ISA");
  const std::string saved = old ? old : "";
  for (Isa isa : available_isas()) {
    setenv("LAYERSCALE_CPU_ISA", isa_name(isa), 1);
    Isa found;
    CHECK(detect_isa(found).ok());
    CHECK(found == isa);
    const LinearKernels *k = nullptr;
    CHECK(linear_kernels(k).ok());
    CHECK_EQ(std::string(k->name).substr(0, std::strlen(isa_name(isa))), isa_name(isa));
  }
  for (const char *name : {"avx2", "avx512", "amx", "sse9"}) {
    bool present = false;
    for (Isa isa : available_isas()) present |= std::string(isa_name(isa)) == name;
    if (present) continue;
    setenv("LAYERSCALE_CPU_ISA", name, 1);
    Isa found;
    const Status s = detect_isa(found);
    CHECK_EQ(s.code, LS_UNSUPPORTED);
    CHECK(s.text.find(std::string("LAYERSCALE_CPU_ISA=") + name) != std::string::npos);
    CHECK(s.text.find(isa_name(available_isas().front())) != std::string::npos);
  }
  if (old) setenv("LAYERSCALE_CPU_ISA", saved.c_str(), 1);
  else unsetenv("LAYERSCALE_CPU_ISA");
}
