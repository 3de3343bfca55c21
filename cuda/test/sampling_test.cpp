// Sampling against cpu/sampler.cpp on the same logits, and its own promises.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "../../cpu/sampler.h"
#include "device.h"
#include "guarded.h"
#include "kernels/sampling.h"

using namespace ls::cuda;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> normals(size_t n, float scale, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> out(n);
  for (float &x : out) x = normal(random);
  return out;
}

SampleParams params_of(float temperature, float top_p, uint64_t seed, uint32_t position, uint32_t n = 0) {
  SampleParams p;
  p.temperature = temperature, p.top_p = top_p, p.position = position, p.n_logprobs = n;
  p.seed_lo = static_cast<uint32_t>(seed), p.seed_hi = static_cast<uint32_t>(seed >> 32);
  return p;
}

// Rows of logits `extra` apart more than they are long; results of the rows that were not asked for stay as they are.
std::vector<SampleResult> run(const std::vector<std::vector<float>> &logits, const std::vector<SampleParams> &params, uint32_t active, std::vector<int32_t> *carry = nullptr, size_t extra = 3) {
  const uint32_t vocab = static_cast<uint32_t>(logits[0].size()), rows = static_cast<uint32_t>(logits.size());
  const size_t ld = vocab + extra;
  Guarded<float> memory(rows * ld);
  for (uint32_t r = 0; r < rows; ++r) std::copy(logits[r].begin(), logits[r].end(), &memory[r * ld]);
  const Guarded<SampleParams> device_params(params);
  Guarded<SampleResult> results(rows);
  Guarded<uint8_t> scratch(sample_scratch_bytes(rows, vocab));
  const Guarded<int32_t> count(std::vector<int32_t>{static_cast<int32_t>(active)});
  Guarded<int32_t> device_carry(carry ? *carry : std::vector<int32_t>(1));
  // Twice where that is quick: what a call leaves in the scratch is nothing to the next.
  for (int call = vocab < 10000 ? 0 : 1; call < 2; ++call)
    sample(nullptr, memory.data(), ld, vocab, device_params.data(), count.data(), rows, results.data(), carry ? device_carry.data() : nullptr, scratch.data());
  finish();
  results.check_surroundings();
  if (carry) *carry = device_carry.values();
  return results.values();
}
SampleResult one(const std::vector<float> &logits, const SampleParams &params) { return run({logits}, {params}, 1)[0]; }

ls::RowOutput on_cpu(const std::vector<float> &logits, const SampleParams &p) {
  static ls::cpu::ThreadPool pool(1);
  ls::cpu::Sampler sampler(static_cast<uint32_t>(logits.size()), ls::cpu::kOps_avx2);
  const ls::cpu::SampleRow row{logits.data(), p.temperature, p.top_p, static_cast<uint64_t>(p.seed_hi) << 32 | p.seed_lo, p.position, p.n_logprobs, 0};
  ls::RowOutput out;
  const ls::Status status = sampler.run(pool, &row, 1, &out);
  if (!status.ok()) check::fail(__FILE__, __LINE__, status.text);
  return out;
}

void check_same(const std::vector<float> &logits, const SampleParams &p, const SampleResult &got, const std::string &what) {
  const ls::RowOutput want = on_cpu(logits, p);
  const std::string text = what + ", vocab " + std::to_string(logits.size()) + " temperature " + std::to_string(p.temperature) + " top_p " + std::to_string(p.top_p) + " position " + std::to_string(p.position);
  if (got.broken) check::fail(__FILE__, __LINE__, text + ": logits are called broken");
  if (got.token != want.token) check::fail(__FILE__, __LINE__, text + ": token " + std::to_string(got.token) + ", on the CPU " + std::to_string(want.token));
  CHECK_LE(std::fabs(got.logprob - want.logprob), 2e-5);
  CHECK_EQ(got.n_top, want.top.size());
  for (uint32_t i = 0; i < got.n_top; ++i) {
    CHECK_EQ(got.top[i].token, want.top[i].first);
    CHECK_LE(std::fabs(got.top[i].logprob - want.top[i].second), 2e-5);
    CHECK(got.top[i].logprob <= 0);
  }
}

}  // namespace

TEST("the same tokens and log probabilities as on the CPU") {
  uint64_t seed = 1;
  for (uint32_t vocab : {1u, 5u, 700u, 4095u, 4097u, 12345u, 50001u})
    for (float spread : {0.1f, 3.0f}) {
      std::vector<std::vector<float>> logits;
      std::vector<SampleParams> params;
      for (float temperature : {0.0f, 0.3f, 1.0f, 4.0f})
        for (float top_p : {0.0f, 0.2f, 0.9f, 0.999f, 1.0f}) {
          if (vocab > 5000 && (logits.size() + seed) % 3) {
            ++seed;
            continue;
          }
          logits.push_back(normals(vocab, spread, ++seed));
          params.push_back(params_of(temperature, top_p, seed * 0x9E3779B97F4A7C15ull, static_cast<uint32_t>(seed % 5000), static_cast<uint32_t>(seed % 22 > 20 ? 20 : seed % 22)));
        }
      const std::vector<SampleResult> got = run(logits, params, static_cast<uint32_t>(logits.size()));
      for (size_t r = 0; r < logits.size(); ++r) check_same(logits[r], params[r], got[r], "spread " + std::to_string(spread));
    }
}

TEST("many draws from one distribution are those of the CPU") {
  const std::vector<float> small = normals(60, 1.5f, 77);
  std::vector<std::vector<float>> logits;
  std::vector<SampleParams> params;
  for (uint32_t i = 0; i < 400; ++i) {
    logits.push_back(small);
    params.push_back(params_of(1, i % 2 ? 1.0f : 0.7f, 42 + i / 100, i));
  }
  const std::vector<SampleResult> got = run(logits, params, 400);
  std::vector<uint32_t> seen(60);
  for (uint32_t i = 0; i < 400; ++i) {
    check_same(small, params[i], got[i], "draw");
    ++seen[static_cast<size_t>(got[i].token)];
  }
  CHECK(std::count_if(seen.begin(), seen.end(), [](uint32_t n) { return n > 0; }) > 10);
}

TEST("a vocabulary of 256k") {
  const std::vector<float> logits = normals(262144 + 7, 2.5f, 5);
  for (const SampleParams &p : {params_of(0.8f, 0.95f, 9, 3, 20), params_of(1.5f, 1, 10, 4), params_of(0, 1, 0, 0, 5)}) check_same(logits, p, one(logits, p), "large vocabulary");
}

TEST("greedy takes the lowest id of the largest logit, whatever seed and top_p") {
  for (uint32_t vocab : {2u, 4096u, 9001u}) {
    std::vector<float> logits = normals(vocab, 3, vocab);
    logits[vocab - 1] = logits[vocab / 2] = 40;
    const int32_t want = static_cast<int32_t>(vocab / 2);
    for (float temperature : {0.0f, 9e-7f, -1.0f}) CHECK_EQ(one(logits, params_of(temperature, 0.5f, vocab, 3)).token, want);
    for (float top_p : {0.0f, 1e-9f, 1e-30f, -1.0f}) CHECK_EQ(one(logits, params_of(1, top_p, vocab, 3)).token, want);
  }
  // 0 and -0 are equal.
  CHECK_EQ(one({-1, -0.0f, 0.0f, -2}, params_of(0, 1, 0, 0)).token, 1);
  CHECK_EQ(one({-1, 0.0f, -0.0f, -2}, params_of(0, 1, 0, 0)).token, 1);
}

TEST("the nucleus cuts through equal and nearly equal logits as the CPU does") {
  // All in one bucket; ties are kept by rising id.
  const std::vector<float> equal(5000, 2.0f);
  for (uint32_t i = 0; i < 40; ++i) {
    const SampleParams p = params_of(1, 0.0255f, 3, i);
    const SampleResult got = one(equal, p);
    CHECK(got.token < 128);
    check_same(equal, p, got, "equal logits");
  }
  std::mt19937_64 random(8);
  std::vector<float> flat(5000);
  for (float &x : flat) x = 1 + static_cast<float>(random() % 1000) * 1e-6f;  // with many ties
  for (uint32_t i = 0; i < 40; ++i) {
    const SampleParams p = params_of(1, 0.3f, 9, i);
    check_same(flat, p, one(flat, p), "flat logits");
  }
  for (float top_p : {std::nextafter(1.0f, 0.0f), 1.0f, 2.0f}) {
    const SampleParams p = params_of(1, top_p, 12, 1);
    check_same(flat, p, one(flat, p), "top_p about 1");
  }
}

TEST("a row is sampled the same alone and in a batch; rows beyond the count are left alone; tokens reach the carry array") {
  const uint32_t vocab = 9000;
  std::vector<std::vector<float>> logits;
  std::vector<SampleParams> params;
  for (uint32_t r = 0; r < 8; ++r) {
    logits.push_back(normals(vocab, 3, 20 + r));
    params.push_back(params_of(0.25f * static_cast<float>(r % 5), r % 3 ? 0.8f : 1.0f, r * 77, r * 5, r % 4 * 5));
    params.back().carry = r == 2 ? -1 : static_cast<int32_t>(7 - r);
  }
  std::vector<int32_t> carry(8, -5);
  const std::vector<SampleResult> batch = run(logits, params, 6, &carry);
  for (uint32_t r = 0; r < 6; ++r) {
    const SampleResult alone = one(logits[r], params[r]);
    CHECK_EQ(alone.token, batch[r].token);
    CHECK_EQ(alone.logprob, batch[r].logprob);
    CHECK_EQ(carry[7 - r], r == 2 ? -5 : batch[r].token);
  }
  for (uint32_t r = 6; r < 8; ++r) {
    CHECK_EQ(batch[r].n_top, 0xffffffffu);
    CHECK_EQ(carry[7 - r], -5);
  }
}

TEST("-infinity is a masked token; NaN, +infinity and a vocabulary of -infinity are reported") {
  std::vector<float> logits = normals(8200, 1, 4);
  for (uint32_t i = 0; i < 4096; ++i) logits[i] = -kInfinity;  // a whole chunk
  for (uint32_t i = 0; i < 20; ++i) {
    const SampleParams p = params_of(3, i % 2 ? 1.0f : 0.9f, 1, i);
    const SampleResult got = one(logits, p);
    CHECK(got.token >= 4096);
    check_same(logits, p, got, "masked");
  }
  std::vector<float> few(100, -kInfinity);
  few[30] = 1, few[60] = 2;
  check_same(few, params_of(0, 1, 0, 0, 20), one(few, params_of(0, 1, 0, 0, 20)), "two tokens left");
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(), kInfinity})
    for (uint32_t at : {0u, 5000u, 8199u})
      for (float temperature : {0.0f, 1.0f}) {
        std::vector<float> broken = logits;
        broken[at] = bad;
        const SampleResult got = one(broken, params_of(temperature, 0.9f, 1, 1, 3));
        CHECK_EQ(got.broken, 1u);
        CHECK_EQ(got.token, 0);
        CHECK_EQ(got.n_top, 0u);
      }
  CHECK_EQ(one(std::vector<float>(50, -kInfinity), params_of(1, 0.9f, 1, 1)).broken, 1u);
}
