// Sums over ranks through NCCL: how it is found and chosen, that a model's tokens come out right, and that whatever it fails with ends the engine
// with a line. The library is a fake that sums on the simulator's streams.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>

#include "abi_engine.h"
#include "check.h"
#include "fake_nccl.h"
#include "nccl.h"
#include "sim/record.h"

using namespace ls::test;

namespace {

struct Variable {
  const char *name;
  Variable(const char *variable, const std::string &value) : name(variable) { setenv(name, value.c_str(), 1); }
  ~Variable() { unsetenv(name); }
};

std::string beside(const char *file) {
  char self[4096] = {};
  if (readlink("/proc/self/exe", self, sizeof self - 1) <= 0) throw std::runtime_error("no /proc/self/exe");
  return std::string(self).substr(0, std::string(self).rfind('/') + 1) + file;
}

void enqueue(CUstream_st *stream, void (*fn)(void *), void *arg) {
  if (!ls::cuda::sim_record(stream, [=] { fn(arg); })) fn(arg);
}

void *fake_call(const char *name) {
  void *library = dlopen(beside("libfake_nccl.so").c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  return dlsym(library, name);
}
void reset(FakeNccl settings = {}) {
  settings.enqueue = enqueue;
  reinterpret_cast<FakeNcclReset>(fake_call("fake_nccl_reset"))(&settings);
}
FakeNcclCounts count() {
  FakeNcclCounts counts;
  reinterpret_cast<FakeNcclCount>(fake_call("fake_nccl_count"))(&counts);
  return counts;
}

TinyOptions small() {
  TinyOptions options;
  options.heads = 4, options.kv_heads = 4, options.layers = 2, options.hidden = 64, options.intermediate = 128, options.o_bias = true;
  return options;
}

Row row_of(int32_t slot, uint32_t start, Tokens tokens) {
  Row row;
  row.slot = slot, row.start = start, row.tokens = std::move(tokens), row.n_logprobs = LS_MAX_LOGPROBS;
  return row;
}

// A prompt and tokens after it; the last ones are submitted before the step before has been waited for.
std::vector<Sampled> answer(const TinyModel &model, uint32_t ranks) {
  AbiEngine engine(cuda_api(), model, LS_KV_BF16, 64, ranks);
  const Tokens tokens = random_tokens(30, model.options.vocab, 4);
  const auto opened = engine.open(tokens);
  std::vector<Sampled> out{engine.prompt(opened.slot, tokens, 0, 16, row_of(0, 0, {}))};
  for (uint32_t i = 30; i < 34; ++i) out.push_back(engine.step({row_of(opened.slot, i, {out.back().token})})[0]);
  engine.submit({row_of(opened.slot, 34, {out.back().token})});
  for (uint32_t i = 35; i < 38; ++i) {
    engine.submit({row_of(opened.slot, i, {-1})});
    out.push_back(engine.wait()[0]);
  }
  out.push_back(engine.wait()[0]);
  return out;
}

// The text that creating or running an engine ends with.
std::string failure(const TinyModel &model, uint32_t ranks) {
  try {
    answer(model, ranks);
  } catch (const std::runtime_error &e) {
    return e.what();
  }
  return "nothing failed";
}
void expect(const std::string &text, const std::string &part) {
  if (text.find(part) == std::string::npos) check::fail(__FILE__, __LINE__, "no \"" + part + "\" in: " + text);
}

}  // namespace

TEST("NCCL gives two ranks the bits of peer memory, and more ranks the tokens of one") {
  const Variable devices("LAYERSCALE_SIM_DEVICES", "4"), library("LAYERSCALE_NCCL_LIB", beside("libfake_nccl.so"));
  const TinyModel model(small());
  reset();
  const std::vector<Sampled> peers = answer(model, 2), one = answer(model, 1);
  CHECK_EQ(count().calls, 0);
  {
    // Kernels of this way, too, are loaded before the first sum.
    const Variable wanted("LAYERSCALE_ALL_REDUCE", "nccl"), lazy("LAYERSCALE_SIM_LAZY", "1");
    const std::vector<Sampled> two = answer(model, 2);
    CHECK(count().sums > 0);
    CHECK_EQ(two.size(), peers.size());
    for (size_t i = 0; i < two.size(); ++i) CHECK(two[i].token == peers[i].token && two[i].logprob == peers[i].logprob && two[i].top == peers[i].top);
    reset();
    const std::vector<Sampled> four = answer(model, 4);
    for (size_t i = 0; i < four.size(); ++i) {
      CHECK_EQ(four[i].token, one[i].token);
      CHECK_LE(std::fabs(four[i].logprob - one[i].logprob), 0.1f);
    }
    const FakeNcclCounts counts = count();
    // Every rank: one sum before anything is captured, two a layer in every step; a graph's are called once and run every time.
    CHECK(counts.calls % 4 == 0 && counts.sums % 4 == 0);
    CHECK_EQ(counts.sums, 4 * (1 + 2 * 2 * 10));
    CHECK_EQ(counts.open, 0);
    CHECK_EQ(counts.aborted, 0);
    CHECK_EQ(counts.late, 0);
  }
}

TEST("ranks whose sums differ still go on with the tokens of rank 0, also in steps that are submitted ahead") {
  const Variable devices("LAYERSCALE_SIM_DEVICES", "2"), wanted("LAYERSCALE_ALL_REDUCE", "nccl"), library("LAYERSCALE_NCCL_LIB", beside("libfake_nccl.so"));
  const TinyModel model(small());
  FakeNccl settings;
  settings.apart = 0.7f;  // the other rank chooses otherwise
  reset(settings);
  AbiEngine engine(cuda_api(), model, LS_KV_BF16, 64, 2);
  const Tokens tokens = random_tokens(20, model.options.vocab, 6);
  const auto run = [&](bool ahead) {
    const auto opened = engine.open(tokens);
    std::vector<Sampled> out;
    engine.submit({row_of(opened.slot, 0, tokens)});
    for (uint32_t i = 20; i < 26; ++i) {
      if (ahead) engine.submit({row_of(opened.slot, i, {-1})});
      out.push_back(engine.wait()[0]);
      if (!ahead) engine.submit({row_of(opened.slot, i, {out.back().token})});
    }
    out.push_back(engine.wait()[0]);
    engine.close(opened.slot);
    return out;
  };
  const std::vector<Sampled> told = run(false), kept = run(true);
  for (size_t i = 0; i < told.size(); ++i) CHECK(told[i].token == kept[i].token && told[i].logprob == kept[i].logprob && told[i].top == kept[i].top);
}

TEST("GPUs that cannot reach each other's memory take NCCL, or are refused with both reasons") {
  const Variable devices("LAYERSCALE_SIM_DEVICES", "2"), apart("LAYERSCALE_SIM_PEERS", "0");
  const TinyModel model(small());
  reset();
  {
    const Variable library("LAYERSCALE_NCCL_LIB", beside("libfake_nccl.so"));
    answer(model, 2);
    CHECK(count().sums > 0);
    const Variable wanted("LAYERSCALE_ALL_REDUCE", "peer");
    expect(failure(model, 2), "GPU 0 cannot reach the memory of GPU 1 (--tp with LAYERSCALE_ALL_REDUCE=peer)");
    answer(model, 1);
  }
  const Variable library("LAYERSCALE_NCCL_LIB", beside("libno_nccl.so"));
  expect(failure(model, 2), "GPU 0 cannot reach the memory of GPU 1 (--tp), and what would take its place: NCCL cannot be loaded");
  expect(failure(model, 2), "libno_nccl.so");
}

TEST("a library that cannot be used is refused before weights are loaded") {
  const Variable devices("LAYERSCALE_SIM_DEVICES", "2"), wanted("LAYERSCALE_ALL_REDUCE", "nccl");
  const TinyModel model(small());
  const ls_config config = model.config(LS_KV_BF16, 2);
  const auto refused = [&](const char *library, FakeNccl settings, int32_t code, const char *part) {
    const Variable path("LAYERSCALE_NCCL_LIB", beside(library));
    reset(settings);
    ls_engine *engine = nullptr;
    CHECK_EQ(ls_engine_create(&config, model.inv_freq.data(), &engine), code);
    expect(last_error(cuda_api()), part);
    CHECK_EQ(count().open, 0);
  };
  refused("libno_nccl.so", {}, LS_UNSUPPORTED, "NCCL cannot be loaded (LAYERSCALE_NCCL_LIB names another library)");
  refused("liblayerscale_cpu.so", {}, LS_UNSUPPORTED, "has no function ncclGetVersion: not a library of NCCL");
  refused("libfake_nccl_incomplete.so", {}, LS_UNSUPPORTED, "has no function ncclAllReduce");
  FakeNccl old, older, broken;
  old.version = 21212, older.version = 2803, broken.init_error = 2;
  refused("libfake_nccl.so", old, LS_UNSUPPORTED, "NCCL 2.12.12 (");
  refused("libfake_nccl.so", old, LS_UNSUPPORTED, "is too old: expected 2.13.0 or later");
  refused("libfake_nccl.so", older, LS_UNSUPPORTED, "NCCL 2.8.3 (");
  refused("libfake_nccl.so", broken, LS_UNSUPPORTED, "NCCL 2.28.3: ncclCommInitAll of 2 GPUs: unhandled system error (2): the fake said so");
  const Variable other("LAYERSCALE_ALL_REDUCE", "fast");
  refused("libfake_nccl.so", {}, LS_INVALID, "LAYERSCALE_ALL_REDUCE=\"fast\": expected auto, peer or nccl");
}

TEST("a sum that fails ends the engine with its text, and nobody waits for ever") {
  const Variable devices("LAYERSCALE_SIM_DEVICES", "2"), wanted("LAYERSCALE_ALL_REDUCE", "nccl"), library("LAYERSCALE_NCCL_LIB", beside("libfake_nccl.so"));
  const TinyModel model(small());
  const auto fails = [&](FakeNccl settings, const char *call, const std::string &part) {
    reset(settings);
    const std::string text = failure(model, 2);
    expect(text, call);
    expect(text, part);
    CHECK_EQ(count().aborted, 2);
    CHECK_EQ(count().open, 0);
    CHECK_EQ(count().late, 0);
  };
  // The first call while the ranks are joined, one inside a capture, one of the prompt.
  FakeNccl first, captured, late;
  first.fail_call = 1, captured.fail_call = 6;
  fails(first, "ls_weights_finish: ", "ncclAllReduce on rank 1: unhandled system error (2): the fake said so");
  fails(captured, "ls_weights_finish: ", "ncclAllReduce on rank 1: unhandled system error (2)");
  reset();
  answer(model, 2);
  late.fail_call = count().calls / 2;
  fails(late, "ls_step_wait: ", "ncclAllReduce on rank 1: unhandled system error (2)");
  // On the device: in the prompt, in a graph.
  for (const int sum : {3, 12, 30}) {
    FakeNccl broken;
    broken.broken_sum = sum;
    fails(broken, "ls_step_wait: ", "a sum over the ranks on rank 0: remote process exited");
  }
}

TEST("a sum that never ends is given up after a while") {
  const Variable devices("LAYERSCALE_SIM_DEVICES", "2"), wanted("LAYERSCALE_ALL_REDUCE", "nccl"), library("LAYERSCALE_NCCL_LIB", beside("libfake_nccl.so"));
  const TinyModel model(small());
  FakeNccl endless;
  endless.endless_sum = 3;
  reset(endless);
  std::string text;
  {
    AbiEngine engine(cuda_api(), model, LS_KV_BF16, 64, 2);
    const auto opened = engine.open(random_tokens(20, model.options.vocab, 1));
    engine.submit({row_of(opened.slot, 0, random_tokens(20, model.options.vocab, 1))});
    ls::cuda::nccl_limit_seconds = 1;
    try {
      engine.wait();
    } catch (const std::runtime_error &e) {
      text = e.what();
    }
    ls::cuda::nccl_limit_seconds = 60;
  }
  expect(text, "ls_step_wait: NCCL 2.28.3: a step has not ended within 1 s (--tp)");
  CHECK_EQ(count().aborted, 2);
  CHECK_EQ(count().late, 0);
}
