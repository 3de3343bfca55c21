#include "reference_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace ls::test {

double nearest_fp8(double value, uint32_t kv_dtype) {
  const int mantissa_bits = kv_dtype == LS_KV_E4M3 ? 3 : 2, bias = kv_dtype == LS_KV_E4M3 ? 7 : 15;
  const double largest = kv_dtype == LS_KV_E4M3 ? 448 : 57344, size = std::min(std::fabs(value), largest);
  // Subnormal numbers are as far apart as the smallest normal ones.
  int exponent;
  std::frexp(size, &exponent);
  const double step = std::ldexp(1.0, std::max(exponent - 1, 1 - bias) - mantissa_bits);
  return std::copysign(std::min(std::nearbyint(size / step) * step, largest), value);
}

namespace {

double bf16(double value) {
  int exponent;
  std::frexp(value, &exponent);
  const double step = std::ldexp(1.0, exponent - 8);
  return std::nearbyint(value / step) * step;
}

void to_bf16(std::vector<double> &values) {
  for (double &value : values) value = bf16(value);
}

}  // namespace

ReferenceModel::ReferenceModel(const TinyModel &model) : config_(model.config(LS_KV_E4M3)), inv_freq_(model.inv_freq) {
  std::FILE *file = std::fopen(model.path.c_str(), "rb");
  if (file == nullptr) throw std::runtime_error("cannot open " + model.path);
  for (const TinyModel::Tensor &t : model.tensors) {
    std::vector<uint8_t> bytes(t.bytes);
    if (std::fseek(file, static_cast<long>(t.offset), SEEK_SET) != 0 || std::fread(bytes.data(), 1, bytes.size(), file) != bytes.size()) throw std::runtime_error("cannot read " + model.path);
    Vector &values = weights_[t.id];
    for (size_t i = 0; i < size_t{t.rows} * t.cols; ++i) {
      uint32_t bits = 0;
      if (t.dtype == LS_DTYPE_F32) std::memcpy(&bits, bytes.data() + i * 4, 4);
      else if (t.dtype == LS_DTYPE_BF16) std::memcpy(reinterpret_cast<uint8_t *>(&bits) + 2, bytes.data() + i * 2, 2);
      else throw std::runtime_error("the reference takes weights of f32 and bf16");
      values.push_back(std::bit_cast<float>(bits));
    }
  }
  std::fclose(file);
}

ReferenceModel::Vector ReferenceModel::product(uint32_t id, const Vector &x, uint32_t bias) const {
  const Vector &w = weight(id);
  Vector y = bias != 0 ? weight(bias) : Vector(w.size() / x.size());
  for (size_t row = 0; row < y.size(); ++row)
    for (size_t col = 0; col < x.size(); ++col) y[row] += w[row * x.size() + col] * x[col];
  return y;
}

void ReferenceModel::norm(double *x, size_t n, const Vector &weight) const {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += x[i] * x[i];
  const double factor = 1 / std::sqrt(sum / static_cast<double>(n) + static_cast<double>(config_.rms_eps));
  for (size_t i = 0; i < n; ++i) x[i] *= factor * weight[i];
}

void ReferenceModel::turn(double *head, uint32_t position) const {
  const uint32_t half = config_.head_dim / 2;
  for (uint32_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(static_cast<float>(position) * inv_freq_[i]), factor = static_cast<double>(config_.rope_scale);
    double &a = head[config_.rope_style == LS_ROPE_HALF ? i : 2 * i], &b = head[config_.rope_style == LS_ROPE_HALF ? i + half : 2 * i + 1];
    const double c = std::cos(angle) * factor, s = std::sin(angle) * factor, turned = a * c - b * s;
    b = b * c + a * s;
    a = turned;
  }
}

std::vector<std::vector<double>> ReferenceModel::logprobs(const Tokens &tokens, uint32_t kv_dtype, const std::vector<float> &scales) const {
  const ls_config &c = config_;
  const uint32_t dim = c.head_dim, group = c.heads / c.kv_heads;
  std::vector<Vector> x;
  for (const int32_t token : tokens) {
    const auto row = weight(LS_ROLE_EMBEDDING).begin() + static_cast<std::ptrdiff_t>(token) * c.hidden;
    x.emplace_back(row, row + c.hidden);
  }
  const auto add = [](Vector &to, const Vector &y) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += y[i];
  };
  for (uint32_t l = 0; l < c.layers; ++l) {
    const uint32_t b = l * 256;
    const double k_scale = static_cast<double>(scales[2 * l]), v_scale = static_cast<double>(scales[2 * l + 1]);
    std::vector<Vector> keys, values;
    for (uint32_t t = 0; t < tokens.size(); ++t) {
      Vector h = x[t];
      norm(h.data(), h.size(), weight(b + LS_ROLE_ATTN_NORM));
      to_bf16(h);
      Vector q = product(b + LS_ROLE_Q, h, c.qkv_bias ? b + LS_ROLE_Q_BIAS : 0), k = product(b + LS_ROLE_K, h, c.qkv_bias ? b + LS_ROLE_K_BIAS : 0), v = product(b + LS_ROLE_V, h, c.qkv_bias ? b + LS_ROLE_V_BIAS : 0);
      for (Vector *product : {&q, &k, &v}) to_bf16(*product);
      for (uint32_t head = 0; head < c.heads + c.kv_heads; ++head) {
        double *at = head < c.heads ? q.data() + head * dim : k.data() + (head - c.heads) * dim;
        if (c.qk_norm) norm(at, dim, weight(b + (head < c.heads ? LS_ROLE_Q_NORM : LS_ROLE_K_NORM)));
        turn(at, t);
      }
      to_bf16(q);
      for (double &element : k) element = nearest_fp8(element / k_scale, kv_dtype) * k_scale;
      for (double &element : v) element = nearest_fp8(element / v_scale, kv_dtype) * v_scale;
      keys.push_back(std::move(k));
      values.push_back(std::move(v));
      Vector mixed(q.size());
      for (uint32_t head = 0; head < c.heads; ++head) {
        const uint32_t kv = head / group * dim;
        Vector weights;
        for (uint32_t s = 0; s <= t; ++s) {
          double score = 0;
          for (uint32_t d = 0; d < dim; ++d) score += q[head * dim + d] * keys[s][kv + d];
          weights.push_back(score * static_cast<double>(c.attn_scale));
        }
        const double top = *std::max_element(weights.begin(), weights.end());
        double sum = 0;
        for (double &w : weights) sum += w = std::exp(w - top);
        for (uint32_t s = 0; s <= t; ++s)
          for (uint32_t d = 0; d < dim; ++d) mixed[head * dim + d] += weights[s] / sum * values[s][kv + d];
      }
      to_bf16(mixed);
      add(x[t], product(b + LS_ROLE_O, mixed, c.o_bias ? b + LS_ROLE_O_BIAS : 0));
      h = x[t];
      norm(h.data(), h.size(), weight(b + LS_ROLE_FFN_NORM));
      to_bf16(h);
      Vector gate = product(b + LS_ROLE_GATE, h), up = product(b + LS_ROLE_UP, h);
      to_bf16(gate);
      to_bf16(up);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
      to_bf16(gate);
      add(x[t], product(b + LS_ROLE_DOWN, gate));
    }
  }
  std::vector<Vector> out;
  for (Vector &h : x) {
    norm(h.data(), h.size(), weight(LS_ROLE_FINAL_NORM));
    to_bf16(h);
    Vector logits = product(c.tied_embeddings ? LS_ROLE_EMBEDDING : LS_ROLE_LM_HEAD, h);
    const double top = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit - top);
    for (double &logit : logits) logit -= top + std::log(sum);
    out.push_back(std::move(logits));
  }
  return out;
}

}  // namespace ls::test
