// What a config allows: limits of its fields, the tensors it demands and their shapes.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend.h"

namespace ls {

// Names the field, its value and what was expected. config->struct_size bytes are readable; inv_freq has head_dim/2 floats.
Status validate_config(const ls_config *config, const float *inv_freq);

// Whether elements of the cache stand for element * scale.
constexpr bool kv_dtype_scaled(uint32_t dtype) { return dtype == LS_KV_E4M3 || dtype == LS_KV_E5M2; }
// scales: {k, v} of each layer. LS_INVALID naming layer and value; LS_UNSUPPORTED when the cache has none.
Status check_kv_scales(const ls_config &config, const float *scales, uint32_t layers);

struct TensorShape {
  uint32_t rows = 0, cols = 0;
  bool vector = false;  // norm or bias: (1, cols), never quantised
};

// "embedding", "layer 3 q", "tensor id 77" when there is no such role.
std::string tensor_name(uint32_t id);
// The shape that the config demands; nothing when this model has no such tensor.
std::optional<TensorShape> tensor_shape(const ls_config &config, uint32_t id);
// Every tensor that the config demands, global ones first, then layer by layer.
std::vector<uint32_t> required_tensors(const ls_config &config);

const char *dtype_name(uint32_t dtype);  // nullptr = unknown
bool dtype_quantised(uint32_t dtype);
// Bytes of (rows, cols); nothing when the dtype is unknown, cols are not whole blocks, or the size overflows 64 bits.
std::optional<uint64_t> tensor_bytes(uint32_t dtype, uint32_t rows, uint32_t cols);

}  // namespace ls
