// Every weight type and kernel size against a double-precision product; equal bits whatever the number of rows.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "kernels/linear.h"
#include "weights.h"

using namespace ls;
using namespace ls::cuda;

namespace {

std::vector<bf16> random_x(size_t count) {
  std::vector<bf16> x(count);
  for (bf16 &v : x) v = __float2bfloat16_rn(uniform(-2, 2));
  return x;
}

struct Reference {
  double value = 0, size = 0;  // sum, and sum of magnitudes
};
Reference reference(const Weights &w, const WeightSlice &slice, const bf16 *x, uint32_t output) {
  Reference out;
  const double *row = w.dense.data() + size_t{slice.first_row + output} * w.view.cols + slice.first_col;
  for (uint32_t k = 0; k < slice.cols; ++k) {
    const double product = row[k] * static_cast<double>(__bfloat162float(x[k]));
    out.value += product, out.size += std::fabs(product);
  }
  return out;
}

void expect_close(double found, const Reference &want, Element type, const std::string &what) {
  const double limit = 2e-5 * want.size + 1e-6 + (type == Element::bf16 ? std::fabs(want.value) / 256 : 0);
  if (!(std::fabs(found - want.value) <= limit)) throw std::runtime_error(what + " is " + check::show(found) + ", expected " + check::show(want.value) + " +- " + check::show(limit));
}

// The first `rows` rows of x, f32 outputs.
std::vector<float> forward(const Packed &packed, const std::vector<bf16> &x, uint32_t rows, uint32_t ldx) {
  Guarded<bf16> device_x(std::vector<bf16>(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(size_t{rows - 1} * ldx + packed.linear.cols)));
  Guarded<float> y(size_t{rows} * packed.linear.rows);
  const LinearOut out{&packed.linear, y.data(), Element::f32, packed.linear.rows, false};
  linear_forward(nullptr, device_x.data(), rows, ldx, &out, 1);
  finish();
  y.check_surroundings();
  return y.values();
}

void check_shape(ls_dtype dtype, uint32_t outputs, uint32_t inputs, const std::vector<uint32_t> &counts) {
  const Weights weights(dtype, outputs, inputs);
  const Packed packed(weights);
  const uint32_t most = *std::max_element(counts.begin(), counts.end()), ldx = inputs + 8;
  const std::vector<bf16> x = random_x(size_t{most} * ldx);
  std::vector<float> all;
  for (uint32_t rows : counts) {
    const std::vector<float> y = forward(packed, x, rows, ldx);
    for (uint32_t row = 0; row < rows && row < 20; ++row)
      for (uint32_t o = 0; o < outputs; ++o)
        expect_close(y[size_t{row} * outputs + o], reference(weights, {0, outputs, 0, inputs}, x.data() + size_t{row} * ldx, o), Element::f32,
                     std::string(name_of(dtype)) + " " + std::to_string(rows) + " rows: y[" + std::to_string(row) + "][" + std::to_string(o) + "]");
    // A row has the same bits among few rows and among many.
    const size_t common = std::min(all.size(), y.size());
    CHECK(common == 0 || std::memcmp(all.data(), y.data(), common * sizeof(float)) == 0);
    if (y.size() > all.size()) all = y;
  }
}

const std::vector<uint32_t> kCounts = {1, 2, 7, 8, 9, 16, 17, 64, 65};

}  // namespace

TEST("all types, whole tiles") {
  for (ls_dtype dtype : kWeightTypes) check_shape(dtype, 64, 128, kCounts);
}
TEST("all types, outputs that fill no tile, an odd number of units") {
  for (ls_dtype dtype : kWeightTypes) check_shape(dtype, 77, 96, kCounts);
}
TEST("all types, one unit of inputs") {
  for (ls_dtype dtype : kWeightTypes) check_shape(dtype, 5, 32, {1, 9, 17});
}
TEST("all types, more stages than are under way at once") {
  for (ls_dtype dtype : kWeightTypes) check_shape(dtype, 33, 1504, {1, 16, 17});
}
TEST("float types, inputs that fill no unit") {
  for (ls_dtype dtype : {LS_DTYPE_F32, LS_DTYPE_F16, LS_DTYPE_BF16}) check_shape(dtype, 48, 72, {1, 3, 12, 30}), check_shape(dtype, 16, 8, {1, 20});
}
TEST("large blocks: many rows and outputs, partly filled, several groups of blocks") {
  for (ls_dtype dtype : {LS_DTYPE_BF16, LS_DTYPE_Q8_0, LS_DTYPE_Q4_0, LS_DTYPE_Q4_1}) check_shape(dtype, 1036, 64, {3, 1200});
}

TEST("several matrices at once, bias, residual, bf16 and f32 outputs side by side in one buffer") {
  for (ls_dtype second : {LS_DTYPE_BF16, LS_DTYPE_Q4_1}) {  // one launch, two launches
    const uint32_t inputs = 64, rows = 19;
    const Weights wa(LS_DTYPE_BF16, 40, inputs), wb(second, 24, inputs), wc(LS_DTYPE_BF16, 17, inputs);
    Packed a(wa), b(wb), c(wc);
    std::vector<float> bias(24), old(size_t{rows} * 17);
    for (float &v : bias) v = uniform(-1, 1);
    for (float &v : old) v = uniform(-1, 1);
    Guarded<float> device_bias(bias);
    b.linear.bias = device_bias.data();
    const std::vector<bf16> x = random_x(rows * inputs);
    Guarded<bf16> device_x(x), fused(rows * 64);
    Guarded<float> sum(old);
    const LinearOut outs[] = {{&a.linear, fused.data(), Element::bf16, 64, false}, {&b.linear, fused.data() + 40, Element::bf16, 64, false}, {&c.linear, sum.data(), Element::f32, 17, true}};
    linear_forward(nullptr, device_x.data(), rows, inputs, outs, 3);
    finish();
    sum.check_surroundings(), fused.check_surroundings();
    for (uint32_t r = 0; r < rows; ++r) {
      for (uint32_t o = 0; o < 40; ++o) expect_close(__bfloat162float(fused[r * 64 + o]), reference(wa, {0, 40, 0, inputs}, x.data() + r * inputs, o), Element::bf16, "a");
      for (uint32_t o = 0; o < 24; ++o) {
        Reference want = reference(wb, {0, 24, 0, inputs}, x.data() + r * inputs, o);
        want.value += bias[o];
        expect_close(__bfloat162float(fused[r * 64 + 40 + o]), want, Element::bf16, "b");
      }
      for (uint32_t o = 0; o < 17; ++o) {
        Reference want = reference(wc, {0, 17, 0, inputs}, x.data() + r * inputs, o);
        want.value += old[r * 17 + o];
        expect_close(sum[r * 17 + o], want, Element::f32, "c");
      }
    }
  }
}

TEST("a slice is what a rank of a tensor-parallel group keeps") {
  for (ls_dtype dtype : kWeightTypes) {
    const Weights weights(dtype, 96, 192);
    const WeightSlice slice{48, 40, 64, 96};
    const Packed packed(weights, slice);
    const std::vector<bf16> x = random_x(3 * 96);
    const std::vector<float> y = forward(packed, x, 3, 96);
    for (uint32_t r = 0; r < 3; ++r)
      for (uint32_t o = 0; o < 40; ++o) expect_close(y[r * 40 + o], reference(weights, slice, x.data() + r * 96, o), Element::f32, name_of(dtype));
  }
}

TEST("rows of packed matrices are exact") {
  for (ls_dtype dtype : kWeightTypes) {
    const uint32_t rows = 37, cols = dtype <= LS_DTYPE_BF16 ? 72 : 96;
    const Weights weights(dtype, rows, cols);
    const Packed packed(weights);
    const std::vector<int32_t> ids = {0, 36, 17, 8, -1, -2, 37, 1 << 30};
    const std::vector<int32_t> carry = {23, -5}, want = {0, 36, 17, 8, 23, 0, 0, 0};
    Guarded<int32_t> device_ids(ids), device_carry(carry);
    Guarded<float> y(ids.size() * cols);
    linear_gather(nullptr, packed.linear, device_ids.data(), device_carry.data(), static_cast<uint32_t>(ids.size()), y.data());
    finish();
    for (size_t i = 0; i < ids.size(); ++i)
      for (uint32_t k = 0; k < cols; ++k) CHECK_EQ(y[i * cols + k], static_cast<float>(weights.dense[static_cast<size_t>(want[i]) * cols + k]));
  }
}

TEST("shapes that the kernels do not take are refused by name") {
  CHECK(linear_check(LS_DTYPE_BF16, {0, 3, 0, 24}).ok());
  for (const auto &[dtype, slice] : {std::pair{LS_DTYPE_BF16, WeightSlice{0, 4, 0, 12}}, {LS_DTYPE_Q8_0, {0, 4, 0, 48}}, {LS_DTYPE_Q4_0, {0, 4, 16, 32}}, {LS_DTYPE_F32, {0, 0, 0, 32}}}) {
    const Status status = linear_check(dtype, slice);
    CHECK(!status.ok());
    CHECK(status.text.find(std::to_string(slice.cols)) != std::string::npos);
  }
}

TEST("the order of warps changes no bit") {
  const Weights weights(LS_DTYPE_BF16, 130, 200);
  const Packed packed(weights);
  const std::vector<bf16> x = random_x(40 * 200);
  // A GPU has its own order every time.
#ifndef LS_TEST_GPU
  sim::set_seed(1);
#endif
  const std::vector<float> first = forward(packed, x, 40, 200);
  for (uint64_t seed = 2; seed < 6; ++seed) {
#ifndef LS_TEST_GPU
    sim::set_seed(seed);
#endif
    CHECK(std::memcmp(first.data(), forward(packed, x, 40, 200).data(), first.size() * sizeof(float)) == 0);
  }
}
