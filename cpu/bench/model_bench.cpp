// Speed of the forward pass with random weights in the shape of two small models: decode, prefill, many streams, and where the time goes.
//   model_bench [smollm2|qwen3-0.6b|all] [bf16|f32 pages] [threads] [wall|cpu]
// cpu: CPU time of the calling thread, for a busy machine; use it with 1 thread.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "backend.h"
#include "isa.h"
#include "kv_memory.h"
#include "model.h"
#include "sampler.h"

using namespace ls;
using namespace ls::cpu;

namespace {

struct Shape {
  const char *name;
  uint32_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab;
  bool qk_norm;
  float theta;
};
constexpr Shape kShapes[] = {{"smollm2", 576, 30, 9, 3, 64, 1536, 49152, false, 1e5f}, {"qwen3-0.6b", 1024, 28, 16, 8, 128, 3072, 151936, true, 1e6f}};

bool cpu_time = false;

double now() {
  timespec t;
  clock_gettime(cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

struct Bench {
  ls_config config{};
  std::vector<std::vector<uint16_t>> tensors;
  ThreadPool pool;
  KvMemory memory;
  Model model;
  Sampler sampler;
  std::vector<float> logits;
  std::vector<int32_t> pages;
  Profile profile;
  uint64_t weight_bytes = 0;

  Bench(const ls_config &c, const std::vector<float> &inv_freq, Isa isa)
      : config(c), pool(c.threads), memory(c.layers, c.kv_heads, c.head_dim, static_cast<ls_dtype>(c.kv_dtype)), model(c, inv_freq.data(), ops_for(isa), attention_for(isa)), sampler(c.vocab, ops_for(isa)) {
    const uint32_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
    add(LS_ROLE_EMBEDDING, c.vocab, c.hidden);
    add(LS_ROLE_FINAL_NORM, 1, c.hidden, true);
    for (uint32_t l = 0; l < c.layers; ++l) {
      const uint32_t base = l * 256;
      add(base + LS_ROLE_ATTN_NORM, 1, c.hidden, true);
      add(base + LS_ROLE_FFN_NORM, 1, c.hidden, true);
      if (c.qk_norm) add(base + LS_ROLE_Q_NORM, 1, c.head_dim, true), add(base + LS_ROLE_K_NORM, 1, c.head_dim, true);
      add(base + LS_ROLE_Q, q, c.hidden);
      add(base + LS_ROLE_K, kv, c.hidden);
      add(base + LS_ROLE_V, kv, c.hidden);
      add(base + LS_ROLE_O, c.hidden, q);
      add(base + LS_ROLE_GATE, c.intermediate, c.hidden);
      add(base + LS_ROLE_UP, c.intermediate, c.hidden);
      add(base + LS_ROLE_DOWN, c.hidden, c.intermediate);
    }
    std::atomic<int32_t> permille{0};
    check(model.finish(pool, permille));
    const uint32_t count = c.max_context * c.max_seqs / kPageTokens;
    check(memory.reserve(count));
    for (uint32_t i = 0; i < count; ++i) pages.push_back(static_cast<int32_t>(i));
  }
  static void check(const Status &status) {
    if (status.ok()) return;
    std::fprintf(stderr, "%s\n", status.text.c_str());
    std::exit(1);
  }
  void add(uint32_t id, uint32_t rows, uint32_t cols, bool ones = false) {
    std::vector<uint16_t> &data = tensors.emplace_back(static_cast<size_t>(rows) * cols);
    uint64_t state = id + 1;
    for (uint16_t &x : data) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      x = ones ? 0x3f80 : static_cast<uint16_t>((state >> 33 & 0x8000) | (0x3c80 + (state >> 40 & 0x7f)));  // +-0.016 .. 0.031
    }
    weight_bytes += data.size() * 2;
    check(model.set(id, {reinterpret_cast<const uint8_t *>(data.data()), data.size() * 2, LS_DTYPE_BF16, rows, cols}));
  }
  // One step of `rows` sequences, each `len` tokens at `start`, one token sampled per sequence.
  void step(uint32_t rows, uint32_t start, uint32_t len) {
    std::vector<int32_t> tokens(len);
    for (uint32_t i = 0; i < len; ++i) tokens[i] = static_cast<int32_t>((i * 7919u + start) % config.vocab);
    StepBatch batch;
    batch.tokens = rows * len;
    const uint32_t per = config.max_context / kPageTokens;
    for (uint32_t r = 0; r < rows; ++r) {
      StepRow row;
      row.start = start;
      row.len = len;
      row.tokens = tokens.data();
      row.pages = pages.data() + static_cast<size_t>(r) * per;
      row.page_count = (start + len + 15) / 16;
      row.sample = true;
      batch.rows.push_back(row);
    }
    const float *hidden = model.forward(pool, batch, memory);
    logits.resize(static_cast<size_t>(rows) * config.vocab);
    model.head(pool, hidden, rows, logits.data());
    std::vector<SampleRow> sampling(rows);
    for (uint32_t r = 0; r < rows; ++r) sampling[r].logits = logits.data() + static_cast<size_t>(r) * config.vocab;
    std::vector<RowOutput> out(rows);
    check(sampler.run(pool, sampling.data(), rows, out.data()));
  }
  void report(const char *what, uint32_t rows, uint32_t start, uint32_t len, uint32_t repeats) {
    step(rows, start, len);  // warm
    double best = 1e9;
    Profile kept;
    for (uint32_t i = 0; i < repeats; ++i) {
      profile = {};
      profile.cpu_time = cpu_time;
      model.set_profile(&profile);
      const double begin = now();
      step(rows, start, len);
      const double took = now() - begin;
      if (took < best) best = took, kept = profile;
    }
    std::printf("%-24s %9.1f tok/s  %9.2f ms |", what, rows * len / best, best * 1e3);
    double seen = 0;
    for (int op = 0; op < Profile::kCount; ++op) {
      std::printf(" %s %.2f", Profile::kNames[op], static_cast<double>(kept.ns[op]) / 1e6);
      seen += static_cast<double>(kept.ns[op]) / 1e9;
    }
    std::printf(" other %.2f", (best - seen) * 1e3);
    if (len == 1 && rows == 1) std::printf(" | %.1f GB/s of weights", static_cast<double>(weight_bytes) / best / 1e9);
    std::printf("\n");
    std::fflush(stdout);
  }
};

}  // namespace

int main(int argc, char **argv) {
  const std::string which = argc > 1 ? argv[1] : "all", kv = argc > 2 ? argv[2] : "bf16";
  cpu_time = argc > 4 && std::strcmp(argv[4], "cpu") == 0;
  Isa isa;
  Bench::check(detect_isa(isa));
  for (const Shape &s : kShapes) {
    if (which != "all" && which != s.name) continue;
    ls_config c{};
    c.struct_size = sizeof c;
    c.hidden = s.hidden, c.layers = s.layers, c.heads = s.heads, c.kv_heads = s.kv_heads, c.head_dim = s.head_dim, c.intermediate = s.intermediate, c.vocab = s.vocab;
    c.qk_norm = s.qk_norm, c.tied_embeddings = 1, c.max_context = 4096, c.max_seqs = 16, c.max_batch_tokens = 2048;
    c.kv_dtype = kv == "f32" ? LS_DTYPE_F32 : LS_DTYPE_BF16;
    c.threads = argc > 3 ? static_cast<uint32_t>(std::stoul(argv[3])) : 0;
    c.rms_eps = 1e-6f, c.attn_scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim)), c.rope_scale = 1;
    std::vector<float> inv_freq;
    for (uint32_t i = 0; i < s.head_dim / 2; ++i) inv_freq.push_back(std::pow(s.theta, -2.0f * static_cast<float>(i) / static_cast<float>(s.head_dim)));
    Bench bench(c, inv_freq, isa);
    std::printf("%s bf16 weights, %s pages, %s, %u threads, %.0f MB\n", s.name, kv.c_str(), isa_name(isa), bench.pool.size(), static_cast<double>(bench.weight_bytes) / 1e6);
    const bool big = s.hidden > 600;
    bench.report("prefill 512", 1, 0, 512, big ? 1 : 3);
    bench.report("prefill 2048", 1, 0, 2048, big ? 1 : 2);
    bench.report("decode at 100", 1, 100, 1, 15);
    bench.report("decode at 2000", 1, 2000, 1, 15);
    bench.report("decode 16 streams at 100", 16, 100, 1, 5);
  }
  return 0;
}
