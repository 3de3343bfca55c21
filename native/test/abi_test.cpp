// Config, phases and error texts. Weights are in weights_test.cpp.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <limits>
#include <thread>

#include "check.h"
#include "config.h"
#include "loading.h"

using namespace ls::test;


TEST("config: every field has limits, and the error names field and value") {
  struct Case { const char *field; uint32_t ls_config::*member; uint32_t value; };
  const Case cases[] = {
      {"struct_size", &ls_config::struct_size, 0}, {"struct_size", &ls_config::struct_size, 8}, {"struct_size", &ls_config::struct_size, sizeof(ls_config) + 4},
      {"hidden", &ls_config::hidden, 0}, {"hidden", &ls_config::hidden, ~0u}, {"layers", &ls_config::layers, 0}, {"layers", &ls_config::layers, LS_MAX_LAYERS + 1},
      {"heads", &ls_config::heads, 0}, {"kv_heads", &ls_config::kv_heads, 0}, {"heads", &ls_config::kv_heads, 3}, {"heads", &ls_config::heads, ~0u},
      {"head_dim", &ls_config::head_dim, 0}, {"head_dim", &ls_config::head_dim, 15}, {"head_dim", &ls_config::head_dim, LS_MAX_HEAD_DIM + 2},
      {"intermediate", &ls_config::intermediate, 0}, {"intermediate", &ls_config::intermediate, ~0u}, {"vocab", &ls_config::vocab, 0}, {"vocab", &ls_config::vocab, 1u << 31},
      {"rope_style", &ls_config::rope_style, 2}, {"qkv_bias", &ls_config::qkv_bias, 2}, {"o_bias", &ls_config::o_bias, 2}, {"qk_norm", &ls_config::qk_norm, 7},
      {"tied_embeddings", &ls_config::tied_embeddings, 2}, {"max_context", &ls_config::max_context, 0}, {"max_context", &ls_config::max_context, 1u << 31},
      {"max_seqs", &ls_config::max_seqs, 0}, {"max_seqs", &ls_config::max_seqs, ~0u}, {"max_batch_tokens", &ls_config::max_batch_tokens, 0}, {"max_batch_tokens", &ls_config::max_batch_tokens, ~0u},
      {"kv_dtype", &ls_config::kv_dtype, LS_DTYPE_F16}, {"kv_dtype", &ls_config::kv_dtype, 99}, {"prefix_cache", &ls_config::prefix_cache, 2}, {"threads", &ls_config::threads, 1u << 20},
      {"device_index", &ls_config::device_index, ~0u},
  };
  const std::vector<float> inv_freq(LS_MAX_HEAD_DIM, 1.0f);
  const auto refused = [&](const ls_config &config, const std::string &field) {
    ls_engine *engine = reinterpret_cast<ls_engine *>(1);
    const int32_t code = ls_engine_create(&config, inv_freq.data(), &engine);
    if (code != LS_INVALID || engine != nullptr || !says("config." + field + " is ")) check::fail(__FILE__, __LINE__, field + ": " + std::to_string(code) + " " + last_error());
  };
  for (const Case &c : cases) {
    ls_config config = small_config();
    config.*c.member = c.value;
    refused(config, c.field);
  }
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const float bad : {nan, inf, -inf, -1.0f}) {
    ls_config config = small_config();
    config.rms_eps = bad;
    refused(config, "rms_eps");
    config = small_config();
    config.attn_scale = bad;
    refused(config, "attn_scale");
    config = small_config();
    config.rope_scale = bad;
    refused(config, "rope_scale");
  }
}

TEST("config: inv_freq is copied and checked; NULL arguments are refused") {
  const ls_config config = small_config();
  ls_engine *engine = nullptr;
  std::vector<float> inv_freq = small_inv_freq(config);
  CHECK_EQ(ls_engine_create(nullptr, inv_freq.data(), &engine), LS_INVALID);
  CHECK_EQ(ls_engine_create(&config, nullptr, &engine), LS_INVALID);
  CHECK_EQ(ls_engine_create(&config, inv_freq.data(), nullptr), LS_INVALID);
  inv_freq[3] = std::numeric_limits<float>::infinity();
  CHECK_EQ(ls_engine_create(&config, inv_freq.data(), &engine), LS_INVALID);
  CHECK(says("inv_freq[3]"));
  next_make_status() = ls::Status::fail(LS_UNSUPPORTED, "no such machine");
  inv_freq[3] = 1;
  CHECK_EQ(ls_engine_create(&config, inv_freq.data(), &engine), LS_UNSUPPORTED);
  CHECK(engine == nullptr);
  CHECK(says("no such machine"));
}

TEST("every call refuses a NULL engine") {
  int32_t words[64] = {};
  ls_pool_stats_t stats{};
  CHECK_EQ(ls_weights_map(nullptr, "x", 0), LS_INVALID);
  CHECK_EQ(ls_weights_set(nullptr, 0, 0, 0, 0, 0, 0, 0), LS_INVALID);
  CHECK_EQ(ls_weights_finish(nullptr), LS_INVALID);
  CHECK_EQ(ls_load_progress(nullptr), LS_INVALID);
  CHECK_EQ(ls_pool_create(nullptr, 1), LS_INVALID);
  CHECK_EQ(ls_pool_stats(nullptr, &stats), LS_INVALID);
  CHECK_EQ(ls_pool_check(nullptr), LS_INVALID);
  CHECK_EQ(ls_seq_open(nullptr, words, 1, 0, 0, words), LS_INVALID);
  CHECK_EQ(ls_seq_close(nullptr, 0, 0), LS_INVALID);
  CHECK_EQ(ls_step_submit(nullptr, words, 64), LS_INVALID);
  CHECK_EQ(ls_step_wait(nullptr, words, 64), LS_INVALID);
  CHECK_EQ(ls_cache_clear(nullptr), LS_INVALID);
  CHECK_EQ(ls_events_drain(nullptr, words, 64), LS_INVALID);
  CHECK_EQ(last_error(), std::string("engine is NULL"));
}

TEST("last error: per thread, cut to capacity without splitting a character") {
  CHECK_EQ(ls_weights_finish(nullptr), LS_INVALID);
  std::thread([] { CHECK_EQ(last_error(), std::string()); }).join();
  char text[8] = "xxxxxxx";
  CHECK_EQ(ls_last_error(text, 7), 14);
  CHECK_EQ(std::string(text), std::string("engine"));
  CHECK_EQ(ls_last_error(text, 1), 14);
  CHECK_EQ(std::string(text), std::string());
  CHECK_EQ(ls_last_error(nullptr, 100), 14);
  CHECK_EQ(ls_abi_version(), LS_ABI_VERSION);
  char json[256];
  const int32_t length = ls_device_info(json, sizeof json);
  const std::string all = json;
  CHECK_EQ(static_cast<size_t>(length), all.size());
  const size_t umlaut = all.find("ä");
  CHECK_EQ(ls_device_info(json, static_cast<uint32_t>(umlaut + 2)), length);  // room for one of its two bytes
  CHECK_EQ(std::string(json), all.substr(0, umlaut));
}

TEST("phases: each call out of order is LS_STATE") {
  Loading l;
  int32_t words[64] = {1};
  ls_pool_stats_t stats{};
  stats.struct_size = sizeof stats;
  const auto no_pool = [&] {
    CHECK_EQ(ls_seq_open(l.engine, words, 1, 0, 0, words), LS_STATE);
    CHECK_EQ(ls_seq_close(l.engine, 0, 0), LS_STATE);
    CHECK_EQ(ls_step_submit(l.engine, words, 64), LS_STATE);
    CHECK_EQ(ls_step_wait(l.engine, words, 64), LS_STATE);
    CHECK_EQ(ls_cache_clear(l.engine), LS_STATE);
    CHECK_EQ(ls_events_drain(l.engine, words, 64), LS_STATE);
    CHECK_EQ(ls_pool_check(l.engine), LS_STATE);
    CHECK_EQ(ls_pool_stats(l.engine, &stats), LS_OK);
    CHECK_EQ(stats.total, 0u);
  };
  no_pool();
  CHECK_EQ(ls_pool_create(l.engine, 4), LS_STATE);
  CHECK_EQ(ls_load_progress(l.engine), 0);
  CHECK_EQ(load_zeros(l.engine, l.config), LS_OK);
  CHECK_EQ(ls_weights_finish(l.engine), LS_OK);
  CHECK_EQ(ls_load_progress(l.engine), 1000);
  no_pool();
  CHECK_EQ(ls_weights_finish(l.engine), LS_STATE);
  CHECK_EQ(ls_weights_map(l.engine, l.file.path(), 0), LS_STATE);
  CHECK_EQ(l.set(LS_ROLE_EMBEDDING, LS_DTYPE_F32, 1000, 32), LS_STATE);
  CHECK_EQ(ls_pool_create(l.engine, 0), LS_INVALID);
  CHECK_EQ(ls_pool_create(l.engine, ~0u), LS_INVALID);
  CHECK(says("4294967295"));
  device().pool_status = ls::Status::fail(LS_NO_MEMORY, "no room");
  CHECK_EQ(ls_pool_create(l.engine, 4), LS_NO_MEMORY);
  no_pool();
  CHECK_EQ(ls_pool_create(l.engine, 4), LS_OK);  // smaller demands may succeed
  CHECK_EQ(ls_pool_create(l.engine, 4), LS_STATE);
  CHECK_EQ(ls_pool_stats(l.engine, nullptr), LS_INVALID);
  stats.struct_size = 4;
  CHECK_EQ(ls_pool_stats(l.engine, &stats), LS_INVALID);
}

TEST("events: whole events only, and a buffer too small for one is an error") {
  Rig rig;
  rig.serve(range(0, 32));
  int32_t words[64];
  CHECK_EQ(ls_events_drain(rig.engine, words, 20), LS_INVALID);
  CHECK(says("needs 21"));
  CHECK_EQ(ls_events_drain(rig.engine, nullptr, 20), LS_INVALID);
  CHECK_EQ(ls_events_drain(rig.engine, words, 41), 21);
  CHECK_EQ(words[0], static_cast<int32_t>(LS_EVENT_STORED));
  CHECK_EQ(words[2], -1);
  CHECK_EQ(words[5], 0);
  CHECK_EQ(words[20], 15);
  const int32_t first = words[1];
  CHECK_EQ(ls_events_drain(rig.engine, words, 64), 21);
  CHECK_EQ(words[2], first);
  CHECK_EQ(ls_events_drain(rig.engine, words, 0), 0);
  rig.serve(range(0, 32), 0xfedcba9876543210u);
  const std::vector<Event> events = rig.events(21);
  CHECK_EQ(events.size(), size_t{2});
  CHECK_EQ(events[0].domain, 0xfedcba9876543210u);
  CHECK_EQ(ls_cache_clear(rig.engine), LS_OK);
  CHECK_EQ(rig.events().size(), size_t{1});
  rig.check();
  CHECK_EQ(rig.stats().free, 32u);
}
