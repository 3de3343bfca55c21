// Matrix products with weights as stored (f32, f16, bf16) or repacked once (Q8_0, Q4_0, Q4_1), the same bits for any number of rows.
#pragma once
#include <cstdint>
#include <vector>

#include "../native/backend.h"
#include "thread_pool.h"

namespace ls::cpu {

// One weight matrix (rows = outputs N, cols = inputs K), prepared for the active ISA.
struct Linear;
struct LinearDeleter { void operator()(Linear *) const; };
using LinearPtr = std::unique_ptr<Linear, LinearDeleter>;

// Float formats keep pointing into view.data (mmap); quantised ones are repacked into owned memory, split over the pool.
Status linear_prepare(const TensorView &view, ThreadPool &pool, LinearPtr &out);
uint32_t linear_rows(const Linear &w);
uint32_t linear_cols(const Linear &w);
uint64_t linear_owned_bytes(const Linear &w);

// One output of linear_forward.
struct LinearOut {
  const Linear *w = nullptr;
  const float *bias = nullptr;  // (N) or null
  float *y = nullptr;           // (m, ldy)
  uint32_t ldy = 0;
  bool accumulate = false;      // y += instead of y = (residual add)
};

// y[i] = x[i] W^T + bias for m rows of x (m, ldx), for several matrices over the same input in one parallel region (q,k,v · gate,up).
// Every output element is summed over K in one order, whatever m, whatever thread.
void linear_forward(ThreadPool &pool, const float *x, uint32_t m, uint32_t ldx, const LinearOut *outs, uint32_t count);

// Row `row` of the matrix as f32 (embedding lookup), exact dequantisation: y (K).
void linear_row(const Linear &w, uint32_t row, float *y);

}  // namespace ls::cpu
