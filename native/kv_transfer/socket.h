// Non-blocking TCP sockets, and the wait on many of them.
#pragma once
#include <sys/epoll.h>
#include <sys/socket.h>

#include <string>
#include <utility>
#include <vector>

#include "channel.h"
#include "staging.h"

namespace ls::kv {

// Closes with the object.
class Socket final : public Transport {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket &operator=(Socket &&other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() override;
  int fd() const { return fd_; }
  ssize_t read(iovec *segments, size_t count) override;
  ssize_t write(iovec *segments, size_t count) override;

 private:
  int fd_;
};

// A numeric IPv4 or IPv6 address (with a scope, where it has one) and a port. Names are not resolved: that could block.
struct Address {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
};
// LS_INVALID names host or port.
Status parse_address(const char *host, uint32_t port, Address &out);

// The listener and the port it got when `address` has port 0.
Status listen_on(const Address &address, Socket &out, uint16_t &port);
// A connection under way; readable errors come when it becomes writable. errno value, or 0.
int connect_to(const Address &address, Socket &out);
int socket_error(int fd);
// The socket counts as readable only when this many bytes wait in it, or when it is closed.
void wake_at(int fd, size_t bytes);

// Readiness of many sockets, and a bell that any thread may ring.
class Poller {
 public:
  static Status create(Poller &out);
  // data is given back by wait(); the bell has data kBell.
  static constexpr uint64_t kBell = ~uint64_t{0};
  bool add(int fd, uint32_t events, uint64_t data);
  void change(int fd, uint32_t events, uint64_t data);
  void ring();
  // Until something is ready or `until`; at most a second.
  const std::vector<epoll_event> &wait(Clock::time_point until);

 private:
  Socket epoll_, bell_;
  std::vector<epoll_event> events_;
};

}  // namespace ls::kv
