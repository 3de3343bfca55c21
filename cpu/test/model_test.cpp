// Tiny random models end to end through the Backend against a naive double forward pass, and the promise that chunks, batches, threads and
// page ids change no bit.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>

#include "backend.h"
#include "check.h"
#include "kv_memory.h"
#include "model.h"
#include "support.h"
#include "tiny_weights.h"
#include "support.h"

using namespace ls;
using namespace ls::cpu;
using support::Random;

namespace {

struct Options {
  uint32_t heads = 6, kv_heads = 2, head_dim = 16, hidden = 48, layers = 3, intermediate = 80, vocab = 300;
  bool qkv_bias = false, o_bias = false, qk_norm = false, tied = true;
  ls_rope_style style = LS_ROPE_HALF;
  ls_dtype kv = LS_DTYPE_F32, weights = LS_DTYPE_F32;
};

// Weights as f32 and in the file dtype (f32 or bf16; f32 values are exact in it).
struct Tiny {
  ls_config config{};
  std::vector<float> inv_freq;
  std::map<uint32_t, std::vector<float>> values;
  std::map<uint32_t, std::vector<uint16_t>> halves;
  std::map<uint32_t, TensorView> views;

  explicit Tiny(const Options &o, uint64_t seed = 1) {
    config = test::tiny_config(o);
    config.rope_style = o.style, config.max_context = 1024, config.max_seqs = 8, config.max_batch_tokens = 1024, config.kv_dtype = o.kv;
    inv_freq = test::tiny_inv_freq(o.head_dim);
    Random random(seed);
    test::tiny_weights(o, 0.25f, [&](uint32_t id, uint32_t rows, uint32_t cols, float scale, float offset) {
      std::vector<float> data = random.normals(static_cast<size_t>(rows) * cols, scale);
      for (float &x : data) x = from_bf16(to_bf16(x + offset));
      TensorView view{nullptr, data.size() * 4, o.weights, rows, cols};
      if (o.weights == LS_DTYPE_BF16) {
        std::vector<uint16_t> &half = halves[id];
        for (float x : data) half.push_back(to_bf16(x));
        view.data = reinterpret_cast<const uint8_t *>(half.data());
        view.bytes = half.size() * 2;
      }
      values[id] = std::move(data);
      if (!view.data) view.data = reinterpret_cast<const uint8_t *>(values[id].data());
      views[id] = view;
    });
  }
};

using Row = std::vector<double>;

Row multiply(const std::vector<float> &w, const Row &x, const std::vector<float> *bias) {
  Row y(w.size() / x.size());
  for (size_t n = 0; n < y.size(); ++n) {
    y[n] = bias ? (*bias)[n] : 0;
    for (size_t k = 0; k < x.size(); ++k) y[n] += w[n * x.size() + k] * x[k];
  }
  return y;
}

void normalise(double *x, const std::vector<float> &w, double eps) {
  double sum = 0;
  for (size_t i = 0; i < w.size(); ++i) sum += x[i] * x[i];
  const double scale = 1 / std::sqrt(sum / static_cast<double>(w.size()) + eps);
  for (size_t i = 0; i < w.size(); ++i) x[i] *= scale * w[i];
}

// Logits of every position, straight from the definition; K and V rounded to the page dtype.
std::vector<Row> reference(const Tiny &m, const std::vector<int32_t> &tokens) {
  const ls_config &c = m.config;
  const uint32_t dim = c.head_dim, half = dim / 2, group = c.heads / c.kv_heads;
  const auto get = [&](uint32_t id) -> const std::vector<float> & { return m.values.at(id); };
  const auto maybe = [&](uint32_t id) { const auto at = m.values.find(id); return at == m.values.end() ? nullptr : &at->second; };
  const auto keep = [&](double x) { return c.kv_dtype == LS_DTYPE_BF16 ? from_bf16(to_bf16(static_cast<float>(x))) : x; };
  std::vector<Row> x;
  for (int32_t t : tokens) {
    const float *row = &get(LS_ROLE_EMBEDDING)[static_cast<size_t>(t) * c.hidden];
    x.emplace_back(row, row + c.hidden);
  }
  for (uint32_t l = 0; l < c.layers; ++l) {
    const uint32_t b = l * 256;
    std::vector<Row> keys, vals;
    for (size_t t = 0; t < x.size(); ++t) {
      Row h = x[t];
      normalise(h.data(), get(b + LS_ROLE_ATTN_NORM), c.rms_eps);
      Row q = multiply(get(b + LS_ROLE_Q), h, maybe(b + LS_ROLE_Q_BIAS)), k = multiply(get(b + LS_ROLE_K), h, maybe(b + LS_ROLE_K_BIAS)), v = multiply(get(b + LS_ROLE_V), h, maybe(b + LS_ROLE_V_BIAS));
      const auto turn = [&](Row &r, uint32_t heads, uint32_t norm_role) {
        for (uint32_t i = 0; i < heads; ++i) {
          double *at = &r[static_cast<size_t>(i) * dim];
          if (c.qk_norm) normalise(at, get(b + norm_role), c.rms_eps);
          for (uint32_t j = 0; j < half; ++j) {
            const double angle = static_cast<double>(t) * m.inv_freq[j], co = std::cos(angle) * c.rope_scale, si = std::sin(angle) * c.rope_scale;
            double &p = c.rope_style == LS_ROPE_HALF ? at[j] : at[2 * j], &r2 = c.rope_style == LS_ROPE_HALF ? at[j + half] : at[2 * j + 1];
            const double a = p, d = r2;
            p = a * co - d * si;
            r2 = d * co + a * si;
          }
        }
      };
      turn(q, c.heads, LS_ROLE_Q_NORM);
      turn(k, c.kv_heads, LS_ROLE_K_NORM);
      for (double &e : k) e = keep(e);
      for (double &e : v) e = keep(e);
      keys.push_back(k);
      vals.push_back(v);
      Row mixed(static_cast<size_t>(c.heads) * dim);
      for (uint32_t head = 0; head < c.heads; ++head) {
        Row score(t + 1);
        double top = -1e300, sum = 0;
        for (size_t j = 0; j <= t; ++j) {
          for (uint32_t d = 0; d < dim; ++d) score[j] += q[head * dim + d] * keys[j][head / group * dim + d];
          top = std::max(top, score[j] *= c.attn_scale);
        }
        for (double &s : score) sum += s = std::exp(s - top);
        for (size_t j = 0; j <= t; ++j)
          for (uint32_t d = 0; d < dim; ++d) mixed[head * dim + d] += score[j] / sum * vals[j][head / group * dim + d];
      }
      const Row o = multiply(get(b + LS_ROLE_O), mixed, maybe(b + LS_ROLE_O_BIAS));
      for (uint32_t i = 0; i < c.hidden; ++i) x[t][i] += o[i];
      h = x[t];
      normalise(h.data(), get(b + LS_ROLE_FFN_NORM), c.rms_eps);
      Row gate = multiply(get(b + LS_ROLE_GATE), h, nullptr);
      const Row up = multiply(get(b + LS_ROLE_UP), h, nullptr);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      const Row down = multiply(get(b + LS_ROLE_DOWN), gate, nullptr);
      for (uint32_t i = 0; i < c.hidden; ++i) x[t][i] += down[i];
    }
  }
  std::vector<Row> logits;
  for (Row &row : x) {
    normalise(row.data(), get(LS_ROLE_FINAL_NORM), c.rms_eps);
    logits.push_back(multiply(get(c.tied_embeddings ? LS_ROLE_EMBEDDING : LS_ROLE_LM_HEAD), row, nullptr));
  }
  return logits;
}

std::vector<int32_t> random_tokens(uint32_t n, uint32_t vocab, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> out;
  for (uint32_t i = 0; i < n; ++i) out.push_back(static_cast<int32_t>(random.below(vocab)));
  return out;
}

// Model, pages and pool; forward() gives the logits of the sampling rows.
struct Runner {
  const Tiny &tiny;
  ThreadPool pool;
  KvMemory memory;
  Model model;
  Runner(const Tiny &t, uint32_t threads, const OpsKernels &ops, const AttentionKernels &attention)
      : tiny(t), pool(threads), memory(t.config.layers, t.config.kv_heads, t.config.head_dim, static_cast<ls_dtype>(t.config.kv_dtype)), model(t.config, t.inv_freq.data(), ops, attention) {
    for (const auto &[id, view] : t.views) CHECK(model.set(id, view).ok());
    std::atomic<int32_t> permille{0};
    const Status status = model.finish(pool, permille);
    if (!status.ok()) check::fail(__FILE__, __LINE__, status.text);
    CHECK_EQ(permille.load(), 1000);
    CHECK(memory.reserve(128).ok());
  }
  std::vector<float> forward(const std::vector<StepRow> &rows) {
    StepBatch batch;
    batch.rows = rows;
    uint32_t sampled = 0;
    for (const StepRow &row : rows) batch.tokens += row.len, sampled += row.sample;
    const float *hidden = model.forward(pool, batch, memory);
    CHECK_EQ(hidden == nullptr, sampled == 0);
    std::vector<float> logits(static_cast<size_t>(sampled) * tiny.config.vocab);
    if (sampled) model.head(pool, hidden, sampled, logits.data());
    return logits;
  }
  // Logits of the last token, the sequence given in chunks.
  std::vector<float> chunked(const std::vector<int32_t> &tokens, uint32_t chunk, const std::vector<int32_t> &pages) {
    std::vector<float> logits;
    const uint32_t total = static_cast<uint32_t>(tokens.size());
    for (uint32_t start = 0; start < total; start += chunk) logits = forward({row(tokens, start, std::min(chunk, total - start), pages, start + chunk >= total)});
    return logits;
  }
  static StepRow row(const std::vector<int32_t> &tokens, uint32_t start, uint32_t len, const std::vector<int32_t> &pages, bool sample) {
    StepRow r;
    r.start = start;
    r.len = len;
    r.tokens = tokens.data() + start;
    r.pages = pages.data();
    r.page_count = (start + len + 15) / 16;
    r.sample = sample;
    return r;
  }
};

std::vector<int32_t> page_ids(uint32_t first, int32_t stride, uint32_t count) {
  std::vector<int32_t> out;
  for (uint32_t i = 0; i < count; ++i) out.push_back(static_cast<int32_t>(first) + stride * static_cast<int32_t>(i));
  return out;
}

bool same_bits(const std::vector<float> &a, const std::vector<float> &b) { return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0; }

std::vector<std::pair<std::string, Options>> families() {
  std::vector<std::pair<std::string, Options>> out;
  Options llama, interleaved, qwen2, qwen3, halves, tiles, odd;
  interleaved.style = LS_ROPE_INTERLEAVED, interleaved.tied = false;
  qwen2.qkv_bias = true, qwen2.o_bias = true, qwen2.heads = 4, qwen2.kv_heads = 4;
  qwen3.qk_norm = true, qwen3.head_dim = 32, qwen3.tied = false;
  halves.weights = LS_DTYPE_BF16, halves.kv = LS_DTYPE_BF16, halves.qk_norm = true;
  tiles.weights = LS_DTYPE_BF16, tiles.kv = LS_DTYPE_BF16, tiles.head_dim = 64, tiles.heads = 3, tiles.kv_heads = 1, tiles.layers = 2;
  odd.hidden = 50, odd.head_dim = 18, odd.heads = 5, odd.kv_heads = 1, odd.intermediate = 77, odd.vocab = 301, odd.layers = 1;
  return {{"llama", llama}, {"llama interleaved untied", interleaved}, {"qwen2", qwen2}, {"qwen3 untied", qwen3}, {"bf16 weights and pages", halves}, {"head_dim 64, bf16 weights and pages", tiles}, {"odd sizes, one layer", odd}};
}

}  // namespace

TEST("logits of every family equal a naive double forward pass") {
  for (size_t table = 0; table < support::attention_tables().size(); ++table) {
    const AttentionKernels &kernels = *support::attention_tables()[table];
    for (const auto &[name, options] : families()) {
      const Tiny tiny(options);
      Runner runner(tiny, 2, *support::ops_tables()[table % support::ops_tables().size()], *support::attention_tables()[table]);
      const std::vector<int32_t> tokens = random_tokens(45, options.vocab, 3);
      const std::vector<Row> want = reference(tiny, tokens);
      const std::vector<int32_t> pages = page_ids(100, -3, 8);
      for (uint32_t n : {1u, 2u, 16u, 17u, 45u}) {
        const std::vector<float> got = runner.chunked({tokens.begin(), tokens.begin() + n}, n, pages);
        for (uint32_t i = 0; i < options.vocab; ++i) {
          // A bf16 page rounds a value near a rounding border either way, tiles round q and the weights too; elsewhere only f32 rounding differs.
          const bool tiles = std::strstr(kernels.name, "amx") && options.head_dim % 32 == 0;
          const double allowed = options.kv != LS_DTYPE_BF16 ? 2e-4 : tiles ? 1e-1 : 2e-2;
          if (!(std::fabs(got[i] - want[n - 1][i]) <= allowed)) check::fail(__FILE__, __LINE__, name + " with " + kernels.name + ": logit " + std::to_string(i) + " after " + std::to_string(n) + " tokens is " + std::to_string(got[i]) + ", expected " + std::to_string(want[n - 1][i]));
        }
      }
    }
  }
}

TEST("chunks, threads, page ids and company change no bit of the logits") {
  for (size_t table = 0; table < support::attention_tables().size(); ++table) {
    for (const auto &[name, options] : families()) {
      const Tiny tiny(options);
      const uint32_t n = 290;
      const std::vector<int32_t> tokens = random_tokens(n, options.vocab, 5), other = random_tokens(200, options.vocab, 6);
      const std::vector<int32_t> pages = page_ids(0, 2, 19), mirrored = page_ids(127, -2, 19);
      Runner one(tiny, 1, *support::ops_tables()[table % support::ops_tables().size()], *support::attention_tables()[table]), three(tiny, 3, *support::ops_tables()[table % support::ops_tables().size()], *support::attention_tables()[table]);
      const std::vector<float> whole = one.chunked(tokens, n, pages);
      CHECK(same_bits(whole, three.chunked(tokens, n, mirrored)));
      for (uint32_t chunk : {1u, 16u, 100u}) {
        if (!same_bits(whole, one.chunked(tokens, chunk, mirrored))) check::fail(__FILE__, __LINE__, name + ": chunks of " + std::to_string(chunk) + " differ");
        if (!same_bits(whole, three.chunked(tokens, chunk, pages))) check::fail(__FILE__, __LINE__, name + ": chunks of " + std::to_string(chunk) + " on 3 threads differ");
      }
      // The last token as a decode among a prefill, another decode and a chunk that does not sample.
      one.forward({Runner::row(tokens, 0, n - 1, pages, false)});
      one.forward({Runner::row(other, 0, 60, mirrored, false)});
      const std::vector<int32_t> third = page_ids(41, 4, 13);
      const std::vector<float> batch = one.forward({Runner::row(other, 0, 199, third, true), Runner::row(tokens, n - 1, 1, pages, true), Runner::row(other, 60, 70, mirrored, false)});
      const std::vector<float> row(batch.begin() + options.vocab, batch.end());
      if (!same_bits(whole, row)) check::fail(__FILE__, __LINE__, name + ": the row differs in a batch");
    }
  }
}

TEST("the backend samples, reports and refuses") {
  Options options;
  options.tied = false;
  Tiny tiny(options);
  tiny.config.threads = 1;
  std::unique_ptr<Backend> backend;
  CHECK(make_backend(tiny.config, tiny.inv_freq.data(), backend).ok());
  std::atomic<int32_t> permille{0};
  for (const auto &[id, view] : tiny.views)
    if (id != 256 + LS_ROLE_UP) CHECK(backend->set_tensor(id, view).ok());
  const Status missing = backend->finish_weights(permille);
  CHECK_EQ(missing.code, LS_INVALID);
  CHECK(missing.text.find("up of layer 1") != std::string::npos);
  CHECK(backend->set_tensor(256 + LS_ROLE_UP, tiny.views.at(256 + LS_ROLE_UP)).ok());
  CHECK(backend->finish_weights(permille).ok());
  CHECK(backend->create_pool(32).ok());

  const std::vector<int32_t> tokens = random_tokens(20, options.vocab, 8), pages = page_ids(3, 1, 3), more = page_ids(10, 1, 3);
  StepBatch batch;
  batch.rows = {Runner::row(tokens, 0, 20, pages, true), Runner::row(tokens, 0, 7, more, false)};
  batch.rows[0].n_logprobs = 5;
  batch.tokens = 27;
  StepOutput out;
  CHECK(backend->run(batch, out).ok());
  CHECK_EQ(out.rows.size(), size_t{2});
  CHECK_EQ(out.rows[1].token, -1);
  CHECK_EQ(out.rows[0].top.size(), size_t{5});
  CHECK_EQ(out.rows[0].top[0].first, out.rows[0].token);
  const std::vector<Row> logits = reference(tiny, tokens);
  CHECK_EQ(out.rows[0].token, static_cast<int32_t>(std::max_element(logits[19].begin(), logits[19].end()) - logits[19].begin()));
  // Generated token by token: the same again from a fresh sequence, drawn at temperature 1.
  std::vector<int32_t> first, second;
  for (std::vector<int32_t> *generated : {&first, &second}) {
    std::vector<int32_t> all = tokens;
    const std::vector<int32_t> &use = generated == &first ? pages : more;
    for (uint32_t start = 0; all.size() < 40; ) {
      StepBatch step;
      step.rows = {Runner::row(all, start, static_cast<uint32_t>(all.size()) - start, use, true)};
      step.rows[0].temperature = 1;
      step.rows[0].top_p = 0.9f;
      step.rows[0].seed = 99;
      step.tokens = step.rows[0].len;
      CHECK(backend->run(step, out).ok());
      start = static_cast<uint32_t>(all.size());
      all.push_back(out.rows[0].token);
    }
    generated->assign(all.begin() + 20, all.end());
  }
  CHECK(first == second);
  // A NaN weight shows up as an internal error, not as a token.
  std::vector<float> norm(options.hidden, NAN);
  const TensorView broken{reinterpret_cast<const uint8_t *>(norm.data()), norm.size() * 4, LS_DTYPE_F32, 1, options.hidden};
  std::unique_ptr<Backend> sick;
  CHECK(make_backend(tiny.config, tiny.inv_freq.data(), sick).ok());
  for (const auto &[id, view] : tiny.views) CHECK(sick->set_tensor(id, id == LS_ROLE_FINAL_NORM ? broken : view).ok());
  CHECK(sick->finish_weights(permille).ok());
  CHECK(sick->create_pool(32).ok());
  CHECK_EQ(sick->run(batch, out).code, LS_INTERNAL);

  ls_config wrong = tiny.config;
  wrong.kv_dtype = LS_DTYPE_F16;
  CHECK_EQ(make_backend(wrong, tiny.inv_freq.data(), backend).code, LS_UNSUPPORTED);
  wrong = tiny.config;
  wrong.kv_heads = 4;
  CHECK_EQ(make_backend(wrong, tiny.inv_freq.data(), backend).code, LS_INVALID);
}

TEST("device information is one JSON object") {
  std::string json;
  CHECK(device_info_json(json).ok());
  for (const char *part : {"{\"device\":\"cpu\"", "\"isa\":\"", "\"isas\":[\"avx2\"", "\"threads\":", "\"name\":\""}) CHECK(json.find(part) != std::string::npos);
  CHECK_EQ(json.back(), '}');
}
