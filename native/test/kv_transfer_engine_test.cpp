// Two engines over the fake device, one staging and one pulling: what arrives is what was computed, whatever happens on the way.
#include <cstring>
#include <random>

#include "kv_support.h"

using namespace ls;
using namespace ls::test;

namespace {

Tokens prompt_of(uint32_t n, uint32_t seed = 1) {
  std::mt19937 random(seed);
  Tokens t(n);
  for (int32_t &v : t) v = static_cast<int32_t>(random() % 1000);
  return t;
}

KvOptions quick() {
  KvOptions o;
  o.config.connection_ms = 2000;
  o.config.connect_ms = o.config.idle_ms = 500;
  return o;
}

// Nothing staged, nothing under way, no page held.
void expect_clean(KvRig &rig) {
  wait_until("staged copies are gone", [&] { return rig.kv_stats().staged == 0; });
  wait_until("pulls are over", [&] { return rig.kv_stats().pulls == 0; });
  const ls_kv_stats_t s = rig.kv_stats();
  CHECK_EQ(s.filling, 0u);
  CHECK_EQ(rig.staged_bytes(), 0u);
  CHECK_EQ(s.filling_bytes_lo, 0u);
  CHECK_EQ(rig.stats().held, 0u);
  rig.check();
}

void expect_done(KvRig &rig, const PullOpened &pull) {
  const KvEvent e = rig.event();
  if (e.reason != LS_KV_DONE) throw std::runtime_error("the pull ended with " + std::to_string(e.reason) + " " + e.text);
  CHECK_EQ(e.slot, pull.slot);
}

}  // namespace

TEST("kv engine: lengths around page edges, in one chunk and in many") {
  KvRig from, to;
  for (const uint32_t n : {1u, 2u, 15u, 16u, 17u, 18u, 32u, 33u, 34u, 100u, 250u})
    for (const uint32_t chunk : {0u, 1u, 7u, 16u}) {
      const Tokens prompt = prompt_of(n, n * 100 + chunk);
      const uint64_t id = from.prefill(prompt, 0, chunk);
      CHECK_EQ(from.stats().held, 0u);
      CHECK_EQ(from.staged_bytes(), uint64_t{(n - 1 + 15) / 16} * 2 * 64);
      const PullOpened pull = to.open_pull(from, id, prompt);
      CHECK_EQ(pull.code, LS_OK);
      CHECK_EQ(pull.start, n - 1);
      CHECK_EQ(pull.pages, (n - 1 + 15) / 16);
      if (pull.pages > 0) {
        expect_done(to, pull);
        CHECK_EQ(from.event().reason, LS_KV_DONE);
      } else {
        CHECK_EQ(ls_kv_release(from.engine, static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32)), LS_OK);
        CHECK_EQ(from.event().reason, LS_KV_DROPPED);
      }
      to.check();
      to.expect_decode(pull.slot, prompt);
      CHECK_EQ(to.close(pull.slot, 0), LS_OK);
    }
  expect_clean(from);
  expect_clean(to);
}

TEST("kv engine: what was pulled enters the prefix cache; a held prefix is not pulled again") {
  KvRig from, to;
  const Tokens prompt = prompt_of(100);
  PullOpened pull = to.open_pull(from, from.prefill(prompt), prompt);
  CHECK_EQ(pull.pages, 7u);
  expect_done(to, pull);
  to.expect_decode(pull.slot, prompt);
  CHECK_EQ(to.close(pull.slot), LS_OK);
  CHECK_EQ(to.events().size(), 0u);
  CHECK_EQ(static_cast<const Rig &>(to).config.prefix_cache, 1u);
  CHECK_EQ(to.Rig::events().size(), 6u);  // the full pages, reported

  // The first 64 tokens are the same: two of the four are pulled.
  Tokens longer(prompt.begin(), prompt.begin() + 64);
  const Tokens more = prompt_of(40, 9);
  longer.insert(longer.end(), more.begin(), more.end());
  pull = to.open_pull(from, from.prefill(longer), longer);
  CHECK_EQ(pull.cached, 64u);
  CHECK_EQ(pull.start, 103u);
  CHECK_EQ(pull.pages, 3u);
  const KvEvent e = to.event();
  CHECK_EQ(e.reason, LS_KV_DONE);
  CHECK_EQ(e.bytes, uint64_t{3} * 2 * 64);
  to.expect_decode(pull.slot, longer);
  CHECK_EQ(to.close(pull.slot), LS_OK);

  // All of it is there, up to the head of a page: nothing to pull.
  pull = to.open_pull(from, from.prefill(longer), longer);
  CHECK_EQ(pull.pages, 0u);
  CHECK_EQ(pull.cached, 96u);
  CHECK_EQ(pull.start, 103u);
  to.expect_decode(pull.slot, longer);
  CHECK_EQ(to.close(pull.slot), LS_OK);
  to.check();
}

TEST("kv engine: a warm prompt is staged from the prefix cache, with or without a step") {
  KvRig from, to;
  const Tokens prompt = prompt_of(65);
  from.serve(prompt);
  const Opened seq = from.open(prompt);
  CHECK_EQ(seq.cached, 64u);
  CHECK_EQ(ls_kv_stage(from.engine, seq.slot, 64), LS_OK);
  uint32_t out[2];
  CHECK_EQ(ls_kv_publish(from.engine, seq.slot, out), LS_OK);
  CHECK_EQ(from.close(seq.slot, 0), LS_OK);
  PullOpened pull = to.open_pull(from, out[0] | static_cast<uint64_t>(out[1]) << 32, prompt);
  expect_done(to, pull);
  to.expect_decode(pull.slot, prompt);
  CHECK_EQ(to.close(pull.slot, 0), LS_OK);
  // All of it up to the head of a page, which is to be copied: not yet, by the step of another sequence, and in a step that is under way.
  const Tokens tail = prompt_of(70, 6);
  from.serve(tail);
  for (int way = 0; way < 3; ++way) {
    const Opened warm = from.open(tail), busy = from.open(prompt_of(5, 7));
    CHECK_EQ(warm.start, 69u);
    CHECK_EQ(ls_kv_stage(from.engine, warm.slot, 69), LS_OK);
    if (way > 0) CHECK_EQ(from.submit({{.slot = busy.slot, .start = busy.start, .tokens = {prompt_of(5, 7)[busy.start]}}}), LS_OK);
    if (way == 2) CHECK_EQ(ls_kv_publish(from.engine, warm.slot, out), LS_STATE);
    if (way > 0) from.wait_row();
    CHECK_EQ(ls_kv_publish(from.engine, warm.slot, out), LS_OK);
    CHECK_EQ(from.close(warm.slot), LS_OK);
    CHECK_EQ(from.close(busy.slot, 0), LS_OK);
    pull = to.open_pull(from, out[0] | static_cast<uint64_t>(out[1]) << 32, tail);
    expect_done(to, pull);
    to.expect_decode(pull.slot, tail);
    CHECK_EQ(to.close(pull.slot, 0), LS_OK);
  }
  // Its head only: the rest, a copied head included, goes with the step.
  Tokens other = prompt;
  other.resize(40);
  other.push_back(7);
  pull = to.open_pull(from, from.prefill(other), other);
  expect_done(to, pull);
  to.expect_decode(pull.slot, other);
  CHECK_EQ(to.close(pull.slot, 0), LS_OK);
  expect_clean(to);
}

TEST("kv engine: every layer is staged while the step still computes") {
  KvRig rig;
  uint32_t layers = 0;
  // The device goes on only when the layer it has just stored is copied.
  device().on_layer = [&](uint32_t) {
    ++layers;
    wait_until("the layer is staged", [&] { return rig.kv_stats().stage_layers_early == layers; });
  };
  const Tokens prompt = prompt_of(100);
  const uint64_t id = rig.prefill(prompt, 0, 30);
  CHECK_EQ(layers, 8u);  // 4 steps
  CHECK_EQ(rig.kv_stats().stage_layers, layers);
  device().on_layer = nullptr;
  KvRig to;
  const PullOpened pull = to.open_pull(rig, id, prompt);
  expect_done(to, pull);
  to.expect_decode(pull.slot, prompt);
  CHECK_EQ(to.close(pull.slot), LS_OK);
}

TEST("kv engine: a broken, silent or lost sender ends the pull; the slot can only be closed, and the pool is whole") {
  KvRig from({}, quick()), to({}, quick());
  const Tokens prompt = prompt_of(200);
  const auto fails = [&](uint32_t port, int32_t reason) {
    const uint64_t id = from.prefill(prompt);
    const PullOpened pull = to.open_pull(from, id, prompt, port);
    CHECK_EQ(pull.code, LS_OK);
    CHECK_EQ(to.submit({{.slot = pull.slot, .start = 199, .tokens = {prompt[199]}}}), LS_INVALID);
    const KvEvent e = to.event();
    if (e.reason != reason) throw std::runtime_error("ended with " + std::to_string(e.reason) + " " + e.text + ", expected " + std::to_string(reason));
    CHECK_EQ(e.slot, pull.slot);
    CHECK_EQ(to.submit({{.slot = pull.slot, .start = 199, .tokens = {prompt[199]}}}), LS_INVALID);
    to.check();
    CHECK_EQ(to.close(pull.slot), LS_OK);
    to.check();
    CHECK_EQ(to.stats().held, 0u);
    // The whole prompt runs here.
    to.serve(prompt, 0, 0);
    return id;
  };
  {
    Proxy flips(from.port, {Proxy::Fault::flip, 300});
    fails(flips.port(), LS_KV_CORRUPT);
    Proxy resets(from.port, {Proxy::Fault::reset, 300});
    fails(resets.port(), LS_KV_RESET);
    Proxy stalls(from.port, {Proxy::Fault::stall, 300});
    fails(stalls.port(), LS_KV_TIMEOUT);
  }
  SilentListener silent;
  const uint64_t id = fails(silent.port(), LS_KV_TIMEOUT);
  CHECK_EQ(ls_kv_release(from.engine, static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32)), LS_OK);
  // An id that was used.
  const uint64_t used = from.prefill(prompt);
  PullOpened pull = to.open_pull(from, used, prompt);
  expect_done(to, pull);
  CHECK_EQ(to.close(pull.slot, 0), LS_OK);
  pull = to.open_pull(from, used, prompt);
  CHECK_EQ(to.event().reason, LS_KV_USED);
  CHECK_EQ(to.close(pull.slot, 0), LS_OK);
  expect_clean(from);
  expect_clean(to);
}

TEST("kv engine: another layout is refused before anything is allocated, with the field and both values") {
  KvOptions other;
  other.model = 2;
  KvRig from, to({}, other);
  const Tokens prompt = prompt_of(50);
  const uint64_t id = from.prefill(prompt);
  const std::string before = to.snapshot();
  CHECK_EQ(to.open_pull(from, id, prompt).code, LS_LAYOUT);
  CHECK_EQ(last_error(), "model configuration is 0101010101010101... on the prefill worker and 0202020202020202... on the decode worker");
  CHECK_EQ(to.snapshot(), before);
  // The decode side tells the sender.
  CHECK_EQ(ls_kv_drop(to.engine, "127.0.0.1", from.port, static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32)), LS_OK);
  CHECK_EQ(from.event().reason, LS_KV_DROPPED);
  expect_clean(from);
}

TEST("kv engine: without pages, slots or a sound source nothing is opened") {
  KvRig from, to({.pages = 6, .max_seqs = 2});
  const Tokens prompt = prompt_of(100);
  const uint64_t id = from.prefill(prompt);
  const std::string before = to.snapshot();
  CHECK_EQ(to.open_pull(from, id, prompt).code, LS_NO_PAGES);
  CHECK_EQ(to.snapshot(), before);
  Tokens bad = prompt;
  bad[3] = 1000;
  CHECK_EQ(to.open_pull(from, id, bad).code, LS_INVALID);
  int32_t out[4];
  ls_kv_source source{sizeof source, 0, 1, 0, LS_KV_LAYOUT_BYTES};
  const auto open = [&](const char *host) { return ls_seq_open_pull(to.engine, prompt.data(), 10, 0, 0, &source, host, from.layout.data(), out); };
  CHECK_EQ(open("127.0.0.1"), LS_INVALID);
  source.port = 70000;
  CHECK_EQ(open("127.0.0.1"), LS_INVALID);
  source.port = 1;
  CHECK_EQ(open("a.host"), LS_INVALID);
  source.layout_bytes = 127;
  CHECK_EQ(open("127.0.0.1"), LS_LAYOUT);
  const Opened a = to.open(prompt_of(3)), b = to.open(prompt_of(3));
  source.layout_bytes = LS_KV_LAYOUT_BYTES;
  CHECK_EQ(open("127.0.0.1"), LS_NO_SLOTS);
  to.close(a.slot);
  to.close(b.slot);
  to.check();
}

TEST("kv engine: calls out of order") {
  uint32_t id[2];
  int32_t out[4];
  ByteVector layout(LS_KV_LAYOUT_BYTES);
  ls_kv_stats_t stats{};
  for (const int32_t code : {ls_kv_start(nullptr, nullptr, nullptr, nullptr, nullptr), ls_kv_layout(nullptr, nullptr), ls_kv_stats(nullptr, &stats), ls_kv_stage(nullptr, 0, 0), ls_kv_publish(nullptr, 0, id),
                             ls_kv_release(nullptr, 1, 0), ls_seq_open_pull(nullptr, nullptr, 0, 0, 0, nullptr, nullptr, nullptr, out), ls_kv_drop(nullptr, nullptr, 0, 0, 0), ls_kv_events(nullptr, nullptr, 0)})
    CHECK_EQ(code, LS_INVALID);
  Rig plain;
  CHECK_EQ(ls_kv_stats(plain.engine, nullptr), LS_INVALID);
  CHECK_EQ(ls_kv_stats(plain.engine, &stats), LS_INVALID);  // struct_size
  CHECK_EQ(ls_seq_open_pull(plain.engine, nullptr, 0, 0, 0, nullptr, nullptr, nullptr, out), LS_STATE);
  CHECK_EQ(ls_kv_layout(plain.engine, layout.data()), LS_STATE);
  CHECK_EQ(ls_kv_stage(plain.engine, 0, 1), LS_STATE);
  CHECK_EQ(ls_kv_events(plain.engine, nullptr, 0), LS_STATE);
  CHECK_EQ(ls_kv_drop(plain.engine, "127.0.0.1", 1, 1, 0), LS_STATE);
  CHECK_EQ(ls_kv_release(plain.engine, 1, 0), LS_STATE);
  ls_kv_config c{};
  const ByteVector digest(32, 0);
  CHECK_EQ(ls_kv_start(plain.engine, &c, digest.data(), nullptr, nullptr), LS_INVALID);
  c.struct_size = sizeof c;
  CHECK_EQ(ls_kv_start(plain.engine, &c, nullptr, nullptr, nullptr), LS_INVALID);
  c.key_bytes = 15;
  CHECK_EQ(ls_kv_start(plain.engine, &c, digest.data(), digest.data(), nullptr), LS_INVALID);
  c.key_bytes = 0, c.hold_ms = 3'600'001;
  CHECK_EQ(ls_kv_start(plain.engine, &c, digest.data(), nullptr, nullptr), LS_INVALID);
  c.hold_ms = 0;
  CHECK_EQ(ls_kv_start(plain.engine, &c, digest.data(), nullptr, "nowhere"), LS_INVALID);
  device().movable = false;
  CHECK_EQ(ls_kv_start(plain.engine, &c, digest.data(), nullptr, nullptr), LS_UNSUPPORTED);
  device().movable = true;
  CHECK_EQ(ls_kv_start(plain.engine, &c, digest.data(), nullptr, nullptr), 0);
  CHECK_EQ(ls_kv_start(plain.engine, &c, digest.data(), nullptr, nullptr), LS_STATE);
  const Opened seq = plain.open(prompt_of(20));
  CHECK_EQ(ls_kv_stage(plain.engine, seq.slot, 19), LS_STATE);  // no listener

  CHECK_EQ(ls_kv_layout(plain.engine, nullptr), LS_INVALID);
  CHECK_EQ(ls_seq_open_pull(plain.engine, nullptr, 0, 0, 0, nullptr, nullptr, nullptr, out), LS_INVALID);

  KvRig from;
  const Tokens prompt = prompt_of(40);
  CHECK_EQ(ls_kv_stage(from.engine, 0, 1), LS_INVALID);
  CHECK_EQ(ls_kv_publish(from.engine, 0, nullptr), LS_INVALID);
  const Opened s = from.open(prompt);
  CHECK_EQ(ls_kv_publish(from.engine, s.slot, id), LS_STATE);
  CHECK_EQ(ls_kv_stage(from.engine, s.slot, from.config.max_context + 1), LS_INVALID);
  CHECK_EQ(ls_kv_stage(from.engine, s.slot, 39), LS_OK);
  CHECK_EQ(ls_kv_stage(from.engine, s.slot, 39), LS_STATE);
  CHECK_EQ(ls_kv_publish(from.engine, s.slot, id), LS_STATE);
  CHECK_EQ(from.kv_stats().filling, 1u);
  // A step that stages is submitted and has not run.
  CHECK_EQ(from.submit({{.slot = s.slot, .start = 0, .tokens = prompt}}), LS_OK);
  CHECK_EQ(ls_kv_publish(from.engine, s.slot, id), LS_STATE);
  // Closed with that step in flight: it still runs, and the copy is gone.
  CHECK_EQ(from.close(s.slot), LS_OK);
  from.wait_token();
  CHECK_EQ(from.kv_stats().filling, 0u);
  CHECK_EQ(ls_kv_release(from.engine, 5, 0), LS_INVALID);
  CHECK_EQ(ls_kv_events(from.engine, nullptr, 3), LS_INVALID);
  from.check();
}

TEST("kv engine: a pull does not touch its pages before the steps submitted earlier have run") {
  KvRig from, to({.pages = 8});
  const Tokens prompt = prompt_of(100), other = prompt_of(60, 5);
  // A step is submitted for a sequence that is closed at once: its pages are free, and the step still writes them.
  const Opened doomed = to.open(other);
  CHECK_EQ(to.submit({{.slot = doomed.slot, .start = 0, .tokens = other}}), LS_OK);
  CHECK_EQ(to.close(doomed.slot), LS_OK);
  const PullOpened pull = to.open_pull(from, from.prefill(prompt), prompt);
  CHECK_EQ(pull.code, LS_OK);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // time in which a hasty pull would do harm
  CHECK_EQ(to.kv_stats().pulls, 0u);
  to.wait_token();
  expect_done(to, pull);
  to.expect_decode(pull.slot, prompt);
  CHECK_EQ(to.close(pull.slot, 0), LS_OK);

  // A page that is the source of a copy still to be made is evicted for the pull.
  const Tokens warm = prompt_of(24, 8);
  to.serve(warm);
  Tokens branch(warm.begin(), warm.begin() + 20);
  branch.push_back(1);
  const Opened copier = to.open(branch);
  CHECK_EQ(copier.start, 20u);
  const PullOpened tight = to.open_pull(from, from.prefill(prompt), prompt);
  if (tight.code == LS_OK) {
    to.compute(copier.slot, branch, copier.start);
    expect_done(to, tight);
    to.expect_decode(tight.slot, prompt);
    CHECK_EQ(to.close(tight.slot, 0), LS_OK);
  } else {
    CHECK_EQ(tight.code, LS_NO_PAGES);
  }
  CHECK_EQ(to.close(copier.slot, 0), LS_OK);
  to.check();
}

TEST("kv engine: closed at every stage: before the gate, at once, midway, done, failed") {
  KvRig from({.pages = 64, .max_context = 600, .max_batch_tokens = 600}), to({.pages = 64, .max_context = 600, .max_batch_tokens = 600});
  const Tokens prompt = prompt_of(500);
  std::mt19937 random(4);
  for (int round = 0; round < 60; ++round) {
    const int stage = round % 6;
    const uint64_t id = from.prefill(prompt);
    std::unique_ptr<Proxy> proxy;
    if (stage == 2) proxy = std::make_unique<Proxy>(from.port, Proxy::Fault{Proxy::Fault::stall, 1 + random() % 3000});
    if (stage == 4) proxy = std::make_unique<Proxy>(from.port, Proxy::Fault{Proxy::Fault::flip, 1 + random() % 3000});
    const Opened busy = to.open(prompt_of(5));
    if (stage == 0) CHECK_EQ(to.submit({{.slot = busy.slot, .start = 0, .tokens = prompt_of(5)}}), LS_OK);
    const PullOpened pull = to.open_pull(from, id, prompt, proxy ? proxy->port() : 0);
    CHECK_EQ(pull.code, LS_OK);
    if (stage == 2) wait_until("some bytes", [&] { return proxy->passed() > 0; });
    if (stage == 3) expect_done(to, pull);
    if (stage == 4) CHECK(to.event().reason != LS_KV_DONE);
    if (stage == 5) std::this_thread::sleep_for(std::chrono::microseconds(random() % 800));
    to.check();
    CHECK_EQ(to.close(pull.slot, 0), LS_OK);
    to.check();
    if (stage == 0) to.wait_token();
    CHECK_EQ(to.close(busy.slot, 0), LS_OK);
    wait_until("the sender's copy is gone", [&] { return from.kv_stats().staged == 0; });
    CHECK_EQ(to.stats().held, 0u);
    to.events();
    from.events();
  }
  expect_clean(from);
  expect_clean(to);
}

TEST("kv engine: destroyed with copies staged, pulls under way and connections open") {
  for (int round = 0; round < 6; ++round) {
    auto from = std::make_unique<KvRig>();
    auto to = std::make_unique<KvRig>();
    const Tokens prompt = prompt_of(200);
    RawPeer stranger(from->port);
    Proxy stalls(from->port, {Proxy::Fault::stall, 500});
    const PullOpened pull = to->open_pull(*from, from->prefill(prompt), prompt, round % 2 ? stalls.port() : 0);
    CHECK_EQ(pull.code, LS_OK);
    from->prefill(prompt);
    if (round < 3) from.reset();
    to.reset();
  }
}

TEST("kv engine: events fit the buffer they are given") {
  KvRig from;
  const Tokens prompt = prompt_of(20);
  const uint64_t a = from.prefill(prompt), b = from.prefill(prompt);
  for (const uint64_t id : {a, b}) CHECK_EQ(ls_kv_release(from.engine, static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32)), LS_OK);
  int32_t words[LS_KV_EVENT_WORDS * 2 - 1];
  CHECK_EQ(ls_kv_events(from.engine, words, LS_KV_EVENT_WORDS - 1), LS_INVALID);
  CHECK_EQ(ls_kv_events(from.engine, words, LS_KV_EVENT_WORDS * 2 - 1), LS_KV_EVENT_WORDS);
  CHECK_EQ(ls_kv_events(from.engine, words, LS_KV_EVENT_WORDS), LS_KV_EVENT_WORDS);
  CHECK_EQ(ls_kv_events(from.engine, words, LS_KV_EVENT_WORDS), 0);
}
