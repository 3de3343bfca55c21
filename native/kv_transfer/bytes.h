// Little-endian numbers in byte buffers.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

namespace ls::kv {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian, and so is every machine this runs on");

template <class T>
void put(uint8_t *at, T value) {
  std::memcpy(at, &value, sizeof value);
}
template <class T>
T get(const uint8_t *at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace ls::kv
