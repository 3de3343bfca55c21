// Times of decode and prefill steps, and of a KV transfer, on a model of a given shape with random weights. Prints a JSON object a line, each as soon as it
// is known: {"name":…,"seconds":<median>,"least":…,"most":…, and what was moved ("bytes") or computed ("flops")}. docs/cuda.md has the formulas.
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

#include "copies.h"
#include "layerscale.h"

using namespace ls::bench;

namespace {

struct Shape {
  const char *name;
  uint32_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, prefill, batch, context;
};
constexpr Shape kShapes[] = {
    {"qwen3-8b", 4096, 36, 32, 8, 128, 12288, 151936, 8192, 64, 1024},
    {"qwen3-0.6b", 1024, 28, 16, 8, 128, 3072, 151936, 8192, 64, 1024},
    {"tiny", 64, 2, 4, 2, 16, 128, 512, 64, 4, 32},
};
// The same KV with next to nothing computed: what a transfer is timed on.
Shape kv_shape(Shape s) {
  s.hidden = 64, s.heads = s.kv_heads, s.intermediate = 64, s.vocab = 512, s.batch = 2;
  return s;
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

constexpr uint32_t kWarm = 5;  // steps that are not counted

struct Bench {
  Shape shape{};
  ls_engine *engine = nullptr;
  uint64_t weight_bytes = 0;  // read by each decode step
  uint64_t matrix_bytes = 0;  // those of them in matrices
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
    weight_bytes = matrix_bytes = 0;
    const auto set = [&](uint32_t id, uint32_t rows, uint32_t cols, bool read) {
      const uint64_t bytes = uint64_t{rows} * cols * 2;
      must(ls_weights_set(engine, id, file, 0, bytes, LS_DTYPE_BF16, rows, cols), "ls_weights_set");
      if (read) weight_bytes += bytes;
      if (read && rows > 1) matrix_bytes += bytes;
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

  // Seconds between the ends of steps of `batch` sequences that are `context` tokens long at first; the next step is submitted while one runs.
  std::vector<double> decode(uint32_t batch, uint32_t steps) {
    std::vector<int32_t> slots;
    for (uint32_t i = 0; i < batch; ++i) {
      slots.push_back(sequence(prompt(shape.context, i)));
      submit({slots.back()}, 0, prompt(shape.context, i), true);
      wait();
    }
    const std::vector<int32_t> carry(batch, -1), first(batch, 1);
    std::vector<double> seconds;
    submit(slots, shape.context, first, true);
    Clock::time_point last;
    for (uint32_t i = 1; i <= steps + kWarm; ++i) {
      submit(slots, shape.context + i, carry, true);
      wait();
      if (i > kWarm) seconds.push_back(seconds_since(last));
      last = Clock::now();
    }
    wait();
    for (const int32_t slot : slots) ls_seq_close(engine, slot, 0);
    return seconds;
  }
  // Weights but those of the embedding once, and K and V of what each sequence has become on average (a row of the embedding each is left out).
  double decode_bytes(uint32_t batch, uint32_t steps) const {
    const double keys = shape.context + kWarm + (steps + 1) / 2.0;
    return static_cast<double>(weight_bytes) + kv_token_bytes() * keys * batch;
  }
  double kv_token_bytes() const { return 2.0 * shape.layers * shape.kv_heads * shape.head_dim * 2; }

  std::vector<double> prefill(uint32_t rounds) {
    std::vector<double> seconds;
    for (uint32_t i = 0; i <= rounds; ++i) {
      const std::vector<int32_t> tokens = prompt(shape.prefill, 1000 + i);
      const int32_t slot = sequence(tokens);
      const auto begin = Clock::now();
      submit({slot}, 0, tokens, true);
      wait();
      if (i > 0) seconds.push_back(seconds_since(begin));
      ls_seq_close(engine, slot, 0);
    }
    return seconds;
  }
  // 2 a weight and token; 4 a pair of query and key that sees it, head and dimension (q k and p v), causal; the head for the last token alone.
  double prefill_flops() const {
    const double tokens = shape.prefill, head = static_cast<double>(shape.vocab) * shape.hidden, weights = static_cast<double>(matrix_bytes) / 2 - head;
    return 2 * weights * tokens + 2 * head + 4.0 * shape.layers * shape.heads * shape.head_dim * tokens * (tokens + 1) / 2;
  }
};

// A prompt's KV from one engine to another on this machine, in turns with a plain copy of as many bytes.
//   kv_pull       host, TCP, host, GPU: what a decode worker waits for when the prefill worker staged behind its own compute
//   kv_transfer   GPU, host, TCP, host, GPU: the pages lie in the GPU's memory when the clock starts; the step of the last tokens is in it
void transfer(Bench &from, Bench &to, uint32_t rounds) {
  uint8_t layout[LS_KV_LAYOUT_BYTES], digest[LS_KV_DIGEST_BYTES] = {1};
  ls_kv_config config{};
  config.struct_size = sizeof config;
  const int32_t port = must(ls_kv_start(from.engine, &config, digest, nullptr, "127.0.0.1"), "ls_kv_start");
  must(ls_kv_start(to.engine, &config, digest, nullptr, nullptr), "ls_kv_start");
  must(ls_kv_layout(from.engine, layout), "ls_kv_layout");
  const uint32_t length = from.shape.prefill;
  const std::vector<int32_t> tokens = from.prompt(length, 2000);
  std::vector<double> pulls, whole, copies;
  std::vector<uint8_t> plain, landing;
  double bytes = 0;
  for (uint32_t round = 0; round <= rounds; ++round) {
    const auto begin = Clock::now();
    int32_t opened[3];
    must(ls_seq_open(from.engine, tokens.data(), length, 0, 0, opened), "ls_seq_open");
    must(ls_kv_stage(from.engine, opened[0], length - 1), "ls_kv_stage");
    const uint32_t start = static_cast<uint32_t>(opened[2]);
    from.submit({opened[0]}, start, std::vector<int32_t>(tokens.begin() + start, tokens.end()), true);
    from.wait();
    uint32_t id[2];
    must(ls_kv_publish(from.engine, opened[0], id), "ls_kv_publish");
    ls_kv_source source{sizeof source, static_cast<uint32_t>(port), id[0], id[1], LS_KV_LAYOUT_BYTES};
    int32_t out[4], words[256];
    const auto published = Clock::now();
    must(ls_seq_open_pull(to.engine, tokens.data(), length, 0, 0, &source, "127.0.0.1", layout, out), "ls_seq_open_pull");
    while (must(ls_kv_events(to.engine, words, 256), "ls_kv_events") == 0) {
      if (seconds_since(published) > 60) fail("the transfer has not ended after 60 s");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (round > 0) pulls.push_back(seconds_since(published)), whole.push_back(seconds_since(begin));
    if (words[2] != LS_KV_DONE) {
      std::fprintf(stderr, "the transfer ended with %d\n", words[2]);
      std::exit(1);
    }
    bytes = static_cast<double>(static_cast<uint32_t>(words[5])) + static_cast<double>(static_cast<uint32_t>(words[6])) * 4294967296.0;
    ls_seq_close(from.engine, opened[0], length);  // the rounds that are counted find it in the cache
    ls_seq_close(to.engine, out[0], 0);
    if (round == 0) plain.assign(static_cast<size_t>(bytes), 0x5a), landing.assign(plain.size(), 0);
    const double copied = tcp_copy(plain, landing);
    if (round > 0) copies.push_back(copied);
  }
  tell("tcp_copy", copies, "bytes", bytes);
  tell("kv_pull", pulls, "bytes", bytes);
  tell("kv_transfer", whole, "bytes", bytes);
}

}  // namespace

int main(int argc, char **argv) {
  Bench bench;
  bench.shape.name = "";
  for (const Shape &shape : kShapes)
    if (argc > 1 && std::strcmp(argv[1], shape.name) == 0) bench.shape = shape;
  const Shape &s = bench.shape;
  const uint32_t steps = argc > 2 ? static_cast<uint32_t>(std::atoi(argv[2])) : 0, device = argc > 3 ? static_cast<uint32_t>(std::atoi(argv[3])) : 0, ranks = argc > 4 ? static_cast<uint32_t>(std::atoi(argv[4])) : 1;
  if (s.hidden == 0 || steps == 0 || ranks == 0) {
    std::fprintf(stderr, "error: expected a shape (qwen3-8b, qwen3-0.6b or tiny), a number of steps, and perhaps a GPU and ranks; got \"%s\" \"%s\"\n", argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "");
    return 2;
  }
  const bool tiny = std::strcmp(s.name, "tiny") == 0;
  memory_copy(device, tiny ? 1 << 16 : size_t{4} << 30);
  bench.file_bytes = uint64_t{s.vocab > s.intermediate ? s.vocab : s.intermediate} * s.hidden * 2;
  bench.file_name = weight_file(bench.file_bytes);
  const auto begin = Clock::now();
  bench.open(device, ranks, (s.prefill + s.batch * (s.context + steps + 32)) / LS_PAGE_TOKENS + 2 * s.batch + 64);
  tell("load", {seconds_since(begin)}, "bytes", static_cast<double>(bench.weight_bytes), ",\"shape\":\"" + std::string(s.name) + "\",\"ranks\":" + std::to_string(ranks));
  const auto rows = [](uint32_t batch, uint32_t context) { return ",\"rows\":" + std::to_string(batch) + ",\"context\":" + std::to_string(context); };
  tell("decode_1", bench.decode(1, steps), "bytes", bench.decode_bytes(1, steps), rows(1, s.context));
  tell("prefill", bench.prefill(tiny ? 1 : 5), "flops", bench.prefill_flops(), ",\"tokens\":" + std::to_string(s.prefill));
  tell("decode_64", bench.decode(s.batch, steps), "bytes", bench.decode_bytes(s.batch, steps), rows(s.batch, s.context));
  ls_engine_destroy(bench.engine);
  Bench from, to;
  for (Bench *end : {&from, &to}) {
    end->shape = kv_shape(s), end->file_name = bench.file_name, end->file_bytes = bench.file_bytes;
    end->open(device, ranks, 2 * s.prefill / LS_PAGE_TOKENS + 64);
  }
  unlink(bench.file_name.c_str());
  transfer(from, to, tiny ? 1 : 5);
  ls_engine_destroy(from.engine);
  ls_engine_destroy(to.engine);
}
