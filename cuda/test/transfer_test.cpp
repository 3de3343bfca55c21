// KV from one CUDA engine to another, through page-locked memory and TCP, over the simulator or on a GPU.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "abi_engine.h"
#include "check.h"

using namespace ls::test;

namespace {

// An engine whose KV may leave and enter.
struct Node {
  AbiEngine engine;
  int32_t port = 0;
  uint8_t layout[LS_KV_LAYOUT_BYTES] = {};

  Node(const TinyModel &model, bool listens, uint32_t kv = LS_KV_BF16, uint32_t ranks = 1, uint32_t pages = 64) : engine(cuda_api(), model, kv, pages, ranks) {
    ls_kv_config config{};
    config.struct_size = sizeof config;
    uint8_t digest[LS_KV_DIGEST_BYTES] = {1};
    port = ls_kv_start(engine.handle(), &config, digest, nullptr, nullptr, listens ? "127.0.0.1" : nullptr);
    if (port < 0) throw std::runtime_error(last_error(cuda_api()));
    CHECK_EQ(ls_kv_layout(engine.handle(), layout), LS_OK);
  }

  // Computes and stages the positions before the last token, in chunks. Returns the id.
  uint64_t prefill(const Tokens &tokens, uint32_t chunk) {
    const auto opened = engine.open(tokens);
    CHECK_EQ(ls_kv_stage(engine.handle(), opened.slot, static_cast<uint32_t>(tokens.size()) - 1), LS_OK);
    engine.prompt(opened.slot, tokens, opened.start, chunk, Row{});
    uint32_t id[2];
    if (ls_kv_publish(engine.handle(), opened.slot, id) != LS_OK) check::fail(__FILE__, __LINE__, last_error(cuda_api()));
    engine.close(opened.slot);
    return static_cast<uint64_t>(id[1]) << 32 | id[0];
  }

  struct Pull {
    int32_t code, slot, pages;
  };
  Pull pull(const Node &from, uint64_t id, const Tokens &tokens) {
    ls_kv_source source{sizeof source, static_cast<uint32_t>(from.port), static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32), LS_KV_LAYOUT_BYTES};
    int32_t out[4] = {-1, 0, 0, 0};
    const int32_t code = ls_seq_open_pull(engine.handle(), tokens.data(), static_cast<uint32_t>(tokens.size()), 0, 0, &source, "127.0.0.1", from.layout, out);
    return {code, out[0], out[3]};
  }
  // The end of the only pull under way.
  int32_t ended() {
    int32_t words[256];
    for (int i = 0; i < 30'000; ++i) {
      const int32_t count = ls_kv_events(engine.handle(), words, 256);
      CHECK(count >= 0);
      if (count > 0) return words[2];
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    check::fail(__FILE__, __LINE__, "no event within 30 s");
  }
};

Row decode(int32_t slot, uint32_t start, int32_t token) {
  Row row;
  row.slot = slot;
  row.start = start;
  row.tokens = {token};
  row.n_logprobs = LS_MAX_LOGPROBS;
  return row;
}

// The last token of the prompt, and those after it, on an engine that computed all by itself.
std::vector<Sampled> alone(const TinyModel &model, const Tokens &tokens, uint32_t more, uint32_t chunk, uint32_t kv = LS_KV_BF16) {
  AbiEngine engine(cuda_api(), model, kv);
  // As after a pull: the last token of the prompt alone.
  const auto opened = engine.open(tokens);
  Row quiet;
  quiet.sample = false;
  engine.prompt(opened.slot, Tokens(tokens.begin(), tokens.end() - 1), 0, chunk, quiet);
  std::vector<Sampled> out{engine.step({decode(opened.slot, static_cast<uint32_t>(tokens.size()) - 1, tokens.back())})[0]};
  for (uint32_t i = 0; i < more; ++i) out.push_back(engine.step({decode(opened.slot, static_cast<uint32_t>(tokens.size()) + i, out.back().token)})[0]);
  return out;
}

void expect_decode(Node &to, int32_t slot, const Tokens &tokens, const std::vector<Sampled> &expected) {
  int32_t token = tokens.back();
  for (size_t i = 0; i < expected.size(); ++i) {
    const Sampled got = to.engine.step({decode(slot, static_cast<uint32_t>(tokens.size() + i) - 1, token)})[0];
    CHECK_EQ(got.token, expected[i].token);
    CHECK(got.top == expected[i].top);
    token = got.token;
  }
}

}  // namespace

TEST("a pulled prompt decodes to the bits of one that was computed, in one chunk and in many") {
  const TinyOptions options;
  const TinyModel model(options);
  for (const uint32_t kv : {LS_KV_BF16, LS_KV_E4M3}) {
    Node from(model, true, kv), to(model, false, kv);
    for (const uint32_t length : {2u, 17u, 33u, 150u}) {
      const Tokens tokens = random_tokens(length, options.vocab, length);
      for (const uint32_t chunk : {256u, 16u, 7u}) {
        const auto expected = alone(model, tokens, 5, chunk, kv);
        const auto pulled = to.pull(from, from.prefill(tokens, chunk), tokens);
        if (pulled.code != LS_OK) check::fail(__FILE__, __LINE__, last_error(cuda_api()));
        CHECK_EQ(pulled.pages, static_cast<int32_t>((length - 1 + 15) / 16));
        CHECK_EQ(to.ended(), static_cast<int32_t>(LS_KV_DONE));
        expect_decode(to, pulled.slot, tokens, expected);
        to.engine.close(pulled.slot);
      }
    }
    to.engine.check();
    from.engine.check();
  }
}

TEST("more pages than the landing memory holds at a time") {
  TinyOptions options;
  options.max_context = 4096, options.layers = 2;
  const TinyModel model(options);
  Node from(model, true, LS_KV_BF16, 1, 300), to(model, false, LS_KV_BF16, 1, 300);
  const Tokens tokens = random_tokens(3400, options.vocab, 9);
  const auto opened = from.engine.open(tokens);
  Row quiet;
  quiet.sample = false;
  from.engine.prompt(opened.slot, Tokens(tokens.begin(), tokens.end() - 1), 0, 256, quiet);
  const Sampled whole = from.engine.step({decode(opened.slot, 3399, tokens.back())})[0];
  from.engine.close(opened.slot, 3400);
  // Warm: staged from the cache, without a step for most of it.
  const auto pulled = to.pull(from, from.prefill(tokens, 256), tokens);
  CHECK_EQ(pulled.code, LS_OK);
  CHECK_EQ(to.ended(), static_cast<int32_t>(LS_KV_DONE));
  const Sampled got = to.engine.step({decode(pulled.slot, 3399, tokens.back())})[0];
  CHECK(got.top == whole.top);
}

#ifndef LS_TEST_GPU  // which is one GPU
TEST("two ranks send to one and take from one: a page is the same bytes") {
  setenv("LAYERSCALE_SIM_DEVICES", "2", 1);
  TinyOptions options;
  options.heads = 4, options.kv_heads = 2, options.head_dim = 32, options.hidden = 64, options.intermediate = 128;
  const TinyModel model(options);
  Node two(model, true, LS_KV_BF16, 2), one(model, true);
  CHECK(std::memcmp(two.layout, one.layout, sizeof two.layout) == 0);
  const Tokens tokens = random_tokens(70, options.vocab, 4);
  for (Node *from : {&two, &one}) {
    Node &to = from == &two ? one : two;
    const auto pulled = to.pull(*from, from->prefill(tokens, 32), tokens);
    CHECK_EQ(pulled.code, LS_OK);
    CHECK_EQ(to.ended(), static_cast<int32_t>(LS_KV_DONE));
    // Ranks add in another order, so the last bits differ.
    const Sampled got = to.engine.step({decode(pulled.slot, 69, tokens.back())})[0], expected = alone(model, tokens, 0, 32)[0];
    CHECK(std::abs(got.logprob - expected.logprob) < 0.1f);
    to.engine.close(pulled.slot);
    from->ended();
  }
  unsetenv("LAYERSCALE_SIM_DEVICES");
}
#endif

TEST("another element type is refused, and a pull that is closed midway leaves nothing behind") {
  const TinyOptions options;
  const TinyModel model(options);
  Node from(model, true), other(model, false, LS_KV_E5M2), to(model, false);
  const Tokens tokens = random_tokens(200, options.vocab, 11);
  CHECK_EQ(other.pull(from, from.prefill(tokens, 64), tokens).code, LS_LAYOUT);
  for (int i = 0; i < 8; ++i) {
    const auto pulled = to.pull(from, from.prefill(tokens, 64), tokens);
    CHECK_EQ(pulled.code, LS_OK);
    to.engine.close(pulled.slot);
    to.engine.check();
  }
  const auto expected = alone(model, tokens, 0, 64);
  const auto opened = to.engine.open(tokens);
  Row quiet;
  quiet.sample = false;
  to.engine.prompt(opened.slot, Tokens(tokens.begin(), tokens.end() - 1), 0, 64, quiet);
  CHECK(to.engine.step({decode(opened.slot, 199, tokens.back())})[0].top == expected[0].top);
}
