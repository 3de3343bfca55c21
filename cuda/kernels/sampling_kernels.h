// The passes of sample(), each of its own file.
#pragma once
#include "sampling.h"

namespace ls::cuda {

struct SampleArgs {
  const float *logits = nullptr;
  size_t ld = 0;
  uint32_t vocab = 0;
  const SampleParams *params = nullptr;
  const int32_t *count = nullptr;
  SampleResult *results = nullptr;
  int32_t *carry = nullptr;
  void *scratch = nullptr;
};
void sample_scan(Stream stream, const SampleArgs &args, uint32_t rows);
void sample_weigh(Stream stream, const SampleArgs &args, uint32_t rows);
void sample_choose(Stream stream, const SampleArgs &args, uint32_t rows);

}  // namespace ls::cuda
