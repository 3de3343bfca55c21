// How step_bench tells results, and the plain copies that it compares with.
#pragma once
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "../memory.h"
#include "layerscale.h"

namespace ls::bench {

using Clock = std::chrono::steady_clock;
inline double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

[[noreturn]] inline void fail(const char *what) {
  char text[4096];
  ls_last_error(text, sizeof text);
  std::fprintf(stderr, "%s: %s\n", what, text);
  std::exit(1);
}
inline int32_t must(int32_t code, const char *what) {
  if (code < 0) fail(what);
  return code;
}
inline void must(const ls::Status &status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.text.c_str());
  std::exit(1);
}

// A line of results; `amount` is what one repetition moves or computes.
inline void tell(const char *name, std::vector<double> seconds, const char *unit, double amount, const std::string &more = "") {
  std::sort(seconds.begin(), seconds.end());
  std::printf("{\"name\":\"%s\",\"seconds\":%.7f,\"least\":%.7f,\"most\":%.7f,\"repetitions\":%zu,\"%s\":%.0f%s}\n", name, seconds[seconds.size() / 2], seconds.front(), seconds.back(), seconds.size(), unit, amount,
              more.c_str());
  std::fflush(stdout);
}

// From one place in the GPU's memory to another: what its memory can do at all. Bytes are read and written.
inline void memory_copy(uint32_t device, size_t bytes) {
  ls::cuda::DeviceMemory from, to;
  ls::cuda::OwnedStream stream;
  must(ls::cuda::use_device(static_cast<int>(device)));
  must(from.alloc(bytes)), must(to.alloc(bytes)), must(ls::cuda::stream_create(stream.out()));
  must(ls::cuda::fill_async(from.as<void>(), 0x5a, bytes, stream.get()));
  std::vector<double> seconds;
  for (int i = 0; i < 12; ++i) {
    must(ls::cuda::stream_sync(stream.get()));
    const auto begin = Clock::now();
    must(ls::cuda::copy_async(to.as<void>(), from.as<void>(), bytes, stream.get()));
    must(ls::cuda::stream_sync(stream.get()));
    if (i > 1) seconds.push_back(seconds_since(begin));
  }
  tell("memory_copy", seconds, "bytes", 2.0 * static_cast<double>(bytes));
}

// One connection on loopback, 1 MiB a call on both sides, connecting included.
inline double tcp_copy(const std::vector<uint8_t> &from, std::vector<uint8_t> &to) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0), client = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET, address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto *const name = reinterpret_cast<sockaddr *>(&address);
  if (listener < 0 || client < 0 || ::bind(listener, name, length) != 0 || ::listen(listener, 1) != 0 || ::getsockname(listener, name, &length) != 0) fail("no loopback");
  const auto begin = Clock::now();
  std::thread sender([&] {
    pollfd ready{listener, POLLIN, 0};
    const int fd = ::poll(&ready, 1, 10'000) == 1 ? ::accept(listener, nullptr, nullptr) : -1;
    if (fd < 0) fail("accept");
    for (size_t at = 0; at < from.size();) {
      const ssize_t put = ::send(fd, from.data() + at, std::min<size_t>(1 << 20, from.size() - at), MSG_NOSIGNAL);
      if (put <= 0) fail("send");
      at += static_cast<size_t>(put);
    }
    ::close(fd);
  });
  if (::connect(client, name, length) != 0) fail("connect");
  for (size_t at = 0; at < to.size();) {
    const ssize_t got = ::recv(client, to.data() + at, std::min<size_t>(1 << 20, to.size() - at), 0);
    if (got <= 0) fail("recv");
    at += static_cast<size_t>(got);
  }
  const double seconds = seconds_since(begin);
  sender.join();
  ::close(client), ::close(listener);
  return seconds;
}

}  // namespace ls::bench
