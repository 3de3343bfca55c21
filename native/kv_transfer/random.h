// Random bytes of the system's generator.
#pragma once
#include <sys/random.h>

#include <cerrno>
#include <cstdint>
#include <span>

#include "backend.h"

namespace ls::kv {

// LS_INTERNAL when the kernel refuses; never anything weaker instead.
inline Status random_bytes(std::span<uint8_t> out) {
  while (!out.empty()) {
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return Status::fail(LS_INTERNAL, "the system gives no random bytes (getrandom failed)");
    out = out.subspan(static_cast<size_t>(got));
  }
  return Status::good();
}

}  // namespace ls::kv
