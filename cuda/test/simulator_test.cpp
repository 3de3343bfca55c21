// The simulator itself: what it computes by the books, and that it notices what would go wrong on a GPU.
#include "check.h"
#include "device.h"
#include "guarded.h"
#include "sim/simulator.h"

using namespace ls::cuda;

namespace {

// 0..count-1 as bf16.
std::vector<bf16> counting(size_t count) {
  std::vector<bf16> out;
  for (size_t i = 0; i < count; ++i) out.push_back(__float2bfloat16_rn(static_cast<float>(i % 64)));
  return out;
}

template <class Body>
void expect_fault(const std::string &part, Body body) {
  try {
    body();
  } catch (const sim::Fault &fault) {
    if (std::string(fault.what()).find(part) == std::string::npos) throw std::runtime_error("the fault \"" + std::string(fault.what()) + "\" does not mention \"" + part + "\"");
    return;
  }
  throw std::runtime_error("no fault where \"" + part + "\" was expected");
}

// y (32, 4): the operand registers of a 16 x 16 matrix, by ldmatrix or its transpose.
void fragments(const bf16 *x, uint32_t *y, bool transposed) {
  bf16 *tile = dyn_smem<bf16>();
  cp_async16(tile + thread_x() * 8, x + thread_x() * 8);
  cp_async_commit();
  cp_async_wait<0>();
  sync_block();
  const unsigned lane = lane_id();
  uint32_t r[4];
  // Matrices in the order of an A operand: rows 0..7, rows 8..15, then the same for the right half.
  const bf16 *row = tile + (lane % 8 + lane / 8 % 2 * 8) * 16 + lane / 16 * 8;
  if (transposed) ldmatrix_x4_trans(r, row);
  else ldmatrix_x4(r, row);
  for (int j = 0; j < 4; ++j) y[lane * 4 + static_cast<unsigned>(j)] = r[j];
}

void product(const bf16 *a, const bf16 *b, float *out) {  // a (16, 16), b (16, 8) row-major, out (16, 8)
  const unsigned g = lane_id() / 4, t = lane_id() % 4 * 2;
  uint32_t ra[4], rb[2];
  const auto pair = [](bf16 low, bf16 high) { return pack_bf16(__bfloat162float(low), __bfloat162float(high)); };
  for (unsigned j = 0; j < 4; ++j) {
    const bf16 *at = a + (g + j % 2 * 8) * 16 + t + j / 2 * 8;
    ra[j] = pair(at[0], at[1]);
  }
  for (unsigned j = 0; j < 2; ++j) rb[j] = pair(b[(t + j * 8) * 8 + g], b[(t + j * 8 + 1) * 8 + g]);
  float c[4] = {1, 2, 3, 4};
  mma_m16n8k16(c, ra, rb, c);
  for (unsigned i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + t + i % 2] = c[i];
}

// Sums 128 numbers through shared memory; `mode` breaks it in one way or another.
enum Mode { right, no_wait, no_barrier, early_return, split_warp, misaligned, outside, too_much, never_committed };
void block_sum(const float *x, float *y, Mode mode) {
  float *tile = dyn_smem<float>();
  LS_SHARED(float, sums, 4);
  const unsigned thread = thread_x();
  if (mode == early_return && thread >= 96) return;
  if (mode == misaligned) cp_async16(tile + 1, x);
  if (mode == outside) cp_async16(tile + 256, x);
  if (mode == too_much) {
    LS_SHARED(float, large, 32 << 10);
    large[thread] = 0;
  }
  if (thread < 32) cp_async16(tile + thread * 4, x + thread * 4);
  if (mode == never_committed) return;
  cp_async_commit();
  if (mode != no_wait) cp_async_wait<0>();
  if (mode != no_barrier) sync_block();
  float sum;
  if (mode == split_warp && lane_id() < 16) sum = shfl_down(tile[thread], 1);
  else sum = warp_sum(tile[thread]);
  if (lane_id() == 0) sums[warp_id()] = sum;
  sync_block();
  if (thread == 0) y[0] = sums[0] + sums[1] + sums[2] + sums[3];
}

float run_sum(Mode mode) {
  std::vector<float> values;
  for (int i = 0; i < 128; ++i) values.push_back(static_cast<float>(i));
  Guarded<float> x(values), y(1);
  launch(block_sum, Dim{1}, Dim{128}, 512, nullptr, x.data(), y.data(), mode);
  finish();
  return y[0];
}

}  // namespace

TEST("ldmatrix gives the registers of the operand, transposed those of its transpose") {
  const std::vector<bf16> x = counting(256);
  Guarded<bf16> device_x(x);
  for (bool transposed : {false, true}) {
    Guarded<uint32_t> y(128);
    launch(fragments, Dim{1}, Dim{32}, 512, nullptr, device_x.data(), y.data(), transposed);
    finish();
    for (unsigned lane = 0; lane < 32; ++lane)
      for (unsigned j = 0; j < 4; ++j)
        for (unsigned i = 0; i < 2; ++i) {
          unsigned row = lane / 4, col = lane % 4 * 2 + i;
          if (transposed) std::swap(row, col);
          const bf16 want = x[(row + j % 2 * 8) * 16 + col + j / 2 * 8];
          CHECK_EQ(bits_as<float>((i ? y[lane * 4 + j] >> 16 : y[lane * 4 + j] & 0xffffu) << 16), __bfloat162float(want));
        }
  }
}

TEST("mma is a matrix product") {
  const std::vector<bf16> a = counting(256), b = counting(128);
  Guarded<bf16> device_a(a), device_b(b);
  Guarded<float> out(128);
  launch(product, Dim{1}, Dim{32}, 0, nullptr, device_a.data(), device_b.data(), out.data());
  finish();
  for (size_t m = 0; m < 16; ++m)
    for (size_t n = 0; n < 8; ++n) {
      float want = static_cast<float>(1 + m / 8 * 2 + n % 2);
      for (size_t k = 0; k < 16; ++k) want += __bfloat162float(a[m * 16 + k]) * __bfloat162float(b[k * 8 + n]);
      CHECK_EQ(out[m * 8 + n], want);
    }
}

TEST("a right kernel is right under every order of warps") {
  for (uint64_t seed = 1; seed < 20; ++seed) {
    sim::set_seed(seed);
    CHECK_EQ(run_sum(right), 8128.0f);
  }
}

TEST("bytes of cp.async are not there before the wait, nor for others before the barrier") {
  CHECK(std::isnan(run_sum(no_wait)));
  bool wrong = false;
  for (uint64_t seed = 1; seed < 20 && !wrong; ++seed) {
    sim::set_seed(seed);
    wrong = std::isnan(run_sum(no_barrier));
  }
  CHECK(wrong);
}

TEST("faults are thrown with their reason") {
  expect_fault("divergent barrier", [] { run_sum(early_return); });
  expect_fault("while other lanes of the warp are in", [] { run_sum(split_warp); });
  expect_fault("misaligned", [] { run_sum(misaligned); });
  expect_fault("outside shared memory", [] { run_sum(outside); });
  expect_fault("bytes of shared memory", [] { run_sum(too_much); });
  expect_fault("never committed", [] { run_sum(never_committed); });
  expect_fault("multiple of 32", [] { launch(block_sum, Dim{1}, Dim{100}, 0, nullptr, nullptr, nullptr, right); });
  expect_fault("65536x1 blocks", [] { launch(block_sum, Dim{1, 65536}, Dim{32}, 0, nullptr, nullptr, nullptr, right); });
  // And the next launch is fine.
  CHECK_EQ(run_sum(right), 8128.0f);
}
