// Runs a libFuzzer entry without libFuzzer: `<fuzzer> [iterations] [seed]` mutates a small corpus, `<fuzzer> -f FILE…` replays files.
// A fault ends the process; the input that caused it is left in crash-<seed>-<iteration> when LAYERSCALE_FUZZ_SAVE is set.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kMaxBytes = 512, kCorpus = 64;
constexpr uint64_t kInteresting[] = {0, 1, 15, 16, 17, 0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, 0x7f800000, 0x7fc00000, ~uint64_t{0}};

void mutate(Bytes &input, std::mt19937_64 &random) {
  const auto pick = [&](size_t n) { return static_cast<size_t>(random() % n); };
  for (size_t n = 1 + pick(4); n > 0; --n) {
    switch (input.empty() ? 0 : pick(5)) {
      case 0:  // insert random bytes
        for (size_t count = 1 + pick(16); count > 0 && input.size() < kMaxBytes; --count) input.insert(input.begin() + static_cast<std::ptrdiff_t>(pick(input.size() + 1)), static_cast<uint8_t>(random()));
        break;
      case 1: input[pick(input.size())] = static_cast<uint8_t>(random()); break;
      case 2: input[pick(input.size())] ^= static_cast<uint8_t>(1u << pick(8)); break;
      case 3: {  // overwrite with a number that sits on a border
        const uint64_t value = kInteresting[pick(std::size(kInteresting))];
        const size_t at = pick(input.size());
        std::memcpy(input.data() + at, &value, std::min(size_t{1} << pick(4), input.size() - at));
        break;
      }
      default: input.resize(pick(input.size()) + 1);
    }
  }
}

void run(const Bytes &input, const std::string &name) {
  try {
    LLVMFuzzerTestOneInput(input.data(), input.size());
  } catch (const std::exception &e) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), e.what());
    if (std::getenv("LAYERSCALE_FUZZ_SAVE")) std::ofstream("crash-" + name, std::ios::binary).write(reinterpret_cast<const char *>(input.data()), static_cast<std::streamsize>(input.size()));
    std::abort();
  }
}

}  // namespace

int main(int argc, char **argv) {
  if (argc > 2 && std::strcmp(argv[1], "-f") == 0) {
    for (int i = 2; i < argc; ++i) {
      std::ifstream file(argv[i], std::ios::binary);
      run(Bytes(std::istreambuf_iterator<char>(file), {}), argv[i]);
    }
    return 0;
  }
  const uint64_t iterations = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000, seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  std::mt19937_64 random(seed);
  std::vector<Bytes> corpus(kCorpus);
  for (size_t i = 0; i < corpus.size(); ++i) {
    corpus[i].resize(1 + random() % 128);
    for (uint8_t &byte : corpus[i]) byte = static_cast<uint8_t>(random());
    corpus[i][0] = static_cast<uint8_t>(i);
  }
  for (uint64_t i = 0; i < iterations; ++i) {
    Bytes &parent = corpus[random() % corpus.size()];
    Bytes input = parent;
    const uint8_t target = input[0];
    mutate(input, random);
    if (input.empty()) input.push_back(0);
    if (random() % 8) input[0] = target;  // mostly stay with one target
    run(input, std::to_string(seed) + "-" + std::to_string(i));
    if (random() % 4 == 0) parent = std::move(input);  // drift, since there is no coverage to guide it
  }
  std::printf("ok %llu inputs, seed %llu\n", static_cast<unsigned long long>(iterations), static_cast<unsigned long long>(seed));
  return 0;
}
