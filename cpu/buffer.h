// Working memory that only grows: after the first steps the hot path allocates nothing.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace ls::cpu {

// 64-byte aligned, uninitialised, grown without keeping the content. T is a plain type.
template <class T>
class Buffer {
 public:
  // At least `count` elements; throws std::bad_alloc.
  T *ensure(size_t count) {
    if (count > capacity_) {
      const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
      void *fresh = std::aligned_alloc(64, bytes);
      if (!fresh) throw std::bad_alloc();
      data_.reset(static_cast<T *>(fresh));
      capacity_ = count;
    }
    return data_.get();
  }
  T *data() { return data_.get(); }
  const T *data() const { return data_.get(); }
  size_t capacity() const { return capacity_; }

 private:
  struct Free { void operator()(T *p) const { std::free(p); } };
  std::unique_ptr<T, Free> data_;
  size_t capacity_ = 0;
};

}  // namespace ls::cpu
