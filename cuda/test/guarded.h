// "Device" memory for tests: pages that may not be touched on both sides, the end of the data at the end of its pages.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <vector>

#include "check.h"

namespace ls::cuda {

template <class T>
class Guarded {
 public:
  explicit Guarded(size_t count) : count_(count) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), bytes = (count * sizeof(T) + 15) / 16 * 16;  // kernels read 16 bytes at once
    mapped_ = (bytes + page - 1) / page * page + 2 * page;
    void *p = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<char *>(p);
    mprotect(mapping_ + page, mapped_ - 2 * page, PROT_READ | PROT_WRITE);
    std::memset(mapping_ + page, 0xff, mapped_ - 2 * page);
    data_ = reinterpret_cast<T *>(mapping_ + mapped_ - page - bytes);
  }
  explicit Guarded(const std::vector<T> &values) : Guarded(values.size()) {
    if (count_) std::memcpy(static_cast<void *>(data_), values.data(), count_ * sizeof(T));
  }
  ~Guarded() { munmap(mapping_, mapped_); }
  Guarded(const Guarded &) = delete;
  Guarded &operator=(const Guarded &) = delete;

  T *data() { return data_; }
  const T *data() const { return data_; }
  size_t size() const { return count_; }
  T &operator[](size_t i) { return data_[i]; }
  const T &operator[](size_t i) const { return data_[i]; }
  std::vector<T> values() const { return {data_, data_ + count_}; }
  // The bytes between the end of the data and the guard, and those before the data, are as they were.
  void check_surroundings() const {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const auto *first = reinterpret_cast<const unsigned char *>(mapping_ + page), *last = reinterpret_cast<const unsigned char *>(mapping_ + mapped_ - page);
    for (const unsigned char *p = first; p < last; ++p)
      if (p < reinterpret_cast<const unsigned char *>(data_) || p >= reinterpret_cast<const unsigned char *>(data_ + count_)) CHECK(*p == 0xff);
  }

 private:
  char *mapping_ = nullptr;
  T *data_ = nullptr;
  size_t count_ = 0, mapped_ = 0;
};

}  // namespace ls::cuda
