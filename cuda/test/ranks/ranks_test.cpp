// What holds for several ranks in one process and needs the simulator to be seen.
#include <cstdlib>

#include "abi_engine.h"
#include "check.h"

using namespace ls::test;

namespace {

Row part(int32_t slot, const Tokens &tokens, uint32_t begin, uint32_t end) {
  Row row;
  row.slot = slot, row.start = begin, row.tokens.assign(tokens.begin() + begin, tokens.begin() + end);
  return row;
}

}  // namespace

// A kernel's first launch may wait for its device, where another kernel waits for a rank that cannot launch meanwhile.
TEST("every kernel of a step is on every device before the first step") {
  setenv("LAYERSCALE_SIM_DEVICES", "2", 1);
  setenv("LAYERSCALE_SIM_LAZY", "1", 1);
  for (const bool tied : {true, false}) {
    TinyOptions options;
    options.tied = tied, options.heads = 4, options.layers = 1, options.max_seqs = 10, options.max_context = 320, options.max_batch_tokens = 160;
    const TinyModel model(options);
    AbiEngine engine(cuda_api(), model, LS_KV_BF16, 100, 2);
    const Tokens tokens = random_tokens(300, options.vocab, 2);
    auto one = engine.open(tokens);
    // Chunks for every kernel of products and both kinds of attention tiles, then tokens behind more keys than a partition has.
    uint32_t at = 0;
    for (const uint32_t size : {160u, 70u, 40u, 12u, 5u, 1u}) {
      engine.step({part(one.slot, tokens, at, at + size)});
      at += size;
    }
    engine.close(one.slot, at);
    // Half a page of a cached prefix is copied.
    Tokens fork(tokens.begin(), tokens.begin() + 136);
    fork.push_back(1), fork.push_back(2);
    one = engine.open(fork);
    CHECK_EQ(one.start, 136u);
    engine.step({part(one.slot, fork, one.start, 138)});
    engine.close(one.slot);
    // A decode step of several rows.
    std::vector<Row> rows;
    for (uint32_t i = 0; i < 9; ++i) {
      const Tokens start = random_tokens(3, options.vocab, 40 + i);
      rows.push_back(part(engine.open(start).slot, start, 0, 3));
      engine.step({rows.back()});
      rows.back().start = 3, rows.back().tokens = {static_cast<int32_t>(i)}, rows.back().temperature = 0.7f, rows.back().top_p = i % 2 ? 0.9f : 1.0f, rows.back().n_logprobs = 2;
    }
    engine.step(rows);
    engine.check();
  }
  unsetenv("LAYERSCALE_SIM_LAZY");
  unsetenv("LAYERSCALE_SIM_DEVICES");
}
