// Speed of linear_forward next to what the machine can do: GB/s of weights at one row, GFLOP/s at many.
// linear_bench [--threads N] [--format q8_0] [--shape 576x576] [--ms 60] [--clock cpu]   LAYERSCALE_CPU_ISA picks the variant.
// --clock cpu counts the CPU time of one thread instead of wall time: kernels can then be compared on a busy machine (memory bandwidth cannot).
#include <immintrin.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "../isa.h"
#include "../linear_impl.h"

using namespace ls;
using namespace ls::cpu;

namespace {

clockid_t clock_id = CLOCK_MONOTONIC;

double now() {
  timespec t;
  clock_gettime(clock_id, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

__attribute__((target("avx2,fma"))) float fma_loop(uint64_t rounds) {
  __m256 a[12];
  const __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.001f);
  for (__m256 &v : a) v = _mm256_set1_ps(1.0f);
  for (uint64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) a[j] = _mm256_fmadd_ps(a[j], x, y);
  }
  for (int j = 1; j < 12; ++j) a[0] = _mm256_add_ps(a[0], a[j]);
  return _mm256_cvtss_f32(a[0]);
}

__attribute__((target("avx512f"))) float fma_loop_512(uint64_t rounds) {
  const __m512 x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(0.001f);
  __m512 a[12];
  for (__m512 &v : a) v = y;
  for (uint64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) a[j] = _mm512_fmadd_ps(a[j], x, y);
  }
  float out[16];
  for (int j = 1; j < 12; ++j) a[0] = _mm512_fmadd_ps(a[0], x, a[j]);
  std::memcpy(out, &a[0], sizeof(out));
  return out[0];
}

__attribute__((target("avx2"))) long long read_loop(const uint8_t *p, size_t bytes) {
  __m256i sum[4] = {};
  for (size_t i = 0; i + 128 <= bytes; i += 128) {
    _mm_prefetch(reinterpret_cast<const char *>(p + i + 1024), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char *>(p + i + 1088), _MM_HINT_T0);
    for (int j = 0; j < 4; ++j) sum[j] = _mm256_xor_si256(sum[j], _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + i + 32 * j)));
  }
  sum[0] = _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
  return _mm256_extract_epi64(sum[0], 0);
}

volatile float sink_float;
volatile long long sink_int;

// Best seconds of one call of fn within `budget` seconds (at least 3 calls).
template <class F>
double best_seconds(double budget, F &&fn) {
  fn();
  double best = 1e9;
  const double end = now() + budget;
  for (int i = 0; i < 3 || now() < end; ++i) {
    const double t = now();
    fn();
    best = std::min(best, now() - t);
  }
  return best;
}

double peak_gflops(ThreadPool &pool, bool wide) {
  const uint64_t rounds = 400'000;
  const double s = best_seconds(0.1, [&] { pool.run(pool.size(), [&](uint32_t) { sink_float = wide ? fma_loop_512(rounds) : fma_loop(rounds); }); });
  return static_cast<double>(rounds) * 12 * (wide ? 16 : 8) * 2 * pool.size() / s / 1e9;
}

double read_gbs(ThreadPool &pool) {
  const size_t bytes = size_t{256} << 20;
  WeightMemory memory;
  if (!memory.allocate(bytes).ok()) return 0;
  std::memset(memory.data(), 1, bytes);
  const uint32_t chunks = 1024;
  const double s = best_seconds(0.4, [&] { pool.run(chunks, [&](uint32_t c) { sink_int = read_loop(memory.data() + bytes / chunks * c, bytes / chunks); }); });
  return static_cast<double>(bytes) / s / 1e9;
}

struct Format {
  const char *name;
  ls_dtype dtype;
  uint32_t block, bytes;
};
constexpr Format kFormats[] = {{"f32", LS_DTYPE_F32, 1, 4}, {"f16", LS_DTYPE_F16, 1, 2}, {"bf16", LS_DTYPE_BF16, 1, 2}, {"q8_0", LS_DTYPE_Q8_0, 32, 34}, {"q4_0", LS_DTYPE_Q4_0, 32, 18}, {"q4_1", LS_DTYPE_Q4_1, 32, 20}};
constexpr uint32_t kShapes[][2] = {{576, 576}, {1536, 576}, {576, 1536}, {49152, 576}, {3072, 1024}};

struct Options {
  uint32_t threads = 0;
  double seconds = 0.03;
  std::string format, shape;
};

void measure(const Format &f, uint32_t rows, uint32_t cols, ThreadPool &pool, const Options &o, double gbs, double gflops) {
  const size_t bytes = size_t{rows} * cols / f.block * f.bytes;
  const size_t copies = std::max<size_t>(1, (size_t{48} << 20) / bytes);  // one row: the weights come from memory, not from the cache
  // Ordinary pages, as a mapped file has. Any bit pattern is a weight; 0x2c2c keeps f16 and bf16 scales small and finite.
  const std::vector<uint8_t> file(bytes * copies, 0x2c);
  std::vector<LinearPtr> ws(copies);
  for (size_t i = 0; i < copies; ++i) {
    if (const Status s = linear_prepare({file.data() + i * bytes, bytes, f.dtype, rows, cols}, pool, ws[i]); !s.ok()) {
      std::printf("%s\n", s.text.c_str());
      return;
    }
  }
  std::vector<float> x(size_t{512} * cols), y(size_t{512} * rows);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 17) * 0.1f - 0.8f;
  const auto forward = [&](const Linear &w, uint32_t m) {
    const LinearOut out{&w, nullptr, y.data(), rows, false};
    linear_forward(pool, x.data(), m, cols, &out, 1);
  };
  double s = best_seconds(o.seconds * 2, [&] { for (const LinearPtr &w : ws) forward(*w, 1); });
  const double rate = static_cast<double>(bytes * copies) / s / 1e9;
  s = best_seconds(o.seconds, [&] { forward(*ws[0], 1); });
  std::printf("%-5s %5ux%-5u  m=1 %5.1f GB/s (%3.0f%%), again from cache %5.1f", f.name, rows, cols, rate, 100 * rate / gbs, static_cast<double>(bytes) / s / 1e9);
  for (uint32_t m : {2u, 4u, 8u, 16u, 128u, 512u}) {
    if (rows > 10000 && m > 128) continue;
    s = best_seconds(o.seconds, [&] { forward(*ws[0], m); });
    const double flops = 2.0 * rows * cols * m / s / 1e9;
    std::printf("  m=%u %5.1f (%2.0f%%)", m, flops, 100 * flops / gflops);
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char **argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--threads") o.threads = static_cast<uint32_t>(std::atoi(value.c_str()));
    else if (name == "--ms") o.seconds = std::atof(value.c_str()) / 1000;
    else if (name == "--format") o.format = value;
    else if (name == "--shape") o.shape = value;
    else if (name == "--clock" && value == "cpu") clock_id = CLOCK_THREAD_CPUTIME_ID, o.threads = 1;
    else return std::printf("unknown option %s %s\n", name.c_str(), value.c_str()), 2;
  }
  if (argc % 2 == 0) return std::printf("%s needs a value\n", argv[argc - 1]), 2;
  const LinearKernels *kernels = nullptr;
  if (const Status s = linear_kernels(kernels); !s.ok()) return std::printf("%s\n", s.text.c_str()), 1;
  ThreadPool pool(o.threads);
  const double gbs = read_gbs(pool), gflops = peak_gflops(pool, kernels->group == 16);
  std::printf("variant %s, %u threads; limits of this machine: read %.1f GB/s, f32 FMA %.1f GFLOP/s. GFLOP/s for m > 1, percent of those limits.\n", kernels->name, pool.size(), gbs, gflops);
  for (const Format &f : kFormats) {
    if (!o.format.empty() && o.format != f.name) continue;
    for (const auto &shape : kShapes) {
      const std::string name = std::to_string(shape[0]) + "x" + std::to_string(shape[1]);
      if (o.shape.empty() || o.shape == name) measure(f, shape[0], shape[1], pool, o, gbs, gflops);
    }
  }
}
