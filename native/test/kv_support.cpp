#include "kv_support.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

namespace ls::test {

using namespace std::chrono_literals;

void wait_until(const char *what, const std::function<bool()> &done) {
  const auto deadline = std::chrono::steady_clock::now() + 30s;
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error(std::string("30 s are over: ") + what);
    std::this_thread::sleep_for(1ms);
  }
}

KvRig::KvRig(const Options &options, const KvOptions &kv) : Rig(options), host(kv.host ? kv.host : ""), layout(LS_KV_LAYOUT_BYTES) {
  ls_kv_config c = kv.config;
  c.struct_size = sizeof c;
  c.key_bytes = static_cast<uint32_t>(kv.key.size());
  const ByteVector digest(LS_KV_DIGEST_BYTES, kv.model);
  const int32_t code = ls_kv_start(engine, &c, digest.data(), kv.key.data(), kv.host);
  if (code < 0) throw std::runtime_error("ls_kv_start: " + last_error());
  port = static_cast<uint32_t>(code);
  CHECK_EQ(ls_kv_layout(engine, layout.data()), LS_OK);
}

uint64_t KvRig::prefill(const Tokens &tokens, uint32_t commit, uint32_t chunk) {
  const Opened seq = open(tokens);
  if (seq.code != LS_OK) throw std::runtime_error("open: " + last_error());
  CHECK_EQ(ls_kv_stage(engine, seq.slot, static_cast<uint32_t>(tokens.size() - 1)), LS_OK);
  if (chunk == 0) chunk = static_cast<uint32_t>(tokens.size());
  for (size_t at = seq.start; at < tokens.size(); at += chunk) compute(seq.slot, Tokens(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(std::min(tokens.size(), at + chunk))), static_cast<uint32_t>(at));
  uint32_t id[2];
  if (ls_kv_publish(engine, seq.slot, id) != LS_OK) throw std::runtime_error("publish: " + last_error());
  CHECK_EQ(close(seq.slot, commit), LS_OK);
  check();
  return static_cast<uint64_t>(id[1]) << 32 | id[0];
}

PullOpened KvRig::open_pull(const KvRig &from, uint64_t id, const Tokens &tokens, uint32_t at, uint64_t domain) {
  const ls_kv_source source{sizeof source, at ? at : from.port, static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32), LS_KV_LAYOUT_BYTES};
  int32_t out[4] = {-1, 0, 0, 0};
  const int32_t code = ls_seq_open_pull(engine, tokens.data(), static_cast<uint32_t>(tokens.size()), static_cast<uint32_t>(domain), static_cast<uint32_t>(domain >> 32), &source, from.host.c_str(),
                                        from.layout.data(), out);
  return {code, out[0], static_cast<uint32_t>(out[1]), static_cast<uint32_t>(out[2]), static_cast<uint32_t>(out[3])};
}

std::vector<KvEvent> KvRig::events() {
  std::vector<KvEvent> all = std::move(waiting_);
  waiting_.clear();
  std::vector<int32_t> words(200);
  for (;;) {
    const int32_t written = ls_kv_events(engine, words.data(), static_cast<uint32_t>(words.size()));
    if (written < 0) throw std::runtime_error("events: " + last_error());
    if (written == 0) return all;
    for (int32_t at = 0; at < written;) {
      const auto word = [&](int32_t i) { return static_cast<uint32_t>(words.at(static_cast<size_t>(at + i))); };
      const auto wide = [&](int32_t i) { return word(i) | static_cast<uint64_t>(word(i + 1)) << 32; };
      KvEvent e{static_cast<int32_t>(word(1)), static_cast<int32_t>(word(2)), wide(3), wide(5), {}};
      e.text.assign(reinterpret_cast<const char *>(words.data() + at + LS_KV_EVENT_WORDS), word(8));
      all.push_back(std::move(e));
      CHECK_EQ(word(0), LS_KV_EVENT_WORDS + (word(8) + 3) / 4);
      at += static_cast<int32_t>(word(0));
    }
  }
}

KvEvent KvRig::event() {
  wait_until("a transfer event", [&] {
    waiting_ = events();
    return !waiting_.empty();
  });
  KvEvent first = waiting_.front();
  waiting_.erase(waiting_.begin());
  return first;
}

ls_kv_stats_t KvRig::kv_stats() {
  ls_kv_stats_t s{};
  s.struct_size = sizeof s;
  CHECK_EQ(ls_kv_stats(engine, &s), LS_OK);
  return s;
}

void KvRig::expect_decode(int32_t slot, const Tokens &tokens) { compute(slot, tokens, static_cast<uint32_t>(tokens.size() - 1)); }

kv::Layout test_layout(uint32_t layers, uint64_t page_bytes) {
  kv::Layout l;
  l.model.fill(3);
  l.layers = layers;
  l.kv_heads = 2;
  l.head_dim = 64;
  l.page_tokens = LS_PAGE_TOKENS;
  l.dtype = LS_DTYPE_BF16;
  l.page_bytes = page_bytes;
  return l;
}

namespace {

sockaddr_in loopback(uint32_t port) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons(static_cast<uint16_t>(port));
  return a;
}

int listen_on_loopback(uint32_t &port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in a = loopback(0);
  socklen_t bytes = sizeof a;
  CHECK(fd >= 0 && ::bind(fd, reinterpret_cast<sockaddr *>(&a), bytes) == 0 && ::listen(fd, 64) == 0);
  CHECK(::getsockname(fd, reinterpret_cast<sockaddr *>(&a), &bytes) == 0);
  port = ntohs(a.sin_port);
  return fd;
}

bool readable(int fd, int ms) {
  pollfd p{fd, POLLIN, 0};
  return ::poll(&p, 1, ms) > 0;
}

}  // namespace

RawPeer::RawPeer(uint32_t port, const char *host) {
  kv::Address address;
  CHECK(kv::parse_address(host, port, address).ok());
  fd_ = ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(fd_ >= 0 && ::connect(fd_, reinterpret_cast<sockaddr *>(&address.storage), address.bytes) == 0);
}
RawPeer::~RawPeer() { ::close(fd_); }
void RawPeer::send(kv::Bytes bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (put <= 0) return;  // closed: what the test looks at next
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
}
ByteVector RawPeer::receive(size_t bytes) {
  ByteVector all(bytes);
  size_t have = 0;
  while (have < bytes) {
    if (!readable(fd_, 30'000)) throw std::runtime_error("30 s without a byte from the server");
    const ssize_t got = ::recv(fd_, all.data() + have, bytes - have, 0);
    if (got <= 0) break;
    have += static_cast<size_t>(got);
  }
  all.resize(have);
  return all;
}
void RawPeer::expect_closed() {
  while (!receive(4096).empty()) {
  }
}

Proxy::Proxy(uint32_t target, Fault fault) : target_(target), fault_(fault) {
  listener_ = listen_on_loopback(port_);
  accepting_ = std::thread([this] { accept_all(); });
}
Proxy::~Proxy() {
  stop_ = true;
  accepting_.join();
  for (std::thread &t : passing_) t.join();
  ::close(listener_);
}
void Proxy::accept_all() {
  while (!stop_)
    if (readable(listener_, 5)) passing_.emplace_back([this, fd = ::accept(listener_, nullptr, nullptr), first = passing_.empty()] { pass(fd, first ? fault_ : Fault{}); });
}

void Proxy::pass(int client, Fault fault) {
  const int server = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in a = loopback(target_);
  bool alive = ::connect(server, reinterpret_cast<const sockaddr *>(&a), sizeof a) == 0;
  ByteVector buffer(1 << 16);
  uint64_t seen = 0;
  const auto forward = [&](int from, int to, size_t most) {
    const ssize_t got = ::recv(from, buffer.data(), std::min(most, buffer.size()), 0);
    if (got <= 0) return alive = false;
    if (from == server) {
      if (fault.kind == Fault::flip && seen <= fault.at && fault.at < seen + static_cast<uint64_t>(got)) buffer[static_cast<size_t>(fault.at - seen)] ^= 0x10;
      seen += static_cast<uint64_t>(got);
      passed_ += static_cast<uint64_t>(got);
    }
    for (ssize_t put = 0; put < got && alive;) {
      const ssize_t n = ::send(to, buffer.data() + put, static_cast<size_t>(got - put), MSG_NOSIGNAL);
      if (n <= 0) alive = false;
      else put += n;
    }
    return alive;
  };
  while (alive && !stop_) {
    pollfd p[2] = {{client, POLLIN, 0}, {server, POLLIN, 0}};
    if (fault.kind == Fault::stall && seen >= fault.at) p[1].events = 0;
    if (::poll(p, 2, 5) <= 0) continue;
    if (p[0].revents) forward(client, server, buffer.size());
    if (!alive || !(p[1].revents & (POLLIN | POLLHUP)) || p[1].events == 0) continue;
    const bool slow = fault.kind == Fault::slow && seen < fault.at, cut = fault.kind == Fault::reset || fault.kind == Fault::stall;
    if (slow) std::this_thread::sleep_for(10ms);
    forward(server, client, slow ? 655 : cut ? std::max<uint64_t>(1, fault.at - seen) : buffer.size());
    if (fault.kind == Fault::reset && seen >= fault.at) {
      const linger hard{1, 0};
      ::setsockopt(client, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
      alive = false;
    }
  }
  ::close(client);
  ::close(server);
}

SilentListener::SilentListener() { fd_ = listen_on_loopback(port_); }
SilentListener::~SilentListener() { ::close(fd_); }

}  // namespace ls::test
