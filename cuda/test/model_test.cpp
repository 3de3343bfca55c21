// The whole CUDA device, over the simulator or on a GPU, through the ABI: tiny models of every family beside the CPU device, and the promises of steps.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

#include "abi_engine.h"
#include "check.h"

using namespace ls::test;

namespace {

// The devices round differently (bf16 activations here, f32 there); a wrong operand is off by whole units.
struct Tolerance {
  double most, mean;
};

// Compares log probabilities of the tokens that both lists have; most of them must be shared.
struct Difference {
  double most = 0, sum = 0;
  size_t count = 0, asked = 0;
  void add(const Sampled &got, const Sampled &want) {
    std::map<int32_t, float> expected(want.top.begin(), want.top.end());
    asked += want.top.size();
    for (const auto &[token, logprob] : got.top) {
      const auto at = expected.find(token);
      if (at == expected.end()) continue;
      const double off = std::fabs(static_cast<double>(logprob) - at->second);
      most = std::max(most, off);
      sum += off;
      ++count;
    }
  }
  void expect(const std::string &name, Tolerance allowed) const {
    const double mean = count > 0 ? sum / static_cast<double>(count) : 1e9;
    if (!(most <= allowed.most && mean <= allowed.mean && count * 10 >= asked * 8))
      check::fail(__FILE__, __LINE__, name + ": logprobs differ by up to " + std::to_string(most) + ", " + std::to_string(mean) + " on average, over " + std::to_string(count) + " of " + std::to_string(asked));
  }
};

Row greedy(uint32_t n_logprobs = LS_MAX_LOGPROBS) {
  Row row;
  row.n_logprobs = n_logprobs;
  return row;
}
Row drawn(uint64_t seed) {
  Row row;
  row.temperature = 0.9f;
  row.top_p = 0.9f;
  row.seed = seed;
  row.n_logprobs = 3;
  return row;
}
bool same(const Sampled &a, const Sampled &b) { return a.token == b.token && a.logprob == b.logprob && a.top == b.top; }
// Attention sums in another order for a chunk than for a token: the last bits of bf16 activations may differ. What is drawn may be another
// token then, so only what the logits say is compared.
void expect_near(const Sampled &got, const Sampled &want) {
  Difference difference;
  difference.add(got, want);
  difference.expect("another way to the same token", {0.15, 0.05});
}

Row at(Row row, int32_t slot, uint32_t start, Tokens tokens, bool sample = true) {
  row.slot = slot;
  row.start = start;
  row.tokens = std::move(tokens);
  row.sample = sample;
  if (!sample) row.n_logprobs = 0;
  return row;
}

std::vector<std::pair<std::string, TinyOptions>> families() {
  TinyOptions llama, interleaved, qwen2, qwen3, wide, f32, f16, q8, q4, q41;
  interleaved.interleaved = true, interleaved.tied = false;
  qwen2.qkv_bias = true, qwen2.o_bias = true, qwen2.heads = 4, qwen2.kv_heads = 4;
  qwen3.qk_norm = true, qwen3.head_dim = 32, qwen3.tied = false;
  wide.head_dim = 64, wide.heads = 5, wide.kv_heads = 1, wide.layers = 2, wide.vocab = 301;
  f32.weights = LS_DTYPE_F32, f32.layers = 1;
  f16.weights = LS_DTYPE_F16, f16.layers = 1, f16.tied = false;
  for (TinyOptions *q : {&q8, &q4, &q41}) q->hidden = 64, q->intermediate = 96, q->head_dim = 32, q->heads = 4, q->layers = 2;
  q8.weights = LS_DTYPE_Q8_0, q4.weights = LS_DTYPE_Q4_0, q41.weights = LS_DTYPE_Q4_1;
  q41.tied = false;
  return {{"llama", llama}, {"llama interleaved untied", interleaved}, {"qwen2", qwen2}, {"qwen3 untied", qwen3}, {"head_dim 64, one kv head", wide}, {"f32 weights", f32}, {"f16 weights untied", f16}, {"q8_0", q8}, {"q4_0", q4}, {"q4_1 untied", q41}};
}

// Prefill, then tokens of a fixed continuation one by one: the same input for both devices, whatever they choose.
void compare(const std::string &name, const TinyOptions &options, uint32_t kv, Tolerance allowed) {
  const TinyModel model(options);
  AbiEngine cuda(cuda_api(), model, kv), cpu(cpu_api(), model, LS_KV_BF16);
  const Tokens tokens = random_tokens(52, options.vocab, 3);
  Difference all;
  for (const uint32_t n : {1u, 17u, 47u}) {
    const Tokens prompt(tokens.begin(), tokens.begin() + n);
    const auto here = cuda.open(prompt), there = cpu.open(prompt);
    all.add(cuda.prompt(here.slot, prompt, 0, 64, greedy()), cpu.prompt(there.slot, prompt, 0, 64, greedy()));
    for (uint32_t i = n; n == 47 && i < tokens.size(); ++i) all.add(cuda.step({at(greedy(), here.slot, i, {tokens[i]})})[0], cpu.step({at(greedy(), there.slot, i, {tokens[i]})})[0]);
    cuda.close(here.slot);
    cpu.close(there.slot);
  }
  all.expect(name, allowed);
  cuda.check();
}

}  // namespace

TEST("logprobs of every family and weight type are the CPU device's") {
  for (const auto &[name, options] : families()) compare(name, options, LS_KV_BF16, {0.25, 0.05});
}

TEST("fp8 pages are close to bf16 pages") {
  TinyOptions options;
  compare("e4m3", options, LS_KV_E4M3, {1.2, 0.25});
  compare("e5m2", options, LS_KV_E5M2, {2.0, 0.5});
}

TEST("company changes no bit of a token, chunks and a warm prefix no more than rounding") {
  const TinyOptions options;
  const TinyModel model(options);
  AbiEngine engine(cuda_api(), model, LS_KV_BF16, 128);
  const Tokens tokens = random_tokens(150, options.vocab, 5), other = random_tokens(120, options.vocab, 6);
  for (const Row &how : {greedy(), drawn(77)}) {
    auto one = engine.open(tokens);
    const Sampled whole = engine.prompt(one.slot, tokens, 0, 150, how);
    engine.close(one.slot);
    CHECK_EQ(whole.top.size(), size_t{how.n_logprobs});
    for (const uint32_t chunk : {1u, 16u, 37u}) {
      one = engine.open(tokens);
      CHECK_EQ(one.start, 0u);
      expect_near(engine.prompt(one.slot, tokens, 0, chunk, how), whole);
      engine.close(one.slot);
    }
    one = engine.open(tokens);
    engine.prompt(one.slot, Tokens(tokens.begin(), tokens.end() - 1), 0, 150, greedy(0));
    const Sampled decoded = engine.step({at(how, one.slot, 149, {tokens[149]})})[0];
    engine.close(one.slot);
    // The last token as a decode beside a prefill, a decode and a chunk that does not sample.
    const auto a = engine.open(tokens), b = engine.open(other), c = engine.open(Tokens(other.rbegin(), other.rend()));
    engine.prompt(a.slot, Tokens(tokens.begin(), tokens.end() - 1), 0, 150, how);
    engine.prompt(c.slot, Tokens(other.rbegin(), other.rend() - 1), 0, 150, how);
    const auto mixed = engine.step({at(greedy(0), b.slot, 0, {other.begin(), other.begin() + 70}, false), at(how, a.slot, 149, {tokens[149]}), at(greedy(2), c.slot, 119, {other[0]})});
    CHECK_EQ(mixed[0].token, -1);
    CHECK(same(decoded, mixed[1]));
    engine.close(b.slot);
    engine.close(c.slot);
    engine.close(a.slot, 150);
    // All full pages but the last token's come from the cache.
    one = engine.open(tokens);
    CHECK_EQ(one.cached, 144u);
    expect_near(engine.prompt(one.slot, tokens, one.start, 150, how), whole);
    engine.close(one.slot);
    // Half a page from the cache: its head is copied into a page of the new sequence.
    Tokens fork(tokens.begin(), tokens.begin() + 140);
    fork.insert(fork.end(), {7, 8, 9});
    one = engine.open(fork);
    CHECK_EQ(one.cached, 128u);
    CHECK_EQ(one.start, 140u);
    const Sampled forked = engine.prompt(one.slot, fork, one.start, 150, how);
    engine.close(one.slot);
    CHECK_EQ(ls_cache_clear(engine.handle()), LS_OK);
    one = engine.open(fork);
    CHECK_EQ(one.start, 0u);
    expect_near(engine.prompt(one.slot, fork, 0, 150, how), forked);
    engine.close(one.slot);
  }
  engine.check();
}

TEST("a step is submitted before the one before is waited for: its tokens stay on the device") {
  const TinyOptions options;
  const TinyModel model(options);
  AbiEngine engine(cuda_api(), model, LS_KV_BF16);
  const Tokens first = random_tokens(20, options.vocab, 8), second = random_tokens(33, options.vocab, 9);
  // One by one, with the tokens of results.
  std::vector<Tokens> expected(2);
  auto a = engine.open(first), b = engine.open(second);
  const auto run = [&](bool ahead) {
    std::vector<Tokens> out(2);
    engine.submit({at(drawn(1), a.slot, 0, first), at(drawn(2), b.slot, 0, second)});
    for (uint32_t i = 0; i < 12; ++i) {
      const bool more = i < 11;
      // Rows change places: a carry names its row of the step before.
      const auto rows = [&](int32_t ta, int32_t tb) {
        std::vector<Row> all{at(drawn(1), a.slot, 20 + i, {ta}), at(drawn(2), b.slot, 33 + i, {tb})};
        if (i % 2 == 0) std::swap(all[0], all[1]);
        return all;
      };
      if (ahead && more) engine.submit(rows(-1, -1));
      const auto results = engine.wait();
      const size_t row_a = i % 2 == 1 ? 1 : 0;
      out[0].push_back(results[row_a].token);
      out[1].push_back(results[1 - row_a].token);
      if (!ahead && more) engine.submit(rows(out[0].back(), out[1].back()));
    }
    return out;
  };
  expected = run(false);
  engine.close(a.slot);
  engine.close(b.slot);
  a = engine.open(first), b = engine.open(second);
  CHECK(run(true) == expected);
  // With a step that nobody waits for.
  engine.submit({at(greedy(), a.slot, 31, {-1})});
}

TEST("decode steps of any size give the bits of a step alone, padded or not") {
  TinyOptions options;
  options.max_seqs = 13, options.layers = 2;
  const TinyModel model(options);
  AbiEngine engine(cuda_api(), model, LS_KV_BF16, 128);
  std::vector<int32_t> slots;
  std::vector<Tokens> prompts;
  std::vector<Sampled> alone;
  for (uint32_t i = 0; i < 13; ++i) {
    prompts.push_back(random_tokens(5 + 9 * i, options.vocab, 20 + i));
    const auto opened = engine.open(prompts.back());
    engine.prompt(opened.slot, Tokens(prompts.back().begin(), prompts.back().end() - 1), 0, 128, greedy(0));
    alone.push_back(engine.step({at(drawn(i), opened.slot, static_cast<uint32_t>(prompts.back().size()) - 1, {prompts.back().back()})})[0]);
    engine.close(opened.slot);
  }
  for (const uint32_t size : {1u, 2u, 3u, 5u, 8u, 9u, 13u}) {
    std::vector<Row> rows;
    slots.clear();
    for (uint32_t i = 0; i < size; ++i) {
      const Tokens &p = prompts[i];
      slots.push_back(engine.open(p).slot);
      engine.prompt(slots.back(), Tokens(p.begin(), p.end() - 1), 0, 128, greedy(0));
      rows.push_back(at(drawn(i), slots.back(), static_cast<uint32_t>(p.size()) - 1, {p.back()}));
    }
    const auto results = engine.step(rows);
    for (uint32_t i = 0; i < size; ++i) CHECK(same(results[i], alone[i]));
    for (const int32_t slot : slots) engine.close(slot);
  }
}

#ifndef LS_TEST_GPU  // which is one GPU
TEST("two ranks give the logprobs of one") {
  setenv("LAYERSCALE_SIM_DEVICES", "2", 1);
  for (const bool quantised : {false, true}) {
    TinyOptions options;
    options.o_bias = options.qkv_bias = true, options.heads = 4, options.kv_heads = 2, options.head_dim = 32, options.hidden = 64, options.intermediate = 128;
    if (quantised) options.weights = LS_DTYPE_Q8_0;
    const TinyModel model(options);
    AbiEngine one(cuda_api(), model, LS_KV_BF16), two(cuda_api(), model, LS_KV_BF16, 64, 2);
    const Tokens tokens = random_tokens(40, options.vocab, 4);
    const auto a = one.open(tokens), b = two.open(tokens);
    Difference all;
    all.add(two.prompt(b.slot, Tokens(tokens.begin(), tokens.begin() + 30), 0, 16, greedy()), one.prompt(a.slot, Tokens(tokens.begin(), tokens.begin() + 30), 0, 16, greedy()));
    for (uint32_t i = 30; i < 40; ++i) all.add(two.step({at(greedy(), b.slot, i, {tokens[i]})})[0], one.step({at(greedy(), a.slot, i, {tokens[i]})})[0]);
    all.expect("two ranks", {0.2, 0.05});
  }
  unsetenv("LAYERSCALE_SIM_DEVICES");
}
#endif

TEST("refusals come before weights are loaded, and memory is counted") {
  TinyOptions options;
  const TinyModel model(options);
  ls_engine *engine = nullptr;
  const auto refused = [&](const ls_config &config, int32_t code, const char *part) {
    CHECK_EQ(ls_engine_create(&config, model.inv_freq.data(), &engine), code);
    if (last_error(cuda_api()).find(part) == std::string::npos) check::fail(__FILE__, __LINE__, std::string("no \"") + part + "\" in: " + last_error(cuda_api()));
  };
  refused(model.config(LS_KV_F32), LS_UNSUPPORTED, "kv_dtype f32");
  refused(model.config(LS_KV_BF16, 3), LS_UNSUPPORTED, "kv_heads 2 cannot be split over 3 ranks");
#ifndef LS_TEST_GPU
  refused(model.config(LS_KV_BF16, 2), LS_UNSUPPORTED, "1 are visible");
  setenv("LAYERSCALE_SIM_DRIVER", "0", 1);
  refused(model.config(LS_KV_BF16), LS_UNSUPPORTED, "no CUDA driver");
  setenv("LAYERSCALE_SIM_DRIVER", "12040", 1);
  refused(model.config(LS_KV_BF16), LS_UNSUPPORTED, "too old");
  unsetenv("LAYERSCALE_SIM_DRIVER");
  setenv("LAYERSCALE_SIM_CAPABILITY", "7.5", 1);
  refused(model.config(LS_KV_BF16), LS_UNSUPPORTED, "no kernel image");
  unsetenv("LAYERSCALE_SIM_CAPABILITY");
#endif

  const ls_config config = model.config(LS_KV_BF16);
  CHECK_EQ(ls_engine_create(&config, model.inv_freq.data(), &engine), LS_OK);
  const int32_t file = ls_weights_map(engine, model.path.c_str(), model.bytes);
  for (const TinyModel::Tensor &t : model.tensors) CHECK_EQ(ls_weights_set(engine, t.id, static_cast<uint32_t>(file), t.offset, t.bytes, t.dtype, t.rows, t.cols), LS_OK);
  ls_memory_t memory{};
  memory.struct_size = sizeof memory;
  CHECK_EQ(ls_memory(engine, &memory), LS_STATE);
  CHECK_EQ(ls_weights_finish(engine), LS_OK);
  CHECK_EQ(ls_memory(engine, &memory), LS_OK);
  CHECK_EQ(memory.known, 1u);
  const auto join = [](uint32_t lo, uint32_t hi) { return static_cast<uint64_t>(hi) << 32 | lo; };
  const uint64_t total = join(memory.total_lo, memory.total_hi), free = join(memory.free_lo, memory.free_hi), weights = join(memory.weights_lo, memory.weights_hi), workspace = join(memory.workspace_lo, memory.workspace_hi);
  CHECK(weights > 100'000 && workspace > 100'000);
  CHECK(free + weights + workspace <= total);
  CHECK_EQ(join(memory.page_bytes_lo, memory.page_bytes_hi), uint64_t{3} * 2 * 2 * 16 * 16 * 2);
  // More pages than there is memory for.
  CHECK_EQ(ls_pool_create(engine, static_cast<uint32_t>(total / (3 * 2 * 2 * 16 * 16 * 2)) + 1), LS_NO_MEMORY);
  ls_engine_destroy(engine);
}
