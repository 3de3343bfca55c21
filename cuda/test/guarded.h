// "Device" memory for tests, and the wait for what was launched.
// Over the simulator: pages that may not be touched on both sides, the end of the data at the end of its pages.
// With LS_TEST_GPU: page-locked memory that the GPU and the host share, between two zones of a known pattern; a kernel that wrote there fails the case.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "../runtime.h"
#include "check.h"
#ifdef LS_TEST_GPU
#include <cuda_runtime_api.h>
#else
#include "sim/simulator.h"
#endif

namespace ls::cuda {

// Waits for what this thread launched on a stream. Every read of a result comes after it: the simulator, which has run everything by then, refuses one before.
// Throws what the device says of the launches since the last wait.
#ifdef LS_TEST_GPU
inline void finish(CUstream_st *stream = nullptr) {
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) throw std::runtime_error(std::string("the device says ") + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}
inline void expect_finished() {}
// Buffers whose surroundings a kernel wrote to, by the time they were freed.
inline std::atomic<int> overruns{0};
#else
inline uint64_t &finished_switches() {
  static thread_local uint64_t switches = 0;
  return switches;
}
inline void finish(CUstream_st *stream = nullptr) {
  if (stream != nullptr)  // has a thread of its own; without a stream a launch has ended when it returns
    if (const Status status = stream_sync(stream); !status.ok()) throw std::runtime_error(status.text);
  finished_switches() = sim::switches();
}
inline void expect_finished() {
  if (finished_switches() != sim::switches()) throw std::runtime_error("a result is read before finish()");
}
#endif

template <class T>
class Guarded {
 public:
  explicit Guarded(size_t count) : count_(count) {
    const size_t bytes = (count * sizeof(T) + 15) / 16 * 16;  // kernels read 16 bytes at once
    mapped_ = (bytes + kGuard - 1) / kGuard * kGuard + 2 * kGuard;
#ifdef LS_TEST_GPU
    void *p = nullptr;
    if (const cudaError_t error = cudaHostAlloc(&p, mapped_, cudaHostAllocPortable | cudaHostAllocMapped); error != cudaSuccess) throw std::runtime_error(std::string("cudaHostAlloc: ") + cudaGetErrorString(error));
    mapping_ = static_cast<char *>(p);
    std::memset(mapping_, 0xff, mapped_);
#else
    void *p = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<char *>(p);
    mprotect(mapping_ + kGuard, mapped_ - 2 * kGuard, PROT_READ | PROT_WRITE);
    std::memset(mapping_ + kGuard, 0xff, mapped_ - 2 * kGuard);
#endif
    data_ = reinterpret_cast<T *>(mapping_ + mapped_ - kGuard - bytes);
  }
  explicit Guarded(const std::vector<T> &values) : Guarded(values.size()) {
    if (count_) std::memcpy(static_cast<void *>(data_), values.data(), count_ * sizeof(T));
  }
  ~Guarded() {
#ifdef LS_TEST_GPU
    if (!surroundings_intact()) ++overruns;
    cudaFreeHost(mapping_);
#else
    munmap(mapping_, mapped_);
#endif
  }
  Guarded(const Guarded &) = delete;
  Guarded &operator=(const Guarded &) = delete;

  T *data() { return data_; }
  const T *data() const { return data_; }
  size_t size() const { return count_; }
  T &operator[](size_t i) {
    expect_finished();
    return data_[i];
  }
  const T &operator[](size_t i) const {
    expect_finished();
    return data_[i];
  }
  std::vector<T> values() const {
    expect_finished();
    return {data_, data_ + count_};
  }
  // What is around the data, as far as it can be read, is as it was.
  void check_surroundings() const {
    expect_finished();
    CHECK(surroundings_intact());
  }

 private:
#ifdef LS_TEST_GPU
  static constexpr size_t kGuard = 16 << 10, kReadable = 0;
#else
  static constexpr size_t kGuard = 4096, kReadable = kGuard;  // guards cannot be read
#endif
  bool surroundings_intact() const {
    const auto *first = reinterpret_cast<const unsigned char *>(mapping_ + kReadable), *last = reinterpret_cast<const unsigned char *>(mapping_ + mapped_ - kReadable);
    const auto *begin = reinterpret_cast<const unsigned char *>(data_), *end = reinterpret_cast<const unsigned char *>(data_ + count_);
    const auto untouched = [](unsigned char byte) { return byte == 0xff; };
    return std::all_of(first, begin, untouched) && std::all_of(end, last, untouched);
  }

  char *mapping_ = nullptr;
  T *data_ = nullptr;
  size_t count_ = 0, mapped_ = 0;
};

}  // namespace ls::cuda
