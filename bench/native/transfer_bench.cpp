// KV over loopback against a plain TCP copy of the same bytes, in turns in one run. Prints one JSON line per size:
//   {"tokens":…,"bytes":…,"transfer_gbps":…,"tcp_gbps":…,"ratio":…,"keyed_gbps":…}   GB/s of 10^9 bytes, medians
//   transfer_bench [layers kv_heads head_dim dtype_bytes] [rounds]       default 32 8 128 2: an 8B model with a bf16 cache
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kv_transfer/client.h"
#include "kv_transfer/server.h"

namespace {

using namespace ls::kv;

[[noreturn]] void die(const char *what) {
  std::fprintf(stderr, "error: %s\n", what);
  std::exit(1);
}
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }
double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

Address loopback(uint16_t port) {
  Address address;
  if (!parse_address("127.0.0.1", port, address).ok()) die("no loopback");
  return address;
}

// send and recv of whole buffers in 1 MiB pieces, connection included.
double tcp_copy(const uint8_t *from, uint8_t *to, size_t bytes) {
  Socket listener;
  uint16_t port;
  if (!listen_on(loopback(0), listener, port).ok()) die("listen");
  const auto begin = Clock::now();
  std::thread sender([&] {
    pollfd ready{listener.fd(), POLLIN, 0};
    if (::poll(&ready, 1, 10'000) != 1) die("poll");
    const int fd = ::accept(listener.fd(), nullptr, nullptr);
    if (fd < 0) die("accept");
    for (size_t at = 0; at < bytes;) {
      const ssize_t put = ::send(fd, from + at, std::min<size_t>(1 << 20, bytes - at), MSG_NOSIGNAL);
      if (put <= 0) die("send");
      at += static_cast<size_t>(put);
    }
    ::close(fd);
  });
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  const Address address = loopback(port);
  if (::connect(fd, reinterpret_cast<const sockaddr *>(&address.storage), address.bytes) != 0) die("connect");
  for (size_t at = 0; at < bytes;) {
    const ssize_t got = ::recv(fd, to + at, std::min<size_t>(1 << 20, bytes - at), 0);
    if (got <= 0) die("recv");
    at += static_cast<size_t>(got);
  }
  const double seconds = seconds_since(begin);
  sender.join();
  ::close(fd);
  return seconds;
}

struct Ends {
  Layout layout;
  Endings sent, pulled;
  StagingStore store{std::chrono::seconds(60), sent};
  Server server;
  Client client;
  Ends(const Layout &l, std::vector<uint8_t> key)
      : layout(l), server(layout, store, {std::chrono::seconds(10), std::chrono::seconds(60), 256, key}), client(pulled, {std::chrono::seconds(5), std::chrono::seconds(10), std::chrono::seconds(60), key}) {
    if (!server.start(loopback(0)).ok() || !client.start().ok()) die("start");
  }

  double transfer(const uint8_t *from, uint8_t *to, uint32_t tokens) {
    std::shared_ptr<Staged> staged;
    if (!store.create(layout, tokens, staged).ok()) die("stage");
    const uint32_t pages = staged->pages();
    for (uint32_t layer = 0; layer < layout.layers; ++layer)
      for (uint32_t page = 0; page < pages; ++page) staged->fill(layer, page, from + (size_t{layer} * pages + page) * layout.page_bytes);
    uint64_t id;
    if (!store.publish(std::move(staged), 1, id).ok()) die("publish");
    PullRequest request{id, 0, tokens, 1, layout, {}};
    // Pages in another order than in the copy, as a pool has them.
    request.page = [=, bytes = layout.page_bytes](uint32_t layer, uint32_t index) { return to + (size_t{layer} * pages + (pages - 1 - index)) * bytes; };
    const auto begin = Clock::now();
    client.pull(std::make_shared<Pull>(loopback(server.port()), std::move(request), 0, 1));
    Ending ending;
    while (!pulled.take(ending, [](const Ending &) { return true; })) ::usleep(20);
    const double seconds = seconds_since(begin);
    if (ending.reason != LS_KV_DONE) die(ending.text.c_str());
    return seconds;
  }
};

}  // namespace

int main(int argc, char **argv) {
  const auto number = [&](int i, uint32_t otherwise) { return argc > i ? static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10)) : otherwise; };
  Layout layout;
  layout.layers = number(1, 32);
  layout.page_tokens = LS_PAGE_TOKENS;
  layout.page_bytes = uint64_t{2} * LS_PAGE_TOKENS * number(2, 8) * number(3, 128) * number(4, 2);
  const uint32_t rounds = number(5, 7);
  const size_t most = size_t{4096 / LS_PAGE_TOKENS} * layout.layers * layout.page_bytes;
  const auto memory = [&] {
    void *m = ::mmap(nullptr, most, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (m == MAP_FAILED) die("memory");
    return static_cast<uint8_t *>(m);
  };
  uint8_t *const from = memory(), *const to = memory();
  for (size_t i = 0; i < most; ++i) from[i] = static_cast<uint8_t>(i * 2654435761u >> 24);
  Ends plain(layout, {}), keyed(layout, std::vector<uint8_t>(32, 7));
  for (const uint32_t tokens : {128u, 1024u, 4096u}) {
    const size_t bytes = size_t{tokens / LS_PAGE_TOKENS} * layout.layers * layout.page_bytes;
    std::vector<double> transfers, copies, ciphers;
    for (uint32_t round = 0; round < rounds; ++round) {
      copies.push_back(tcp_copy(from, to, bytes));
      transfers.push_back(plain.transfer(from, to, tokens));
      if (round < 3) ciphers.push_back(keyed.transfer(from, to, tokens));
    }
    const auto speed = [&](const std::vector<double> &times) { return static_cast<double>(bytes) / median(times) / 1e9; };
    std::printf("{\"tokens\":%u,\"bytes\":%zu,\"transfer_gbps\":%.2f,\"tcp_gbps\":%.2f,\"ratio\":%.2f,\"keyed_gbps\":%.2f}\n", tokens, bytes, speed(transfers), speed(copies), speed(transfers) / speed(copies),
                speed(ciphers));
    std::fflush(stdout);
  }
}
