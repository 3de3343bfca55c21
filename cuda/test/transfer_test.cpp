// KV from one CUDA engine to another, through page-locked memory and TCP, over the simulator or on a GPU.
#include <cstdlib>
#include <cstring>

#include "transfer_node.h"

using namespace ls::test;

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
