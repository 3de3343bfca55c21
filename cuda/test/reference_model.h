// A whole tiny model by its definition, in double precision, with K and V rounded as an fp8 cache keeps them. What the device keeps as bf16 between
// its kernels (inputs and outputs of products, q of attention) is rounded to bf16 here, too: else elements of the cache would often be rounded to a
// neighbour, a step of 6 %, for a difference of 0.2 %.
#pragma once
#include <map>
#include <vector>

#include "abi_engine.h"

namespace ls::test {

// The element of an fp8 type (LS_KV_E4M3, LS_KV_E5M2) that is nearest to value, ties to the even code; the largest one beyond the range.
// OCP 8-bit floating point specification 1.0, saturating.
double nearest_fp8(double value, uint32_t kv_dtype);

class ReferenceModel {
 public:
  // Weights of the model, which are f32 or bf16.
  explicit ReferenceModel(const TinyModel &model);
  // Natural logarithms, of the next token, after each of the tokens: (tokens, vocab). scales: {k, v} of each layer.
  std::vector<std::vector<double>> logprobs(const Tokens &tokens, uint32_t kv_dtype, const std::vector<float> &scales) const;

 private:
  using Vector = std::vector<double>;
  const ls_config config_;
  const std::vector<float> inv_freq_;
  std::map<uint32_t, Vector> weights_;  // by tensor id

  const Vector &weight(uint32_t id) const { return weights_.at(id); }
  Vector product(uint32_t id, const Vector &x, uint32_t bias = 0) const;
  void norm(double *x, size_t n, const Vector &weight) const;
  void turn(double *head, uint32_t position) const;
};

}  // namespace ls::test
