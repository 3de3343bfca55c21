// Scales of an fp8 cache, through the ABI and over the simulator: whole tiny models beside a double reference that rounds K and V with the same
// scales, and transfers between engines that have some. K and V of the layers differ in size by many orders of magnitude, so that a scale that is
// ignored, or is another layer's or side's, leaves nothing of them: too large for fp8 or too small.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "reference_model.h"
#include "transfer_node.h"

using namespace ls::test;

namespace {

// Differences of log probabilities from the reference.
struct Difference {
  double most = 0, sum = 0;
  size_t count = 0;
  void add(const Sampled &got, const std::vector<double> &want) {
    CHECK_EQ(got.top.size(), size_t{LS_MAX_LOGPROBS});
    for (const auto &[token, logprob] : got.top) {
      const double off = std::fabs(static_cast<double>(logprob) - want[static_cast<size_t>(token)]);
      most = std::max(most, off);
      sum += off;
      ++count;
    }
  }
  double mean() const { return sum / static_cast<double>(count); }
  std::string text() const { return "up to " + std::to_string(most) + ", " + std::to_string(mean()) + " on average"; }
};

Row row(int32_t slot, uint32_t start, Tokens tokens) {
  Row row;
  row.slot = slot;
  row.start = start;
  row.tokens = std::move(tokens);
  row.n_logprobs = LS_MAX_LOGPROBS;
  return row;
}

// Three prompts, of which the last goes on token by token, as captured decode steps do.
Difference against(const std::vector<std::vector<double>> &reference, AbiEngine &engine, const Tokens &tokens) {
  Difference all;
  for (const uint32_t n : {1u, 17u, 47u}) {
    const Tokens prompt(tokens.begin(), tokens.begin() + n);
    const auto opened = engine.open(prompt);
    all.add(engine.prompt(opened.slot, prompt, 0, 20, row(0, 0, {})), reference[n - 1]);
    for (uint32_t i = n; n == 47 && i < tokens.size(); ++i) all.add(engine.step({row(opened.slot, i, {tokens[i]})})[0], reference[i]);
    engine.close(opened.slot);
  }
  engine.check();
  return all;
}

// Sizes of K and V by layer, and scales that bring the largest of them near the end of e4m3.
const std::vector<float> kKeyGain = {1e6f, 3e-6f, 40.0f}, kValueGain = {2e-5f, 7e5f, 0.004f};
std::vector<float> scales_for(float of_one) {
  std::vector<float> scales;
  for (size_t l = 0; l < kKeyGain.size(); ++l) scales.push_back(kKeyGain[l] * of_one), scales.push_back(kValueGain[l] * of_one * 1.3f);
  return scales;
}

TinyOptions sized(TinyOptions options = {}) {
  options.k_gain.assign(kKeyGain.begin(), kKeyGain.begin() + options.layers);
  options.v_gain.assign(kValueGain.begin(), kValueGain.begin() + options.layers);
  return options;
}

// Scales of the first layers.
std::vector<float> first(std::vector<float> scales, uint32_t layers) {
  scales.resize(size_t{2} * layers);
  return scales;
}

// Twice what a correct device shows, since it sums in other orders; a wrong scale shows fifty times as much.
bool near(const Difference &off) { return off.most <= 0.4 && off.mean() <= 0.08; }

constexpr float kOfOne = 0.021f;  // K and V have a deviation of about 1, and hardly an element above 9

}  // namespace

TEST("the reference rounds to the nearest element of fp8") {
  for (const double value : {0.0, 1.0, 448.0, -448.0, 0.001953125, 1.125, 240.0}) CHECK_EQ(nearest_fp8(value, LS_KV_E4M3), value);
  CHECK_EQ(nearest_fp8(1e9, LS_KV_E4M3), 448.0);
  CHECK_EQ(nearest_fp8(-460.0, LS_KV_E4M3), -448.0);
  CHECK_EQ(nearest_fp8(1.0625, LS_KV_E4M3), 1.0);    // a tie: to the even code
  CHECK_EQ(nearest_fp8(1.1875, LS_KV_E4M3), 1.25);
  CHECK_EQ(nearest_fp8(0.0009, LS_KV_E4M3), 0.0);    // half of the smallest is 0.00098
  CHECK_EQ(nearest_fp8(0.0011, LS_KV_E4M3), 0.001953125);
  CHECK_EQ(nearest_fp8(1e9, LS_KV_E5M2), 57344.0);
  CHECK_EQ(nearest_fp8(5.1, LS_KV_E5M2), 5.0);
  CHECK_EQ(nearest_fp8(-1.1, LS_KV_E5M2), -1.0);
}

TEST("whole models of every family with scales equal the double reference") {
  TinyOptions llama, interleaved, qwen2, qwen3, wide;
  interleaved.interleaved = true, interleaved.tied = false;
  qwen2.qkv_bias = true, qwen2.o_bias = true, qwen2.heads = 4, qwen2.kv_heads = 4;
  qwen3.qk_norm = true, qwen3.head_dim = 32, qwen3.tied = false;
  wide.head_dim = 64, wide.heads = 5, wide.kv_heads = 1, wide.layers = 2, wide.vocab = 301;
  const std::pair<const char *, TinyOptions> families[] = {{"llama", llama}, {"interleaved", interleaved}, {"qwen2", qwen2}, {"qwen3", qwen3}, {"head_dim 64, one kv head", wide}};
  for (const auto &[name, options] : families) {
    const TinyModel model(sized(options));
    const Tokens tokens = random_tokens(56, options.vocab, 3);
    const std::vector<float> scales = first(scales_for(kOfOne), options.layers);
    for (const uint32_t kv : {LS_KV_E4M3, LS_KV_E5M2}) {
      AbiEngine engine(cuda_api(), model, kv, 64, 1, scales);
      const Difference off = against(ReferenceModel(model).logprobs(tokens, kv, scales), engine, tokens);
      if (!near(off)) check::fail(__FILE__, __LINE__, std::string(name) + ": logprobs differ by " + off.text());
    }
  }
}

TEST("scales that are ignored, swapped or another layer's leave nothing of the answer") {
  const TinyModel model(sized());
  const Tokens tokens = random_tokens(56, model.options.vocab, 3);
  const std::vector<float> right = scales_for(kOfOne);
  std::vector<float> sides = right, layers(right.begin() + 2, right.end());
  for (size_t i = 0; i < sides.size(); i += 2) std::swap(sides[i], sides[i + 1]);
  layers.insert(layers.end(), right.begin(), right.begin() + 2);
  const std::vector<std::vector<float>> wrong{{}, sides, layers};
  for (const uint32_t kv : {LS_KV_E4M3, LS_KV_E5M2}) {
    const auto reference = ReferenceModel(model).logprobs(tokens, kv, right);
    for (const std::vector<float> &scales : wrong) {
      AbiEngine engine(cuda_api(), model, kv, 64, 1, scales);
      const Difference off = against(reference, engine, tokens);
      CHECK(off.mean() > 0.5);
    }
  }
}

TEST("K and V near 1000 are cut at 448 without a scale, and are whole with one") {
  TinyOptions options;
  options.k_gain = options.v_gain = {400, 400, 400};
  const TinyModel model(options);
  const Tokens tokens = random_tokens(56, options.vocab, 3);
  // Beside a cache that is not quantised: the loss with a scale is that of fp8, as for a model whose K and V are small.
  AbiEngine exact(cuda_api(), model, LS_KV_BF16), scaled(cuda_api(), model, LS_KV_E4M3, 64, 1, std::vector<float>(6, 400 * kOfOne)), cut(cuda_api(), model, LS_KV_E4M3);
  const auto opened = exact.open(tokens);
  Difference with, without;
  const auto one = scaled.open(tokens), two = cut.open(tokens);
  for (uint32_t i = 0; i < tokens.size(); ++i) {
    const Sampled expected = exact.step({row(opened.slot, i, {tokens[i]})})[0], a = scaled.step({row(one.slot, i, {tokens[i]})})[0], b = cut.step({row(two.slot, i, {tokens[i]})})[0];
    // Of the tokens that all three tell.
    const auto of = [](const Sampled &sampled, int32_t token) {
      const auto at = std::find_if(sampled.top.begin(), sampled.top.end(), [&](const auto &entry) { return entry.first == token; });
      return at == sampled.top.end() ? std::nan("") : static_cast<double>(at->second);
    };
    for (const auto &[token, logprob] : expected.top) {
      const auto add = [&, token = token, logprob = logprob](Difference &to, const Sampled &got) {
        // A token that is not among the likeliest any more counts as one that is as likely as the last of them.
        const double told = of(got, token), off = std::fabs((std::isnan(told) ? static_cast<double>(got.top.back().second) : told) - static_cast<double>(logprob));
        to.most = std::max(to.most, off), to.sum += off, ++to.count;
      };
      add(with, a), add(without, b);
    }
  }
  CHECK(with.mean() < 0.2);
  CHECK(without.mean() > 4 * with.mean());
}

#ifndef LS_TEST_GPU  // which is one GPU
TEST("two ranks have the scales, too") {
  setenv("LAYERSCALE_SIM_DEVICES", "2", 1);
  TinyOptions options;
  options.heads = 4, options.kv_heads = 2, options.head_dim = 32, options.hidden = 64, options.intermediate = 128;
  const TinyModel model(sized(options));
  const Tokens tokens = random_tokens(56, options.vocab, 4);
  const std::vector<float> scales = scales_for(kOfOne);
  AbiEngine engine(cuda_api(), model, LS_KV_E4M3, 64, 2, scales);
  const Difference off = against(ReferenceModel(model).logprobs(tokens, LS_KV_E4M3, scales), engine, tokens);
  if (!near(off)) check::fail(__FILE__, __LINE__, "two ranks: logprobs differ by " + off.text());
  unsetenv("LAYERSCALE_SIM_DEVICES");
}
#endif

TEST("KV goes to an engine with the same scales bit for bit; one with others refuses it by name") {
  const TinyModel model(sized());
  const std::vector<float> scales = scales_for(kOfOne);
  std::vector<float> others = scales;
  others[3] *= 1.25f;
  Node from(model, true, LS_KV_E4M3, 1, 64, scales), to(model, false, LS_KV_E4M3, 1, 64, scales), other(model, false, LS_KV_E4M3, 1, 64, others), plain(model, false, LS_KV_E4M3);
  const Tokens tokens = random_tokens(70, model.options.vocab, 7);
  const auto expected = alone(model, tokens, 4, 32, LS_KV_E4M3, scales);
  const auto pulled = to.pull(from, from.prefill(tokens, 32), tokens);
  CHECK_EQ(pulled.code, LS_OK);
  CHECK_EQ(to.ended(), static_cast<int32_t>(LS_KV_DONE));
  expect_decode(to, pulled.slot, tokens, expected);
  for (Node *node : {&other, &plain}) {
    CHECK_EQ(node->pull(from, from.prefill(tokens, 32), tokens).code, LS_LAYOUT);
    const std::string text = last_error(cuda_api());
    if (text.find("cache scales is ") == std::string::npos) check::fail(__FILE__, __LINE__, text);
    node->engine.check();
  }
}

TEST("the CPU device has no fp8 cache, and no scales for the caches that it has") {
  const TinyModel model(TinyOptions{});
  const Api &cpu = cpu_api();
  ls_engine *engine = nullptr;
  for (const uint32_t kv : {LS_KV_E4M3, LS_KV_E5M2}) {
    const ls_config config = model.config(kv);
    CHECK_EQ(cpu.engine_create(&config, model.inv_freq.data(), &engine), LS_UNSUPPORTED);
  }
  const std::vector<float> scales(6, 1.0f);
  for (const Api *api : {&cpu, &cuda_api()}) {
    const ls_config config = model.config(LS_KV_BF16);
    CHECK_EQ(api->engine_create(&config, model.inv_freq.data(), &engine), LS_OK);
    CHECK_EQ(api->kv_scales(engine, scales.data(), 3), LS_UNSUPPORTED);
    const std::string text = last_error(*api);
    api->engine_destroy(engine);
    if (text.find("kv_dtype 2 has no scales") == std::string::npos) check::fail(__FILE__, __LINE__, text);
  }
}
