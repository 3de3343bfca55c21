// CUDA engines over the simulator whose KV may leave and enter, and what they must decode to.
#pragma once
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "abi_engine.h"
#include "check.h"

namespace ls::test {

// An engine whose KV may leave and enter.
struct Node {
  AbiEngine engine;
  int32_t port = 0;
  uint8_t layout[LS_KV_LAYOUT_BYTES] = {};

  Node(const TinyModel &model, bool listens, uint32_t kv = LS_KV_BF16, uint32_t ranks = 1, uint32_t pages = 64, const std::vector<float> &kv_scales = {}) : engine(cuda_api(), model, kv, pages, ranks, kv_scales) {
    ls_kv_config config{};
    config.struct_size = sizeof config;
    uint8_t digest[LS_KV_DIGEST_BYTES] = {1};
    port = ls_kv_start(engine.handle(), &config, digest, nullptr, listens ? "127.0.0.1" : nullptr);
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

inline Row decode(int32_t slot, uint32_t start, int32_t token) {
  Row row;
  row.slot = slot;
  row.start = start;
  row.tokens = {token};
  row.n_logprobs = LS_MAX_LOGPROBS;
  return row;
}

// The last token of the prompt, and those after it, on an engine that computed all by itself.
inline std::vector<Sampled> alone(const TinyModel &model, const Tokens &tokens, uint32_t more, uint32_t chunk, uint32_t kv = LS_KV_BF16, const std::vector<float> &kv_scales = {}) {
  AbiEngine engine(cuda_api(), model, kv, 64, 1, kv_scales);
  // As after a pull: the last token of the prompt alone.
  const auto opened = engine.open(tokens);
  Row quiet;
  quiet.sample = false;
  engine.prompt(opened.slot, Tokens(tokens.begin(), tokens.end() - 1), 0, chunk, quiet);
  std::vector<Sampled> out{engine.step({decode(opened.slot, static_cast<uint32_t>(tokens.size()) - 1, tokens.back())})[0]};
  for (uint32_t i = 0; i < more; ++i) out.push_back(engine.step({decode(opened.slot, static_cast<uint32_t>(tokens.size()) + i, out.back().token)})[0]);
  return out;
}

inline void expect_decode(Node &to, int32_t slot, const Tokens &tokens, const std::vector<Sampled> &expected) {
  int32_t token = tokens.back();
  for (size_t i = 0; i < expected.size(); ++i) {
    const Sampled got = to.engine.step({decode(slot, static_cast<uint32_t>(tokens.size() + i) - 1, token)})[0];
    CHECK_EQ(got.token, expected[i].token);
    CHECK(got.top == expected[i].top);
    token = got.token;
  }
}

}  // namespace ls::test
