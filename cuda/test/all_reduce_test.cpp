// The sum over ranks: ranks are threads with a stream each, memory is shared, flags are real. On a single GPU the ranks share it.
#include <cmath>
#include <memory>
#include <random>
#include <thread>

#include "../memory.h"
#include "attention_cases.h"
#include "kernels/all_reduce.h"
#ifndef LS_TEST_GPU
#include "sim/simulator.h"
#endif

using namespace ls::cuda;
using cases::bf16_bits;
using cases::bf16_value;

namespace {

// Blocks of all ranks wait for each other, so all of them must fit on the device at once.
#ifdef LS_TEST_GPU
constexpr uint32_t kMany = 4;
#else
constexpr uint32_t kMany = kMaxRanks;
#endif

OwnedStream own_stream() {
  OwnedStream stream;
  if (const ls::Status status = stream_create(stream.out()); !status.ok()) throw std::runtime_error(status.text);
  return stream;
}

// One call of one rank. Allocated before the ranks start: allocating waits for kernels that wait for other ranks.
struct Call {
  Guarded<float> x;
  Guarded<uint8_t> part;
  Call(const std::vector<float> &values, size_t part_bytes) : x(values), part(part_bytes) {}
};

}  // namespace

TEST("every rank has the same sum, call after call, for both wire types and any length") {
  for (uint32_t ranks : {1u, 2u, 3u, kMany})
    for (Element wire : {Element::f32, Element::bf16}) {
      const Element part_type = ranks % 2 ? Element::f32 : Element::bf16;
      const size_t most = 40000;
      const std::vector<size_t> lengths = ranks == kMany ? std::vector<size_t>{3, 17000} : std::vector<size_t>{1, 255, most, 16384, 7};
      std::vector<std::unique_ptr<Guarded<uint8_t>>> areas;
      AllReduce group;
      group.ranks = ranks, group.max_elements = most, group.wire = wire;
      for (uint32_t r = 0; r < ranks; ++r) {
        areas.push_back(std::make_unique<Guarded<uint8_t>>(all_reduce_bytes(most)));
        std::memset(areas[r]->data(), 0, areas[r]->size());
        group.areas[r] = areas[r]->data();
      }
      std::mt19937_64 random(ranks);
      std::normal_distribution<float> normal;
      std::vector<float> parts(ranks * most), base(most);
      for (float &x : parts) x = bf16_value(bf16_bits(normal(random)));  // the same in both types
      for (float &x : base) x = normal(random);
      std::vector<std::vector<std::unique_ptr<Call>>> calls(ranks);
      for (uint32_t r = 0; r < ranks; ++r)
        for (size_t call = 0; call < lengths.size(); ++call) {
          const size_t n = lengths[call], size = element_bytes(part_type);
          calls[r].push_back(std::make_unique<Call>(std::vector<float>(base.begin(), base.begin() + static_cast<long>(n)), n * size));
          for (size_t i = 0; i < n; ++i) {
            const float value = parts[r * most + i] * static_cast<float>(1 << call);
            const uint16_t bits = bf16_bits(value);
            std::memcpy(calls[r][call]->part.data() + i * size, part_type == Element::bf16 ? static_cast<const void *>(&bits) : &value, size);
          }
        }
      Guarded<int32_t> errors(std::vector<int32_t>(ranks, 0));
      std::vector<OwnedStream> streams;
      for (uint32_t r = 0; r < ranks; ++r) streams.push_back(own_stream());
      std::vector<std::string> failures(ranks);
      std::vector<std::thread> threads;
      for (uint32_t r = 0; r < ranks; ++r)
        threads.emplace_back([&, r] {
          AllReduce own = group;
          own.rank = r, own.error = errors.data() + r;
          try {
            for (size_t call = 0; call < lengths.size(); ++call) all_reduce_add(streams[r].get(), own, calls[r][call]->part.data(), part_type, calls[r][call]->x.data(), lengths[call]);
            finish(streams[r].get());
          } catch (const std::exception &error) {
            failures[r] = error.what();
          }
        });
      for (std::thread &t : threads) t.join();
      for (uint32_t r = 0; r < ranks; ++r) {
        CHECK_EQ(failures[r], "");
        CHECK_EQ(errors[r], 0);
        areas[r]->check_surroundings();
        for (size_t call = 0; call < lengths.size(); ++call) {
          calls[r][call]->x.check_surroundings();
          const std::vector<float> result = calls[r][call]->x.values();
          CHECK(result == calls[0][call]->x.values());
          for (size_t i = 0; i < lengths[call]; ++i) {
            float sum = 0;  // in the order of the ranks
            for (uint32_t p = 0; p < ranks; ++p) sum += parts[p * most + i] * static_cast<float>(1 << call);
            CHECK_EQ(result[i], base[i] + sum);
          }
        }
      }
    }
}

TEST("a rank that never comes is named, and the wait ends") {
  const size_t n = 100;
  Guarded<uint8_t> first(all_reduce_bytes(n)), second(all_reduce_bytes(n));
  std::memset(first.data(), 0, first.size());
  std::memset(second.data(), 0, second.size());
  const Guarded<float> part(std::vector<float>(n, 1.0f));
  Guarded<float> x(std::vector<float>(n, 0.0f));
  Guarded<int32_t> error(std::vector<int32_t>{0});
  AllReduce group;
  group.areas[0] = first.data(), group.areas[1] = second.data();
  group.ranks = 2, group.max_elements = n, group.spin_limit = 3, group.error = error.data();
  all_reduce_add(nullptr, group, part.data(), Element::f32, x.data(), n);
  finish();
  CHECK_EQ(error[0], 2);
}

#ifndef LS_TEST_GPU
TEST("once a rank has been waited for in vain, no later call waits") {
  const size_t n = 100;
  Guarded<uint8_t> first(all_reduce_bytes(n)), second(all_reduce_bytes(n));
  std::memset(first.data(), 0, first.size());
  std::memset(second.data(), 0, second.size());
  const Guarded<float> part(std::vector<float>(n, 1.0f));
  Guarded<float> x(std::vector<float>(n, 0.0f));
  int32_t error = 0;
  AllReduce group;
  group.areas[0] = first.data(), group.areas[1] = second.data();
  group.ranks = 2, group.max_elements = n, group.spin_limit = 500, group.error = &error;
  const auto switches = [&] {
    const uint64_t before = sim::switches();
    all_reduce_add(nullptr, group, part.data(), Element::f32, x.data(), n);
    return sim::switches() - before;
  };
  // Every look of a waiting thread is a switch of fibers. Blocks run one after the other here: the first one waits.
  const uint64_t waited = switches(), after = switches();
  CHECK(waited > group.spin_limit);
  CHECK_EQ(error, 2);
  CHECK_EQ(waited - after, group.spin_limit);
  // Nothing is left of it in a group that begins anew.
  error = 0;
  std::memset(first.data(), 0, first.size());
  CHECK(switches() > after);
  CHECK_EQ(error, 2);
}
#endif

TEST("a sum made elsewhere is added to the residual stream") {
  for (const size_t n : {size_t{4}, size_t{1020}, size_t{4096}}) {
    std::vector<float> sum(n), x(n);
    for (size_t i = 0; i < n; ++i) sum[i] = static_cast<float>(i) * 0.37f, x[i] = 5.0f - static_cast<float>(i);
    const Guarded<float> from(sum);
    Guarded<float> to(x);
    residual_add(nullptr, from.data(), to.data(), n);
    finish();
    for (size_t i = 0; i < n; ++i) CHECK_EQ(to[i], x[i] + sum[i]);
    to.check_surroundings();
  }
}
