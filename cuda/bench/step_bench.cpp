// Times of decode and prefill steps, and of a KV transfer, on a model of a given shape with random weights. Prints one JSON object.
//   step_bench <shape: qwen3-8b | qwen3-0.6b | tiny> <steps> [first GPU] [ranks]
// All matrices share the bytes of one file: what is in them does not matter, that they are not zero does (power, and so clocks).
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "layerscale.h"

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

struct Shape {
  const char *name;
  uint32_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, prefill, batch, context;
};
constexpr Shape kShapes[] = {
    {"qwen3-8b", 4096, 36, 32, 8, 128, 12288, 151936, 8192, 64, 1024},
    {"qwen3-0.6b", 1024, 28, 16, 8, 128, 3072, 151936, 8192, 64, 1024},
    {"tiny", 64, 2, 4, 2, 16, 128, 512, 64, 4, 32},
};

[[noreturn]] void fail(const char *what) {
  char text[4096];
  ls_last_error(text, sizeof text);
  std::fprintf(stderr, "%s: %s\n", what, text);
  std::exit(1);
}
int32_t must(int32_t code, const char *what) {
  if (code < 0) fail(what);
  return code;
}

// bf16 numbers of size 2^-6, signs and mantissas random.
std::string weight_file(uint64_t bytes) {
  char name[] = "/tmp/layerscale-bench-XXXXXX";
  const int fd = mkstemp(name);
  if (fd < 0) fail("no temporary file");
  std::vector<uint16_t> block(1 << 20);
  uint64_t state = 88172645463325252ull;
  for (uint64_t done = 0; done < bytes; done += block.size() * 2) {
    for (uint16_t &v : block) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      v = static_cast<uint16_t>((state & 0x807f) | 0x3c80);
    }
    if (write(fd, block.data(), block.size() * 2) < 0) fail("cannot write the weights");
  }
  close(fd);
  return name;
}

struct Bench {
  Shape shape{};
  ls_engine *engine = nullptr;
  uint64_t weight_bytes = 0;  // read by each decode step
  std::string file_name;
  uint64_t file_bytes = 0;
  std::vector<int32_t> result = std::vector<int32_t>(1 << 16);

  void open(uint32_t device, uint32_t ranks, uint32_t pages) {
    ls_config c{};
    c.struct_size = sizeof c;
    c.hidden = shape.hidden, c.layers = shape.layers, c.heads = shape.heads, c.kv_heads = shape.kv_heads, c.head_dim = shape.head_dim, c.intermediate = shape.intermediate, c.vocab = shape.vocab;
    c.qk_norm = 1, c.max_context = 16384, c.max_seqs = shape.batch, c.max_batch_tokens = shape.prefill, c.kv_dtype = LS_KV_BF16, c.device_index = device, c.ranks = ranks;
    c.rms_eps = 1e-6f, c.attn_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim)), c.rope_scale = 1;
    std::vector<float> inv_freq;
    for (uint32_t i = 0; i < shape.head_dim / 2; ++i) inv_freq.push_back(std::pow(1e6f, -2.0f * static_cast<float>(i) / static_cast<float>(shape.head_dim)));
    must(ls_engine_create(&c, inv_freq.data(), &engine), "ls_engine_create");
    const uint32_t file = static_cast<uint32_t>(must(ls_weights_map(engine, file_name.c_str(), file_bytes), "ls_weights_map"));
    weight_bytes = 0;
    const auto set = [&](uint32_t id, uint32_t rows, uint32_t cols, bool read) {
      const uint64_t bytes = uint64_t{rows} * cols * 2;
      must(ls_weights_set(engine, id, file, 0, bytes, LS_DTYPE_BF16, rows, cols), "ls_weights_set");
      if (read) weight_bytes += bytes;
    };
    const uint32_t q = shape.heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim, h = shape.hidden;
    set(LS_ROLE_EMBEDDING, shape.vocab, h, false);
    set(LS_ROLE_LM_HEAD, shape.vocab, h, true);
    set(LS_ROLE_FINAL_NORM, 1, h, true);
    for (uint32_t l = 0; l < shape.layers; ++l) {
      const uint32_t b = l * 256;
      set(b + LS_ROLE_ATTN_NORM, 1, h, true), set(b + LS_ROLE_FFN_NORM, 1, h, true), set(b + LS_ROLE_Q_NORM, 1, shape.head_dim, true), set(b + LS_ROLE_K_NORM, 1, shape.head_dim, true);
      set(b + LS_ROLE_Q, q, h, true), set(b + LS_ROLE_K, kv, h, true), set(b + LS_ROLE_V, kv, h, true), set(b + LS_ROLE_O, h, q, true);
      set(b + LS_ROLE_GATE, shape.intermediate, h, true), set(b + LS_ROLE_UP, shape.intermediate, h, true), set(b + LS_ROLE_DOWN, h, shape.intermediate, true);
    }
    must(ls_weights_finish(engine), "ls_weights_finish");
    must(ls_pool_create(engine, pages), "ls_pool_create");
  }

  int32_t sequence(const std::vector<int32_t> &tokens) {
    int32_t out[3];
    must(ls_seq_open(engine, tokens.data(), static_cast<uint32_t>(tokens.size()), 0, 0, out), "ls_seq_open");
    return out[0];
  }
  // One row for each slot; tokens of all rows one after the other.
  void submit(const std::vector<int32_t> &slots, uint32_t start, const std::vector<int32_t> &tokens, bool sample) {
    const uint32_t rows = static_cast<uint32_t>(slots.size()), len = static_cast<uint32_t>(tokens.size()) / rows;
    std::vector<int32_t> plan(LS_PLAN_HEADER_WORDS);
    plan[0] = static_cast<int32_t>(rows), plan[1] = static_cast<int32_t>(tokens.size());
    for (const int32_t slot : slots) plan.insert(plan.end(), {slot, static_cast<int32_t>(start), static_cast<int32_t>(len), sample ? 1 : 0, 0, 0x3f800000, 1, 2});
    plan.insert(plan.end(), tokens.begin(), tokens.end());
    must(ls_step_submit(engine, plan.data(), static_cast<uint32_t>(plan.size())), "ls_step_submit");
  }
  void wait() { must(ls_step_wait(engine, result.data(), static_cast<uint32_t>(result.size())), "ls_step_wait"); }

  std::vector<int32_t> prompt(uint32_t length, uint32_t seed) const {
    std::vector<int32_t> tokens(length);
    for (uint32_t i = 0; i < length; ++i) tokens[i] = static_cast<int32_t>((i * 7919u + seed * 104729u) % shape.vocab);
    return tokens;
  }

  // Seconds of a step of `batch` sequences of `context` tokens, the next step submitted while one runs.
  double decode(uint32_t batch, uint32_t context, uint32_t steps) {
    std::vector<int32_t> slots;
    for (uint32_t i = 0; i < batch; ++i) {
      const std::vector<int32_t> tokens = prompt(context, i);
      slots.push_back(sequence(tokens));
      for (uint32_t at = 0; at < context; at += shape.prefill) {
        const std::vector<int32_t> chunk(tokens.begin() + at, tokens.begin() + std::min(context, at + shape.prefill));
        submit({slots.back()}, at, chunk, at + shape.prefill >= context);
        wait();
      }
    }
    const std::vector<int32_t> carry(batch, -1), first(batch, 1);
    const uint32_t warm = 3;
    Clock::time_point begin;
    submit(slots, context, first, true);
    for (uint32_t i = 1; i <= steps + warm; ++i) {
      submit(slots, context + i, carry, true);
      wait();
      if (i == warm) begin = Clock::now();
    }
    const double each = seconds_since(begin) / steps;
    wait();
    for (const int32_t slot : slots) ls_seq_close(engine, slot, 0);
    return each;
  }

  double prefill(uint32_t rounds) {
    double best = 1e9;
    for (uint32_t i = 0; i < rounds; ++i) {
      const std::vector<int32_t> tokens = prompt(shape.prefill, 1000 + i);
      const int32_t slot = sequence(tokens);
      const auto begin = Clock::now();
      submit({slot}, 0, tokens, true);
      wait();
      best = std::min(best, seconds_since(begin));
      ls_seq_close(engine, slot, 0);
    }
    return best;
  }
};

// Bytes and seconds of a prompt's KV from one engine to another on this machine.
void transfer(Bench &from, Bench &to, double &bytes, double &seconds) {
  uint8_t layout[LS_KV_LAYOUT_BYTES], digest[LS_KV_DIGEST_BYTES] = {1};
  ls_kv_config config{};
  config.struct_size = sizeof config;
  const int32_t port = must(ls_kv_start(from.engine, &config, digest, nullptr, "127.0.0.1"), "ls_kv_start");
  must(ls_kv_start(to.engine, &config, digest, nullptr, nullptr), "ls_kv_start");
  must(ls_kv_layout(from.engine, layout), "ls_kv_layout");
  seconds = 1e9;
  for (uint32_t round = 0; round < 3; ++round) {
    const std::vector<int32_t> tokens = from.prompt(from.shape.prefill, 2000 + round);
    const int32_t slot = from.sequence(tokens);
    must(ls_kv_stage(from.engine, slot, from.shape.prefill - 1), "ls_kv_stage");
    from.submit({slot}, 0, tokens, true);
    from.wait();
    uint32_t id[2];
    must(ls_kv_publish(from.engine, slot, id), "ls_kv_publish");
    ls_seq_close(from.engine, slot, 0);
    ls_kv_source source{sizeof source, static_cast<uint32_t>(port), id[0], id[1], LS_KV_LAYOUT_BYTES};
    int32_t out[4], words[256];
    const auto begin = Clock::now();
    must(ls_seq_open_pull(to.engine, tokens.data(), from.shape.prefill, 0, 0, &source, "127.0.0.1", layout, out), "ls_seq_open_pull");
    while (must(ls_kv_events(to.engine, words, 256), "ls_kv_events") == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    seconds = std::min(seconds, seconds_since(begin));
    if (words[2] != LS_KV_DONE) {
      std::fprintf(stderr, "the transfer ended with %d\n", words[2]);
      std::exit(1);
    }
    bytes = static_cast<double>(static_cast<uint32_t>(words[5])) + static_cast<double>(static_cast<uint32_t>(words[6])) * 4294967296.0;
    ls_seq_close(to.engine, out[0], 0);
  }
}

}  // namespace

int main(int argc, char **argv) {
  Bench bench, second;
  bench.shape = second.shape = kShapes[0];
  for (const Shape &shape : kShapes)
    if (argc > 1 && std::strcmp(argv[1], shape.name) == 0) bench.shape = second.shape = shape;
  const Shape &s = bench.shape;
  const uint32_t steps = argc > 2 ? static_cast<uint32_t>(std::atoi(argv[2])) : 50, device = argc > 3 ? static_cast<uint32_t>(std::atoi(argv[3])) : 0, ranks = argc > 4 ? static_cast<uint32_t>(std::atoi(argv[4])) : 1;
  bench.file_bytes = second.file_bytes = uint64_t{s.vocab > s.intermediate ? s.vocab : s.intermediate} * s.hidden * 2;
  bench.file_name = second.file_name = weight_file(bench.file_bytes);
  const uint32_t pages = (s.prefill + s.batch * (s.context + steps + 32)) / LS_PAGE_TOKENS + 2 * s.batch + 64;
  const auto begin = Clock::now();
  bench.open(device, ranks, pages);
  const double load = seconds_since(begin);
  const double kv_token = 2.0 * s.layers * s.kv_heads * s.head_dim * 2;
  const double one = bench.decode(1, s.context, steps), many = bench.decode(s.batch, s.context, steps), prefill = bench.prefill(3);
  // Products and attention of a prompt; the head is computed for its last token alone.
  const double weights = static_cast<double>(bench.weight_bytes) / 2 - static_cast<double>(s.vocab) * s.hidden;
  const double flops = 2 * weights * s.prefill + 2.0 * s.layers * s.heads * s.head_dim * static_cast<double>(s.prefill) * s.prefill;
  second.open(device, ranks, s.prefill / LS_PAGE_TOKENS + 8);
  double kv_bytes = 0, kv_seconds = 0;
  transfer(bench, second, kv_bytes, kv_seconds);
  unlink(bench.file_name.c_str());
  std::printf("{\"shape\":\"%s\",\"ranks\":%u,\"load_seconds\":%.2f,\"decode_1\":{\"seconds\":%.6f,\"bytes\":%.0f},\"decode_%u\":{\"seconds\":%.6f,\"bytes\":%.0f},\"prefill\":{\"tokens\":%u,\"seconds\":%.6f,\"flops\":%.0f},"
              "\"kv_transfer\":{\"bytes\":%.0f,\"seconds\":%.6f}}\n",
              s.name, ranks, load, one, static_cast<double>(bench.weight_bytes) + kv_token * s.context, s.batch, many, static_cast<double>(bench.weight_bytes) + kv_token * s.context * s.batch, s.prefill, prefill, flops, kv_bytes,
              kv_seconds);
  ls_engine_destroy(second.engine);
  ls_engine_destroy(bench.engine);
}
