// Sampler: exact log probabilities, distributions that match, the nucleus as defined, and the same answer in every company.
#include <algorithm>
#include <limits>

#include "check.h"
#include "sampler.h"
#include "support.h"

using namespace ls;
using namespace ls::cpu;
using support::Random;

namespace {

RowOutput one(Sampler &sampler, ThreadPool &pool, const SampleRow &row) {
  RowOutput out;
  const Status status = sampler.run(pool, &row, 1, &out);
  if (!status.ok()) check::fail(__FILE__, __LINE__, status.text);
  return out;
}

SampleRow row_of(const std::vector<float> &logits, float temperature, float top_p, uint64_t seed, uint32_t position, uint32_t n = 0) {
  return {logits.data(), temperature, top_p, seed, position, n, 0};
}

std::vector<double> probabilities(const std::vector<float> &logits, double temperature) {
  const double top = *std::max_element(logits.begin(), logits.end());
  std::vector<double> p;
  double sum = 0;
  for (float x : logits) sum += p.emplace_back(std::exp((x - top) / temperature));
  for (double &x : p) x /= sum;
  return p;
}

// The nucleus by its definition: a full sort.
std::vector<double> nucleus(const std::vector<float> &logits, double temperature, double top_p) {
  std::vector<double> p = probabilities(logits, temperature);
  std::vector<size_t> order(p.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  double mass = 0;
  size_t kept = 0;
  while (kept < order.size() && (kept == 0 || mass < top_p)) mass += p[order[kept++]];
  for (size_t i = 0; i < order.size(); ++i) p[order[i]] = i < kept ? p[order[i]] / mass : 0;
  return p;
}

// Pearson's statistic of `draws` samples against p, over outcomes expected at least 5 times; the limit is 5 sigma above its mean.
void check_distribution(Sampler &sampler, ThreadPool &pool, const std::vector<float> &logits, float temperature, float top_p, const std::vector<double> &p, uint32_t draws) {
  std::vector<uint32_t> seen(p.size());
  for (uint32_t i = 0; i < draws; ++i) ++seen[static_cast<size_t>(one(sampler, pool, row_of(logits, temperature, top_p, 1234, i)).token)];
  double statistic = 0, rest_expected = 0, rest_seen = 0;
  int cells = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    if (p[i] == 0) CHECK_EQ(seen[i], 0u);
    if (p[i] * draws < 5) {
      rest_expected += p[i] * draws;
      rest_seen += seen[i];
      continue;
    }
    statistic += (seen[i] - p[i] * draws) * (seen[i] - p[i] * draws) / (p[i] * draws);
    ++cells;
  }
  CHECK(cells > 1);
  CHECK_LE(statistic, cells + 5 * std::sqrt(2.0 * cells));
  CHECK_LE(std::fabs(rest_seen - rest_expected), 5 * std::sqrt(rest_expected + 1));
}

}  // namespace

TEST("philox gives the published words") {
  const Philox zero = philox(0, 0, 0, 0, 0), ones = philox(~0ull, ~0u, ~0u, ~0u, ~0u);
  const uint32_t want_zero[] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}, want_ones[] = {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu};
  for (int i = 0; i < 4; ++i) {
    CHECK_EQ(zero.word[i], want_zero[i]);
    CHECK_EQ(ones.word[i], want_ones[i]);
  }
  double mean = 0;
  for (uint32_t i = 0; i < 10000; ++i) {
    const double u = uniform(42, i);
    CHECK(u >= 0 && u < 1);
    mean += u / 10000;
  }
  CHECK_LE(std::fabs(mean - 0.5), 0.015);
}

TEST("greedy takes the lowest id of the largest logit, whatever seed and top_p") {
  ThreadPool pool(2);
  for (const OpsKernels *ops : support::ops_tables()) {
    for (uint32_t vocab : {1u, 5u, 4096u, 4097u, 49152u, 50001u}) {
      Sampler sampler(vocab, *ops);
      Random random(vocab);
      std::vector<float> logits = random.normals(vocab, 3);
      const uint32_t a = random.below(vocab), b = random.below(vocab);
      logits[a] = logits[b] = 40;
      const int32_t want = static_cast<int32_t>(std::min(a, b));
      for (float temperature : {0.0f, 1e-9f, -1.0f}) CHECK_EQ(one(sampler, pool, row_of(logits, temperature, 0.5f, random.next(), 3)).token, want);
      for (float top_p : {0.0f, 1e-9f, 1e-30f}) CHECK_EQ(one(sampler, pool, row_of(logits, 1.0f, top_p, random.next(), 3)).token, want);
      const RowOutput cold = one(sampler, pool, row_of(logits, 1e-9f, 1e-9f, 1, 1, 20));
      CHECK_EQ(cold.token, want);
      for (const auto &entry : cold.top) CHECK(std::isfinite(entry.second));
    }
  }
}

TEST("log probabilities are those of the raw distribution, falling, ties by id") {
  ThreadPool pool(2);
  for (const OpsKernels *ops : support::ops_tables()) {
    for (uint32_t vocab : {3u, 700u, 8192u, 20011u}) {
      Sampler sampler(vocab, *ops);
      Random random(vocab);
      std::vector<float> logits = random.normals(vocab, 2);
      if (vocab > 100) logits[vocab - 1] = logits[50] = logits[7] = 11;
      const std::vector<double> p = probabilities(logits, 1);
      for (uint32_t n : {1u, 5u, 20u}) {
        const RowOutput out = one(sampler, pool, row_of(logits, 1.7f, 0.9f, 5, n, n));
        CHECK_LE(std::fabs(out.logprob - std::log(p[static_cast<size_t>(out.token)])), 2e-5);
        CHECK_EQ(out.top.size(), size_t{std::min(n, vocab)});
        std::vector<int32_t> order(vocab);
        for (uint32_t i = 0; i < vocab; ++i) order[i] = static_cast<int32_t>(i);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)]; });
        for (uint32_t i = 0; i < out.top.size(); ++i) {
          CHECK_EQ(out.top[i].first, order[i]);
          CHECK_LE(std::fabs(out.top[i].second - std::log(p[static_cast<size_t>(order[i])])), 2e-5);
          CHECK(out.top[i].second <= 0 && out.top[i].second >= kLogprobFloor);
        }
      }
      CHECK(one(sampler, pool, row_of(logits, 0, 1, 0, 0)).top.empty());
    }
  }
}

TEST("samples follow softmax at the given temperature") {
  ThreadPool pool(1);
  for (const OpsKernels *ops : support::ops_tables()) {
    Random random(11);
    const std::vector<float> small = random.normals(40, 1.5f), large = random.normals(9000, 2);
    Sampler a(40, *ops), b(9000, *ops);
    for (float temperature : {0.5f, 1.0f, 2.5f}) check_distribution(a, pool, small, temperature, 1, probabilities(small, temperature), 20000);
    check_distribution(b, pool, large, 0.4f, 1, probabilities(large, 0.4), 8000);
  }
}

TEST("top_p keeps the smallest set that reaches the mass") {
  ThreadPool pool(1);
  for (const OpsKernels *ops : support::ops_tables()) {
    Random random(12);
    const std::vector<float> small = random.normals(60, 1.5f);
    Sampler a(60, *ops);
    for (float top_p : {0.1f, 0.5f, 0.9f, 0.99f})
      for (float temperature : {0.3f, 1.0f, 3.0f}) {
        const std::vector<double> p = nucleus(small, temperature, top_p);
        if (std::count_if(p.begin(), p.end(), [](double x) { return x > 0; }) > 1) check_distribution(a, pool, small, temperature, top_p, p, 5000);
      }
    // Near equal logits: every token falls into one bucket, and the cut goes through it.
    std::vector<float> flat(5000);
    for (float &x : flat) x = 1 + random.uniform() * 1e-3f;
    Sampler b(5000, *ops);
    const std::vector<double> p = nucleus(flat, 1, 0.5f);
    std::vector<bool> seen(5000);
    for (uint32_t i = 0; i < 4000; ++i) seen[static_cast<size_t>(one(b, pool, row_of(flat, 1, 0.5f, 9, i)).token)] = true;
    uint32_t outside = 0;
    for (size_t i = 0; i < 5000; ++i) outside += seen[i] && p[i] == 0;
    CHECK_LE(outside, 1u);  // one token at the cut may differ from the double reference
    // Equal logits: ties are kept by rising id.
    const std::vector<float> equal(100, 2.0f);
    Sampler c(100, *ops);
    for (uint32_t i = 0; i < 500; ++i) CHECK(one(c, pool, row_of(equal, 1, 0.255f, 3, i)).token < 26);
  }
}

TEST("a row is sampled the same alone, in a batch, and on any number of threads") {
  for (const OpsKernels *ops : support::ops_tables()) {
    Random random(13);
    const uint32_t vocab = 12345;
    std::vector<std::vector<float>> logits;
    std::vector<SampleRow> rows;
    for (uint32_t r = 0; r < 12; ++r) {
      logits.push_back(random.normals(vocab, 3));
      rows.push_back({nullptr, 0.25f * static_cast<float>(r % 5), r % 3 ? 0.8f : 1.0f, random.next(), random.below(5000), r % 4 * 5, static_cast<int32_t>(r)});
    }
    for (uint32_t r = 0; r < 12; ++r) rows[r].logits = logits[r].data();
    ThreadPool four(4), single(1);
    Sampler sampler(vocab, *ops);
    std::vector<RowOutput> batch(12);
    CHECK(sampler.run(four, rows.data(), 12, batch.data()).ok());
    for (uint32_t r = 0; r < 12; ++r) {
      const RowOutput alone = one(sampler, single, rows[r]);
      CHECK_EQ(alone.token, batch[r].token);
      CHECK_EQ(alone.logprob, batch[r].logprob);
      CHECK(alone.top == batch[r].top);
    }
    // Another seed or position gives another draw somewhere.
    uint32_t changed = 0;
    for (uint32_t i = 0; i < 20; ++i) changed += one(sampler, single, row_of(logits[0], 2, 1, 1, i)).token != one(sampler, single, row_of(logits[0], 2, 1, 2, i)).token;
    CHECK(changed > 5);
  }
}

TEST("logits that are not finite are an internal error that names the row; -infinity is a masked token") {
  ThreadPool pool(2);
  for (const OpsKernels *ops : support::ops_tables()) {
    Random random(14);
    const std::vector<float> good = random.normals(5000);
    Sampler sampler(5000, *ops);
    for (float bad : {NAN, INFINITY}) {
      std::vector<float> broken = good;
      broken[4999] = bad;
      const SampleRow rows[2] = {row_of(good, 1, 1, 1, 1), {broken.data(), 1, 1, 1, 77, 0, 9}};
      RowOutput out[2];
      const Status status = sampler.run(pool, rows, 2, out);
      CHECK_EQ(status.code, LS_INTERNAL);
      CHECK(status.text.find("slot 9") != std::string::npos && status.text.find("position 77") != std::string::npos);
    }
    std::vector<float> masked(5000, -INFINITY);
    Sampler again(5000, *ops);
    const SampleRow all = row_of(masked, 1, 0.9f, 1, 1);
    RowOutput out;
    CHECK_EQ(again.run(pool, &all, 1, &out).code, LS_INTERNAL);
    masked[4321] = 3;
    for (float temperature : {0.0f, 1.0f})
      for (float top_p : {0.5f, 1.0f}) {
        const RowOutput only = one(again, pool, row_of(masked, temperature, top_p, 5, 5, 20));
        CHECK_EQ(only.token, 4321);
        CHECK_EQ(only.logprob, 0.0f);
        CHECK_EQ(only.top.size(), size_t{20});
        for (size_t i = 1; i < 20; ++i) CHECK_EQ(only.top[i].second, kLogprobFloor);
      }
  }
}

TEST("huge logits and extreme temperatures stay finite") {
  ThreadPool pool(2);
  for (const OpsKernels *ops : support::ops_tables()) {
    Random random(15);
    std::vector<float> logits = random.normals(6000, 1e30f);
    Sampler sampler(6000, *ops);
    for (float temperature : {0.0f, 1e-9f, 1e-6f, 1.0f, 1e6f, std::numeric_limits<float>::max()})
      for (float top_p : {1e-9f, 0.3f, 1.0f}) {
        const RowOutput out = one(sampler, pool, row_of(logits, temperature, top_p, 3, 4, 20));
        CHECK(out.token >= 0 && out.token < 6000);
        CHECK(std::isfinite(out.logprob) && out.logprob >= kLogprobFloor && out.logprob <= 0);
        for (const auto &entry : out.top) CHECK(std::isfinite(entry.second));
      }
  }
}
