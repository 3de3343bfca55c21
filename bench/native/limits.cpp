// What this machine can do: memory read bandwidth and multiply-add peak, with the threads given. Prints one JSON line.
// usage: limits [threads] [MiB]
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;
typedef float v8 __attribute__((vector_size(32)));

template <class F>
static double seconds(int threads, F body) {
  std::vector<std::thread> pool;
  const auto start = Clock::now();
  for (int t = 0; t < threads; ++t) pool.emplace_back(body, t);
  for (auto &thread : pool) thread.join();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int main(int argc, char **argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : static_cast<int>(std::thread::hardware_concurrency());
  const size_t words = (argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 1024) * 1024 * 1024 / sizeof(uint64_t);
  std::vector<uint64_t> data(words, 1);
  volatile uint64_t sink = 0;
  double best_read = 1e9, best_fma = 1e9;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double read = seconds(threads, [&](int t) {
      uint64_t sum[8] = {};
      const size_t from = words / threads * t, to = words / threads * (t + 1);
      for (size_t i = from; i + 8 <= to; i += 8)
        for (int j = 0; j < 8; ++j) sum[j] += data[i + j];
      for (uint64_t s : sum) sink = sink + s;
    });
    if (read < best_read) best_read = read;
    constexpr int64_t kRounds = 30'000'000;
    const double fma = seconds(threads, [&](int) {
      // Ten independent sums in registers: enough to hide the latency of a multiply-add.
      const v8 a = {1e-9f}, b = {1.f};
      v8 s0 = b, s1 = b, s2 = b, s3 = b, s4 = b, s5 = b, s6 = b, s7 = b, s8 = b, s9 = b;
      for (int64_t i = 0; i < kRounds / 10; ++i) {
        s0 = s0 * b + a, s1 = s1 * b + a, s2 = s2 * b + a, s3 = s3 * b + a, s4 = s4 * b + a;
        s5 = s5 * b + a, s6 = s6 * b + a, s7 = s7 * b + a, s8 = s8 * b + a, s9 = s9 * b + a;
        asm volatile("" : "+x"(s0), "+x"(s1), "+x"(s2), "+x"(s3), "+x"(s4), "+x"(s5), "+x"(s6), "+x"(s7), "+x"(s8), "+x"(s9));
      }
      const v8 all = s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7 + s8 + s9;
      float total = 0;
      for (int lane = 0; lane < 8; ++lane) total += all[lane];
      sink = sink + static_cast<uint64_t>(total);
    });
    if (fma < best_fma) best_fma = fma;
  }
  std::printf("{\"threads\":%d,\"read_gb_s\":%.2f,\"fma_gflop_s\":%.1f}\n", threads, words * 8 / best_read / 1e9, threads * 30e6 * 16 / best_fma / 1e9);
}
