// Words from outside against the ABI. The first byte picks the target: config struct, plan words, tensor placement, or sequence calls.
// Whatever comes in: no fault, and pool and prefix cache stay sound.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "harness.h"

using namespace ls::test;

namespace {

[[noreturn]] void broken(const char *what) {
  std::fprintf(stderr, "%s: %s\n", what, last_error().c_str());
  std::abort();
}

// Reads values off the input; zeros when it has run out.
struct Input {
  const uint8_t *data;
  size_t size;
  void bytes(void *out, size_t n) {
    std::memset(out, 0, n);
    const size_t take = std::min(n, size);
    if (take > 0) std::memcpy(out, data, take);
    data += take;
    size -= take;
  }
  template <class T>
  T value() {
    T v;
    bytes(&v, sizeof v);
    return v;
  }
};

// One pool for all inputs, with pages cached and two sequences open; every input leaves it as it found it.
struct Served {
  Rig rig{{.pages = 24, .max_seqs = 3, .max_context = 96, .max_batch_tokens = 64, .vocab = 100}};
  Served() { rig.serve(range(0, 48)); }
};
Served &served() {
  static auto *engine = new Served;  // never destroyed: the process ends
  return *engine;
}

void fuzz_config(Input in) {
  ls_config config = small_config();
  // Either raw words, or a sound config with a few words replaced.
  if (in.value<uint8_t>() % 4 == 0) {
    in.bytes(&config, sizeof config);
    config.struct_size = sizeof config;
  } else {
    for (uint8_t n = in.value<uint8_t>() % 4; n > 0; --n) {
      const size_t word = in.value<uint8_t>() % (sizeof config / 4);
      const auto v = in.value<uint32_t>();
      std::memcpy(reinterpret_cast<char *>(&config) + word * 4, &v, 4);
    }
  }
  std::vector<float> inv_freq(LS_MAX_HEAD_DIM);
  in.bytes(inv_freq.data(), 16);
  ls_engine *engine = nullptr;
  if ((ls_engine_create(&config, inv_freq.data(), &engine) == LS_OK) != (engine != nullptr)) broken("status and handle disagree");
  ls_engine_destroy(engine);
}

void fuzz_weights(Input in) {
  static const TempFile file(1 << 16);
  const ls_config config = small_config();
  ls_engine *engine = nullptr;
  if (ls_engine_create(&config, small_inv_freq(config).data(), &engine) != LS_OK || ls_weights_map(engine, file.path(), 1 << 16) != 0) broken("create");
  while (in.size > 0) {
    const auto id = in.value<uint16_t>();
    const auto index = in.value<uint8_t>();
    const auto offset = in.value<uint64_t>(), bytes = in.value<uint64_t>();
    const auto dtype = in.value<uint8_t>();
    const auto rows = in.value<uint32_t>(), cols = in.value<uint32_t>();
    if (ls_weights_set(engine, id, index, offset, bytes, dtype, rows, cols) == LS_OK) {
      const ls::TensorView &view = device().tensors.at(id);
      volatile uint8_t touch = view.data[0];
      touch = view.data[view.bytes - 1];
      (void)touch;
    }
  }
  ls_engine_destroy(engine);
}

// Runs what was accepted; returns how many steps that were.
int finish_steps(Rig &rig) {
  int steps = 0;
  for (;; ++steps) {
    const Result r = rig.wait();
    if (r.code == LS_STATE) return steps;
    if (r.code < 0) broken("an accepted plan failed");
  }
}

void fuzz_plan(Input in) {
  Rig &rig = served().rig;
  const Opened a = rig.open(range(0, 40)), b = rig.open(range(50, 20));
  if (a.code != LS_OK || b.code != LS_OK) broken("open");
  for (int round = 0; round < 3 && in.size > 0; ++round) {
    // A plan that would be accepted, then some words replaced or cut: random words alone never pass the header.
    const uint32_t start_b = round == 0 ? 0 : ~0u;
    std::vector<int32_t> plan = pack_plan({{.slot = a.slot, .start = a.cached, .tokens = range(static_cast<int32_t>(a.cached), 3)}, {.slot = b.slot, .start = start_b, .tokens = range(50, 5), .n_logprobs = 2}});
    for (uint8_t n = in.value<uint8_t>() % 6; n > 0; --n) {
      const size_t word = in.value<uint8_t>() % plan.size();
      plan[word] = in.value<uint8_t>() % 2 ? in.value<int32_t>() : in.value<int8_t>();
    }
    uint32_t words = static_cast<uint32_t>(plan.size());
    if (in.value<uint8_t>() % 8 == 0) words = in.value<uint8_t>() % (words + 1);
    plan.resize(words);
    plan.shrink_to_fit();  // so that a read past the end is seen
    ls_step_submit(rig.engine, plan.data(), words);
    rig.check();
    if (in.value<uint8_t>() % 2) finish_steps(rig);
  }
  const uint8_t order = in.value<uint8_t>();
  if (order % 2) finish_steps(rig);
  if (rig.close(a.slot, in.value<uint8_t>()) != LS_OK || rig.close(b.slot, in.value<uint32_t>()) != LS_OK) broken("close");
  rig.check();
  finish_steps(rig);
  if (rig.stats().held != 0) broken("pages are held with no sequence open");
  rig.events();
}

void fuzz_calls(Input in) {
  Rig &rig = served().rig;
  int32_t out[3], words[64];
  for (int i = 0; i < 32 && in.size > 0; ++i) {
    switch (in.value<uint8_t>() % 6) {
      case 0: {
        std::vector<int32_t> tokens(in.value<uint8_t>() % 100);
        for (int32_t &t : tokens) t = in.value<int8_t>();
        ls_seq_open(rig.engine, tokens.data(), static_cast<uint32_t>(tokens.size()), in.value<uint8_t>(), 0, out);
        break;
      }
      case 1: ls_seq_close(rig.engine, in.value<int8_t>() % 4, in.value<uint32_t>()); break;
      case 2: {
        std::vector<int32_t> plan(in.value<uint8_t>() % 64);
        for (int32_t &w : plan) w = in.value<int8_t>();
        ls_step_submit(rig.engine, plan.data(), static_cast<uint32_t>(plan.size()));
        break;
      }
      case 3: ls_step_wait(rig.engine, words, in.value<uint8_t>() % 65); break;
      case 4: ls_cache_clear(rig.engine); break;
      default: ls_events_drain(rig.engine, words, in.value<uint8_t>() % 65);
    }
    rig.check();
  }
  finish_steps(rig);
  for (int32_t slot = 0; slot < 3; ++slot) rig.close(slot);
  rig.check();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size == 0) return 0;
  const Input in{data + 1, size - 1};
  switch (data[0] % 4) {
    case 0: fuzz_config(in); break;
    case 1: fuzz_weights(in); break;
    case 2: fuzz_plan(in); break;
    default: fuzz_calls(in);
  }
  return 0;
}
