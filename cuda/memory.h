// Owners of what runtime.h hands out. All of one object's belongs to one device; the owner is destroyed with that device in use.
#pragma once
#include <utility>

#include "runtime.h"

namespace ls::cuda {

template <class Handle, void (*Destroy)(Handle)>
class Owned {
 public:
  Owned() = default;
  ~Owned() { reset(); }
  Owned(Owned &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned &operator=(Owned &&other) noexcept {
    if (this != &other) reset(), handle_ = std::exchange(other.handle_, nullptr);
    return *this;
  }
  Handle get() const { return handle_; }
  // For a call that makes one; what was owned goes first.
  Handle *out() {
    reset();
    return &handle_;
  }
  explicit operator bool() const { return handle_ != nullptr; }
  void reset() {
    if (handle_ != nullptr) Destroy(std::exchange(handle_, nullptr));
  }

 private:
  Handle handle_ = nullptr;
};

using OwnedStream = Owned<Stream, stream_destroy>;
using OwnedEvent = Owned<Event, event_destroy>;
using OwnedGraph = Owned<GraphExec, graph_destroy>;

template <void (*Free)(void *)>
class Memory {
 public:
  template <class T>
  T *as() const { return static_cast<T *>(memory_.get()); }
  void **out(size_t bytes) {
    bytes_ = bytes;
    return memory_.out();
  }
  size_t bytes() const { return memory_ ? bytes_ : 0; }
  void reset() { memory_.reset(); }
  explicit operator bool() const { return static_cast<bool>(memory_); }

 private:
  Owned<void *, Free> memory_;
  size_t bytes_ = 0;
};

struct DeviceMemory : Memory<device_free> {
  Status alloc(size_t bytes) { return device_alloc(bytes, out(bytes)); }
};
struct HostMemory : Memory<host_free> {
  Status alloc(size_t bytes) { return host_alloc(bytes, out(bytes)); }
};

}  // namespace ls::cuda
