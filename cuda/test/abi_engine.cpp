#include "abi_engine.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "tiny_weights.h"

namespace ls::test {
namespace {

struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint64_t next() {
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  float normal() {
    float sum = 0;
    for (int i = 0; i < 12; ++i) sum += static_cast<float>(next() >> 40) * 0x1p-24f;
    return sum - 6.0f;
  }
};

uint16_t bf16_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Of numbers that are normal in f16.
uint16_t f16_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  if (magnitude < (113u << 23)) return static_cast<uint16_t>(bits >> 16 & 0x8000u);
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | ((magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}

std::vector<uint8_t> encode(const std::vector<float> &values, uint32_t dtype) {
  std::vector<uint8_t> out;
  const auto put = [&out](const void *from, size_t bytes) { out.insert(out.end(), static_cast<const uint8_t *>(from), static_cast<const uint8_t *>(from) + bytes); };
  const auto put16 = [&](uint16_t value) { put(&value, 2); };
  if (dtype == LS_DTYPE_F32) put(values.data(), values.size() * 4);
  for (size_t i = 0; i < values.size() && (dtype == LS_DTYPE_BF16 || dtype == LS_DTYPE_F16); ++i) put16(dtype == LS_DTYPE_BF16 ? bf16_bits(values[i]) : f16_bits(values[i]));
  if (dtype < LS_DTYPE_Q8_0) return out;
  for (size_t block = 0; block < values.size(); block += 32) {
    const float *v = values.data() + block;
    float low = v[0], high = v[0];
    for (int i = 1; i < 32; ++i) low = std::min(low, v[i]), high = std::max(high, v[i]);
    const float most = std::max(std::fabs(low), std::fabs(high));
    const float d = dtype == LS_DTYPE_Q8_0 ? most / 127 : dtype == LS_DTYPE_Q4_0 ? most / 7 : (high - low) / 15;
    put16(f16_bits(d));
    if (dtype == LS_DTYPE_Q4_1) put16(f16_bits(low));
    const auto quant = [&](int i) { return static_cast<int>(std::lround((dtype == LS_DTYPE_Q4_1 ? v[i] - low : v[i]) / d)) + (dtype == LS_DTYPE_Q4_0 ? 8 : 0); };
    if (dtype == LS_DTYPE_Q8_0)
      for (int i = 0; i < 32; ++i) out.push_back(static_cast<uint8_t>(quant(i)));
    else
      for (int i = 0; i < 16; ++i) out.push_back(static_cast<uint8_t>((quant(i) & 15) | quant(i + 16) << 4));
  }
  return out;
}

}  // namespace

const Api &cuda_api() {
  static const Api api{ls_last_error, ls_engine_create, ls_engine_destroy, ls_weights_map, ls_weights_set, ls_kv_scales, ls_weights_finish, ls_memory, ls_pool_create, ls_pool_check, ls_seq_open, ls_seq_close, ls_step_submit, ls_step_wait};
  return api;
}

const Api &cpu_api() {
  static const Api api = [] {
    char self[4096] = {};
    if (readlink("/proc/self/exe", self, sizeof self - 1) <= 0) throw std::runtime_error("no /proc/self/exe");
    const std::string path = std::string(self).substr(0, std::string(self).rfind('/')) + "/liblayerscale_cpu.so";
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    Api loaded{};
    const auto find = [&](auto &to, const char *name) {
      void *symbol = dlsym(library, name);
      if (symbol == nullptr) throw std::runtime_error(std::string("no ") + name);
      std::memcpy(&to, &symbol, sizeof to);
    };
    find(loaded.last_error, "ls_last_error"), find(loaded.engine_create, "ls_engine_create"), find(loaded.engine_destroy, "ls_engine_destroy");
    find(loaded.weights_map, "ls_weights_map"), find(loaded.weights_set, "ls_weights_set"), find(loaded.kv_scales, "ls_kv_scales"), find(loaded.weights_finish, "ls_weights_finish"), find(loaded.memory, "ls_memory");
    find(loaded.pool_create, "ls_pool_create"), find(loaded.pool_check, "ls_pool_check"), find(loaded.seq_open, "ls_seq_open"), find(loaded.seq_close, "ls_seq_close");
    find(loaded.step_submit, "ls_step_submit"), find(loaded.step_wait, "ls_step_wait");
    return loaded;
  }();
  return api;
}

std::string last_error(const Api &api) {
  char text[4096];
  api.last_error(text, sizeof text);
  return text;
}

Tokens random_tokens(uint32_t count, uint32_t vocab, uint64_t seed) {
  Random random(seed);
  Tokens out;
  for (uint32_t i = 0; i < count; ++i) out.push_back(static_cast<int32_t>(random.next() % vocab));
  return out;
}

// What a tensor is multiplied by for K to be k_gain and V to be v_gain times as large, with the same answer.
static float gain_of(const TinyOptions &o, uint32_t id) {
  const uint32_t layer = id / 256;
  const float k = layer < o.k_gain.size() ? o.k_gain[layer] : 1, v = layer < o.v_gain.size() ? o.v_gain[layer] : 1;
  switch (id % 256) {
    // A norm per head undoes what the matrix before it does.
    case LS_ROLE_Q: case LS_ROLE_Q_BIAS: return o.qk_norm ? 1 : 1 / k;
    case LS_ROLE_K: case LS_ROLE_K_BIAS: return o.qk_norm ? 1 : k;
    case LS_ROLE_Q_NORM: return 1 / k;
    case LS_ROLE_K_NORM: return k;
    case LS_ROLE_V: case LS_ROLE_V_BIAS: return v;
    case LS_ROLE_O: return 1 / v;
    default: return 1;
  }
}

TinyModel::TinyModel(const TinyOptions &o, uint64_t seed) : options(o) {
  inv_freq = tiny_inv_freq(o.head_dim);
  char name[] = "/tmp/layerscale-tiny-XXXXXX";
  const int fd = mkstemp(name);
  if (fd < 0) throw std::runtime_error("no temporary file");
  path = name;
  std::FILE *file = fdopen(fd, "wb");
  Random random(seed);
  tiny_weights(o, 0.12f, [&](uint32_t id, uint32_t rows, uint32_t cols, float scale, float offset) {
    std::vector<float> values(size_t{rows} * cols);
    const float gain = gain_of(o, id);
    for (float &v : values) v = (random.normal() * scale + offset) * gain;
    const uint32_t dtype = rows == 1 ? static_cast<uint32_t>(LS_DTYPE_F32) : o.weights;
    const std::vector<uint8_t> data = encode(values, dtype);
    tensors.push_back({id, dtype, rows, cols, bytes, data.size()});
    std::fwrite(data.data(), 1, data.size(), file);
    const size_t pad = (64 - data.size() % 64) % 64;
    constexpr uint8_t kZeros[64] = {};
    std::fwrite(kZeros, 1, pad, file);
    bytes += data.size() + pad;
  });
  std::fclose(file);
}

TinyModel::~TinyModel() { unlink(path.c_str()); }

ls_config TinyModel::config(uint32_t kv_dtype, uint32_t ranks) const {
  const TinyOptions &o = options;
  ls_config c = tiny_config(o);
  c.rope_style = o.interleaved ? LS_ROPE_INTERLEAVED : LS_ROPE_HALF;
  c.max_context = o.max_context, c.max_seqs = o.max_seqs, c.max_batch_tokens = o.max_batch_tokens, c.kv_dtype = kv_dtype, c.prefix_cache = 1, c.ranks = ranks;
  return c;
}

int32_t AbiEngine::call(int32_t code, const char *what) const {
  if (code < 0) throw std::runtime_error(std::string(what) + ": " + last_error(api_) + " (" + std::to_string(code) + ")");
  return code;
}

AbiEngine::AbiEngine(const Api &api, const TinyModel &model, uint32_t kv_dtype, uint32_t pages, uint32_t ranks, const std::vector<float> &kv_scales)
    : api_(api), result_(LS_RESULT_HEADER_WORDS + 64 * (LS_RESULT_ROW_WORDS + 2 * LS_MAX_LOGPROBS)) {
  const ls_config config = model.config(kv_dtype, ranks);
  call(api.engine_create(&config, model.inv_freq.data(), &engine_), "ls_engine_create");
  try {
    const int32_t file = call(api.weights_map(engine_, model.path.c_str(), model.bytes), "ls_weights_map");
    for (const TinyModel::Tensor &t : model.tensors) call(api.weights_set(engine_, t.id, static_cast<uint32_t>(file), t.offset, t.bytes, t.dtype, t.rows, t.cols), "ls_weights_set");
    if (!kv_scales.empty()) call(api.kv_scales(engine_, kv_scales.data(), static_cast<uint32_t>(kv_scales.size() / 2)), "ls_kv_scales");
    call(api.weights_finish(engine_), "ls_weights_finish");
    call(api.pool_create(engine_, pages), "ls_pool_create");
  } catch (...) {
    api.engine_destroy(engine_);
    throw;
  }
}

AbiEngine::~AbiEngine() { api_.engine_destroy(engine_); }

AbiEngine::Opened AbiEngine::open(const Tokens &tokens) {
  int32_t out[3];
  call(api_.seq_open(engine_, tokens.data(), static_cast<uint32_t>(tokens.size()), 0, 0, out), "ls_seq_open");
  return {out[0], static_cast<uint32_t>(out[1]), static_cast<uint32_t>(out[2])};
}

void AbiEngine::close(int32_t slot, uint32_t commit) { call(api_.seq_close(engine_, slot, commit), "ls_seq_close"); }
void AbiEngine::check() { call(api_.pool_check(engine_), "ls_pool_check"); }

void AbiEngine::submit(const std::vector<Row> &rows) {
  std::vector<int32_t> plan(LS_PLAN_HEADER_WORDS);
  for (const Row &r : rows) {
    const int32_t words[LS_PLAN_ROW_WORDS] = {r.slot, static_cast<int32_t>(r.start), static_cast<int32_t>(r.tokens.size()), static_cast<int32_t>((r.sample ? LS_ROW_SAMPLE : 0) | r.n_logprobs << 8),
                                              std::bit_cast<int32_t>(r.temperature), std::bit_cast<int32_t>(r.top_p), static_cast<int32_t>(r.seed), static_cast<int32_t>(r.seed >> 32)};
    plan.insert(plan.end(), words, words + LS_PLAN_ROW_WORDS);
  }
  for (const Row &r : rows) plan.insert(plan.end(), r.tokens.begin(), r.tokens.end());
  plan[0] = static_cast<int32_t>(rows.size());
  plan[1] = static_cast<int32_t>(plan.size() - LS_PLAN_HEADER_WORDS - rows.size() * LS_PLAN_ROW_WORDS);
  call(api_.step_submit(engine_, plan.data(), static_cast<uint32_t>(plan.size())), "ls_step_submit");
}

std::vector<Sampled> AbiEngine::wait() {
  call(api_.step_wait(engine_, result_.data(), static_cast<uint32_t>(result_.size())), "ls_step_wait");
  std::vector<Sampled> out(static_cast<size_t>(result_[0]));
  const int32_t *w = result_.data() + LS_RESULT_HEADER_WORDS;
  for (Sampled &s : out) {
    s.token = w[1];
    s.logprob = std::bit_cast<float>(w[2]);
    const int32_t n_top = w[3];
    w += LS_RESULT_ROW_WORDS;
    for (int32_t i = 0; i < n_top; ++i, w += 2) s.top.emplace_back(w[0], std::bit_cast<float>(w[1]));
  }
  return out;
}

Sampled AbiEngine::prompt(int32_t slot, const Tokens &tokens, uint32_t start, uint32_t chunk, const Row &sampling) {
  const uint32_t total = static_cast<uint32_t>(tokens.size());
  Sampled last;
  for (; start < total; start += chunk) {
    Row row = sampling;
    row.slot = slot;
    row.start = start;
    row.tokens.assign(tokens.begin() + start, tokens.begin() + std::min(total, start + chunk));
    row.sample = start + chunk >= total;
    if (!row.sample) row.n_logprobs = 0;
    last = step({row})[0];
  }
  return last;
}

}  // namespace ls::test
