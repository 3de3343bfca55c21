// Small-op kernels for any vector width; included by one translation unit per instruction set.
#pragma once
#include "../ops.h"
#include "../simd.h"

namespace ls::cpu::LS_SIMD_NS {

constexpr uint32_t kW = W;

LS_SIMD_INLINE float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }
LS_SIMD_INLINE int rest(uint32_t n, uint32_t i) { return static_cast<int>(n - i); }

static void rmsnorm(const float *x, const float *w, float *y, uint32_t n, float eps) {
  vf s0 = zero(), s1 = zero(), s2 = zero(), s3 = zero();
  uint32_t i = 0;
  for (; i + 4 * kW <= n; i += 4 * kW) {
    const vf a = load(x + i), b = load(x + i + kW), c = load(x + i + 2 * kW), d = load(x + i + 3 * kW);
    s0 = fma(a, a, s0);
    s1 = fma(b, b, s1);
    s2 = fma(c, c, s2);
    s3 = fma(d, d, s3);
  }
  for (; i < n; i += kW) {
    const vf a = load_n(x + i, rest(n, i) < W ? rest(n, i) : W);
    s0 = fma(a, a, s0);
  }
  const float sum = hsum(add(add(s0, s1), add(s2, s3)));
  const float scale = 1.0f / root(sum / static_cast<float>(n) + eps);
  const vf scales = set1(scale);
  for (i = 0; i + kW <= n; i += kW) store(y + i, mul(mul(load(x + i), scales), load(w + i)));
  if (i < n) store_n(y + i, mul(mul(load_n(x + i, rest(n, i)), scales), load_n(w + i, rest(n, i))), rest(n, i));
}

static void rope(float *x, const float *cos, const float *sin, uint32_t heads, uint32_t head_dim, ls_rope_style style) {
  const uint32_t half = head_dim / 2;
  for (uint32_t h = 0; h < heads; ++h, x += head_dim) {
    if (style == LS_ROPE_INTERLEAVED) {
      for (uint32_t i = 0; i < half; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos[i] - b * sin[i];
        x[2 * i + 1] = b * cos[i] + a * sin[i];
      }
      continue;
    }
    // Masked loads and stores are slow on some machines, so only the end of a head uses them.
    uint32_t i = 0;
    for (; i + kW <= half; i += kW) {
      const vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
      store(x + i, sub(mul(a, c), mul(b, s)));
      store(x + half + i, add(mul(b, c), mul(a, s)));
    }
    if (i < half) {
      const int n = rest(half, i);
      const vf a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
      store_n(x + i, sub(mul(a, c), mul(b, s)), n);
      store_n(x + half + i, add(mul(b, c), mul(a, s)), n);
    }
  }
}

static void silu_mul(const float *gate, const float *up, float *out, uint32_t n) {
  uint32_t i = 0;
  for (; i + kW <= n; i += kW) store(out + i, mul(silu_v(load(gate + i)), load(up + i)));
  if (i < n) store_n(out + i, mul(silu_v(load_n(gate + i, rest(n, i))), load_n(up + i, rest(n, i))), rest(n, i));
}

static LogitStats logit_stats(const float *x, uint32_t n) {
  LogitStats out;
  const vf lowest = set1(-3.402823466e+38f);
  vf m0 = lowest, m1 = lowest, bad = zero();
  uint32_t i = 0;
  // max_v gives its second operand for a NaN, so y is NaN or +infinity where x is, and y - y is 0 everywhere else.
  for (; i + 2 * kW <= n; i += 2 * kW) {
    const vf a = max_v(lowest, load(x + i)), b = max_v(lowest, load(x + i + kW));
    m0 = max_v(m0, a);
    m1 = max_v(m1, b);
    bad = add(bad, add(sub(a, a), sub(b, b)));
  }
  float largest = hmax(max_v(m0, m1)), broken = hsum(bad);
  for (; i < n; ++i) {
    if (!(x[i] <= 3.402823466e+38f)) broken = __builtin_nanf("");
    if (x[i] > largest) largest = x[i];
  }
  out.largest = largest;
  out.broken = broken != 0;  // NaN is unequal to 0 as well
  if (out.broken) return out;
  const vf top = set1(largest);
  vf s0 = zero(), s1 = zero();
  for (i = 0; i + 2 * kW <= n; i += 2 * kW) {
    s0 = add(s0, exp_v(sub(load(x + i), top)));
    s1 = add(s1, exp_v(sub(load(x + i + kW), top)));
  }
  for (; i < n; i += kW) {
    const int count = rest(n, i) < W ? rest(n, i) : W;
    float lanes[W];
    for (int j = 0; j < W; ++j) lanes[j] = j < count ? x[i + j] : -__builtin_inff();
    s0 = add(s0, exp_v(sub(load(lanes), top)));
  }
  out.sum = hsum(add(s0, s1));
  for (i = 0; i + kW <= n && hmax(load(x + i)) < largest; i += kW) {}
  while (i < n && x[i] < largest) ++i;
  out.index = i < n ? i : 0;  // every logit -infinity: the first
  return out;
}

static float weigh(const float *x, float largest, float inv_temperature, float *weight, uint32_t n) {
  const vf top = set1(largest), scale = set1(inv_temperature);
  vf s0 = zero(), s1 = zero();
  uint32_t i = 0;
  for (; i + 2 * kW <= n; i += 2 * kW) {
    const vf a = exp_v(mul(sub(load(x + i), top), scale)), b = exp_v(mul(sub(load(x + i + kW), top), scale));
    store(weight + i, a);
    store(weight + i + kW, b);
    s0 = add(s0, a);
    s1 = add(s1, b);
  }
  float sum = hsum(add(s0, s1));
  for (; i < n; i += kW) {
    const int count = rest(n, i) < W ? rest(n, i) : W;
    store_n(weight + i, exp_v(mul(sub(load_n(x + i, count), top), scale)), count);
    for (int j = 0; j < count; ++j) sum += weight[i + j];
  }
  return sum;
}

static uint32_t find_above(const float *x, uint32_t from, uint32_t n, float threshold) {
  uint32_t i = from;
  for (; i + 4 * kW <= n; i += 4 * kW)
    if (hmax(max_v(max_v(load(x + i), load(x + i + kW)), max_v(load(x + i + 2 * kW), load(x + i + 3 * kW)))) > threshold) break;
  while (i < n && !(x[i] > threshold)) ++i;
  return i;
}

constexpr OpsKernels ops_table(const char *name) { return {name, rmsnorm, rope, silu_mul, logit_stats, weigh, find_above}; }

}  // namespace ls::cpu::LS_SIMD_NS
