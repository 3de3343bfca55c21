// The small operations around the matrix products, one implementation per instruction set. Sums have a fixed lane order.
#pragma once
#include <cstdint>

#include "../native/backend.h"
#include "isa.h"

namespace ls::cpu {

// Largest logit of a run of the vocabulary, where it is, and the sum of exp(x - largest).
struct LogitStats {
  float largest = 0;
  uint32_t index = 0;   // lowest index that holds it
  float sum = 0;
  bool broken = false;  // a NaN or +infinity was seen; index and sum are then meaningless
};

struct OpsKernels {
  const char *name;
  // y[i] = x[i] / sqrt(mean(x^2) + eps) * w[i]; y may be x.
  void (*rmsnorm)(const float *x, const float *w, float *y, uint32_t n, float eps);
  // Rotates `heads` heads of head_dim in place; cos and sin have head_dim/2 entries and carry rope_scale.
  void (*rope)(float *x, const float *cos, const float *sin, uint32_t heads, uint32_t head_dim, ls_rope_style style);
  // out[i] = gate[i] / (1 + exp(-gate[i])) * up[i]; out may be gate.
  void (*silu_mul)(const float *gate, const float *up, float *out, uint32_t n);
  LogitStats (*logit_stats)(const float *x, uint32_t n);
  // weight[i] = exp((x[i] - largest) * inv_temperature); returns their sum.
  float (*weigh)(const float *x, float largest, float inv_temperature, float *weight, uint32_t n);
  // First index >= from whose value is above threshold; n when there is none.
  uint32_t (*find_above)(const float *x, uint32_t from, uint32_t n, float threshold);
};

extern const OpsKernels kOps_avx2, kOps_avx512;
// 16-lane source on AVX2, linked into tests only.
extern const OpsKernels kOps_emu512;

// The table for an instruction set; amx uses the avx512 one.
const OpsKernels &ops_for(Isa isa);

}  // namespace ls::cpu
