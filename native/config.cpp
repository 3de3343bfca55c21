#include "config.h"

#include <array>
#include <cmath>

namespace ls {
namespace {

struct CountField {
  const char *name;
  uint32_t ls_config::*member;
  uint32_t min, max;
};

// Upper limits keep every product below within 64 bits and every id within int32; they are far above any model.
constexpr CountField kCounts[] = {
    {"hidden", &ls_config::hidden, 1, 1u << 20},
    {"layers", &ls_config::layers, 1, LS_MAX_LAYERS},
    {"heads", &ls_config::heads, 1, 1u << 14},
    {"kv_heads", &ls_config::kv_heads, 1, 1u << 14},
    {"head_dim", &ls_config::head_dim, 2, LS_MAX_HEAD_DIM},
    {"intermediate", &ls_config::intermediate, 1, 1u << 22},
    {"vocab", &ls_config::vocab, 1, 1u << 24},
    {"rope_style", &ls_config::rope_style, LS_ROPE_HALF, LS_ROPE_INTERLEAVED},
    {"qkv_bias", &ls_config::qkv_bias, 0, 1},
    {"o_bias", &ls_config::o_bias, 0, 1},
    {"qk_norm", &ls_config::qk_norm, 0, 1},
    {"tied_embeddings", &ls_config::tied_embeddings, 0, 1},
    {"max_context", &ls_config::max_context, 1, 1u << 24},
    {"max_seqs", &ls_config::max_seqs, 1, 1u << 16},
    {"max_batch_tokens", &ls_config::max_batch_tokens, 1, 1u << 20},
    {"prefix_cache", &ls_config::prefix_cache, 0, 1},
    {"threads", &ls_config::threads, 0, 1024},
    {"device_index", &ls_config::device_index, 0, 1023},
    {"ranks", &ls_config::ranks, 0, 1024},
};

Status invalid(std::string text) { return Status::fail(LS_INVALID, std::move(text)); }

struct Role {
  uint32_t role;
  const char *name;
};
constexpr Role kGlobalRoles[] = {{LS_ROLE_EMBEDDING, "embedding"}, {LS_ROLE_FINAL_NORM, "final_norm"}, {LS_ROLE_LM_HEAD, "lm_head"}};
constexpr Role kLayerRoles[] = {
    {LS_ROLE_ATTN_NORM, "attn_norm"}, {LS_ROLE_Q, "q"},           {LS_ROLE_K, "k"},           {LS_ROLE_V, "v"},
    {LS_ROLE_O, "o"},                 {LS_ROLE_Q_BIAS, "q_bias"}, {LS_ROLE_K_BIAS, "k_bias"}, {LS_ROLE_V_BIAS, "v_bias"},
    {LS_ROLE_O_BIAS, "o_bias"},       {LS_ROLE_Q_NORM, "q_norm"}, {LS_ROLE_K_NORM, "k_norm"}, {LS_ROLE_FFN_NORM, "ffn_norm"},
    {LS_ROLE_GATE, "gate"},           {LS_ROLE_UP, "up"},         {LS_ROLE_DOWN, "down"},
};

}  // namespace

Status validate_config(const ls_config *config, const float *inv_freq) {
  if (config == nullptr) return invalid("config is NULL");
  if (config->struct_size != sizeof(ls_config)) return invalid("config.struct_size is " + std::to_string(config->struct_size) + ", expected " + std::to_string(sizeof(ls_config)));
  if (inv_freq == nullptr) return invalid("inv_freq is NULL");
  const ls_config &c = *config;
  for (const CountField &f : kCounts) {
    const uint32_t value = c.*f.member;
    if (value < f.min || value > f.max)
      return invalid("config." + std::string(f.name) + " is " + std::to_string(value) + ", expected " + std::to_string(f.min) + ".." + std::to_string(f.max));
  }
  if (c.heads % c.kv_heads != 0) return invalid("config.heads is " + std::to_string(c.heads) + ", expected a multiple of kv_heads " + std::to_string(c.kv_heads));
  if (c.head_dim % 2 != 0) return invalid("config.head_dim is " + std::to_string(c.head_dim) + ", expected an even number");
  if (c.kv_dtype != LS_KV_F32 && c.kv_dtype != LS_KV_BF16 && c.kv_dtype != LS_KV_E4M3 && c.kv_dtype != LS_KV_E5M2)
    return invalid("config.kv_dtype is " + std::to_string(c.kv_dtype) + ", expected 0 (f32), 2 (bf16), 6 (fp8 e4m3) or 7 (fp8 e5m2)");
  if (!std::isfinite(c.rms_eps) || c.rms_eps < 0) return invalid("config.rms_eps is " + std::to_string(c.rms_eps) + ", expected a finite number >= 0");
  if (!std::isfinite(c.attn_scale) || c.attn_scale <= 0) return invalid("config.attn_scale is " + std::to_string(c.attn_scale) + ", expected a finite number > 0");
  if (!std::isfinite(c.rope_scale) || c.rope_scale <= 0) return invalid("config.rope_scale is " + std::to_string(c.rope_scale) + ", expected a finite number > 0");
  for (uint32_t i = 0; i < c.head_dim / 2; ++i)
    if (!std::isfinite(inv_freq[i])) return invalid("inv_freq[" + std::to_string(i) + "] is " + std::to_string(inv_freq[i]) + ", expected a finite number");
  return Status::good();
}

Status check_kv_scales(const ls_config &config, const float *scales, uint32_t layers) {
  if (!kv_dtype_scaled(config.kv_dtype)) return Status::fail(LS_UNSUPPORTED, "kv_dtype " + std::to_string(config.kv_dtype) + " has no scales, only 6 (fp8 e4m3) and 7 (fp8 e5m2) have");
  if (scales == nullptr) return invalid("scales is NULL");
  if (layers != config.layers) return invalid("scales of " + std::to_string(layers) + " layers, expected " + std::to_string(config.layers));
  for (uint32_t i = 0; i < 2 * layers; ++i)
    if (!std::isfinite(scales[i]) || scales[i] <= 0)
      return invalid(std::string(i % 2 ? "v" : "k") + " scale of layer " + std::to_string(i / 2) + " is " + std::to_string(scales[i]) + ", expected a finite number > 0");
  return Status::good();
}

std::string tensor_name(uint32_t id) {
  const uint32_t layer = id / 256, role = id % 256;
  if (layer == 0)
    for (const Role &r : kGlobalRoles)
      if (r.role == role) return r.name;
  for (const Role &r : kLayerRoles)
    if (r.role == role) return "layer " + std::to_string(layer) + " " + r.name;
  return "tensor id " + std::to_string(id);
}

std::optional<TensorShape> tensor_shape(const ls_config &c, uint32_t id) {
  const uint32_t layer = id / 256, role = id % 256;
  const uint32_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  const auto matrix = [](uint32_t rows, uint32_t cols) { return std::optional<TensorShape>({rows, cols, false}); };
  const auto vector = [](uint32_t cols) { return std::optional<TensorShape>({1, cols, true}); };
  if (role < LS_ROLE_ATTN_NORM) {
    if (layer != 0) return std::nullopt;
    switch (role) {
      case LS_ROLE_EMBEDDING: return matrix(c.vocab, c.hidden);
      case LS_ROLE_FINAL_NORM: return vector(c.hidden);
      case LS_ROLE_LM_HEAD: return c.tied_embeddings ? std::nullopt : matrix(c.vocab, c.hidden);
      default: return std::nullopt;
    }
  }
  if (layer >= c.layers) return std::nullopt;
  switch (role) {
    case LS_ROLE_ATTN_NORM:
    case LS_ROLE_FFN_NORM: return vector(c.hidden);
    case LS_ROLE_Q: return matrix(q, c.hidden);
    case LS_ROLE_K:
    case LS_ROLE_V: return matrix(kv, c.hidden);
    case LS_ROLE_O: return matrix(c.hidden, q);
    case LS_ROLE_Q_BIAS: return c.qkv_bias ? vector(q) : std::nullopt;
    case LS_ROLE_K_BIAS:
    case LS_ROLE_V_BIAS: return c.qkv_bias ? vector(kv) : std::nullopt;
    case LS_ROLE_O_BIAS: return c.o_bias ? vector(c.hidden) : std::nullopt;
    case LS_ROLE_Q_NORM:
    case LS_ROLE_K_NORM: return c.qk_norm ? vector(c.head_dim) : std::nullopt;
    case LS_ROLE_GATE:
    case LS_ROLE_UP: return matrix(c.intermediate, c.hidden);
    case LS_ROLE_DOWN: return matrix(c.hidden, c.intermediate);
    default: return std::nullopt;
  }
}

std::vector<uint32_t> required_tensors(const ls_config &config) {
  std::vector<uint32_t> ids;
  for (const Role &r : kGlobalRoles)
    if (tensor_shape(config, r.role)) ids.push_back(r.role);
  for (uint32_t layer = 0; layer < config.layers; ++layer)
    for (const Role &r : kLayerRoles)
      if (tensor_shape(config, layer * 256 + r.role)) ids.push_back(layer * 256 + r.role);
  return ids;
}

namespace {
struct DtypeInfo {
  const char *name;
  uint32_t block, bytes;  // elements per block, bytes per block
};
constexpr std::array<DtypeInfo, 6> kDtypes = {{{"f32", 1, 4}, {"f16", 1, 2}, {"bf16", 1, 2}, {"q8_0", 32, 34}, {"q4_0", 32, 18}, {"q4_1", 32, 20}}};
}  // namespace

const char *dtype_name(uint32_t dtype) { return dtype < kDtypes.size() ? kDtypes[dtype].name : nullptr; }
bool dtype_quantised(uint32_t dtype) { return dtype < kDtypes.size() && kDtypes[dtype].block > 1; }

std::optional<uint64_t> tensor_bytes(uint32_t dtype, uint32_t rows, uint32_t cols) {
  if (dtype >= kDtypes.size() || cols % kDtypes[dtype].block != 0) return std::nullopt;
  const uint64_t blocks = uint64_t{rows} * (cols / kDtypes[dtype].block);
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(blocks, uint64_t{kDtypes[dtype].bytes}, &bytes)) return std::nullopt;
  return bytes;
}

}  // namespace ls
