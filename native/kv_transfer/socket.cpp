#include "socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ls::kv {
namespace {

std::string system_error(const std::string &what) { return what + ": " + std::strerror(errno); }

int tcp_socket(int family) { return ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

ssize_t Socket::read(iovec *segments, size_t count) {
  ssize_t got;
  do {
    got = ::readv(fd_, segments, static_cast<int>(count));
  } while (got < 0 && errno == EINTR);
  return got < 0 ? (errno == EWOULDBLOCK ? -EAGAIN : -errno) : got;
}

ssize_t Socket::write(iovec *segments, size_t count) {
  msghdr message{};
  message.msg_iov = segments;
  message.msg_iovlen = count;
  ssize_t put;
  do {
    put = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
  } while (put < 0 && errno == EINTR);
  return put < 0 ? (errno == EWOULDBLOCK ? -EAGAIN : -errno) : put;
}

Status parse_address(const char *host, uint32_t port, Address &out) {
  if (host == nullptr || *host == '\0') return Status::fail(LS_INVALID, "host is empty, expected a numeric IPv4 or IPv6 address");
  if (port > 65535) return Status::fail(LS_INVALID, "port is " + std::to_string(port) + ", expected 0..65535");
  std::string text(host, ::strnlen(host, 256));
  if (text.size() > 2 && text.front() == '[' && text.back() == ']') text = text.substr(1, text.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (text.size() > 100 || ::getaddrinfo(text.c_str(), std::to_string(port).c_str(), &hints, &found) != 0 || found == nullptr)
    return Status::fail(LS_INVALID, "host is \"" + text.substr(0, 100) + "\", expected a numeric IPv4 or IPv6 address");
  std::memcpy(&out.storage, found->ai_addr, found->ai_addrlen);
  out.bytes = found->ai_addrlen;
  ::freeaddrinfo(found);
  return Status::good();
}

Status listen_on(const Address &address, Socket &out, uint16_t &port) {
  Socket socket(tcp_socket(address.storage.ss_family));
  const int on = 1;
  if (socket.fd() < 0) return Status::fail(LS_IO, system_error("cannot make a transfer socket"));
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  // "::" takes IPv4 too, wherever the system allows it.
  const int off = 0;
  if (address.storage.ss_family == AF_INET6) ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (::bind(socket.fd(), reinterpret_cast<const sockaddr *>(&address.storage), address.bytes) != 0) return Status::fail(LS_IO, system_error("cannot bind the transfer listener"));
  if (::listen(socket.fd(), 512) != 0) return Status::fail(LS_IO, system_error("cannot listen for transfers"));
  sockaddr_storage bound{};
  socklen_t bytes = sizeof bound;
  if (::getsockname(socket.fd(), reinterpret_cast<sockaddr *>(&bound), &bytes) != 0) return Status::fail(LS_IO, system_error("cannot tell the transfer port"));
  port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6 &>(bound).sin6_port : reinterpret_cast<const sockaddr_in &>(bound).sin_port);
  out = std::move(socket);
  return Status::good();
}

int connect_to(const Address &address, Socket &out) {
  Socket socket(tcp_socket(address.storage.ss_family));
  if (socket.fd() < 0) return errno;
  const int on = 1;
  ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (::connect(socket.fd(), reinterpret_cast<const sockaddr *>(&address.storage), address.bytes) != 0 && errno != EINPROGRESS) return errno;
  out = std::move(socket);
  return 0;
}

int socket_error(int fd) {
  int error = 0;
  socklen_t bytes = sizeof error;
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 ? error : errno;
}

void wake_at(int fd, size_t bytes) {
  const int low = static_cast<int>(bytes);
  ::setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low);
}

Status Poller::create(Poller &out) {
  out.epoll_ = Socket(::epoll_create1(EPOLL_CLOEXEC));
  out.bell_ = Socket(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (out.epoll_.fd() < 0 || out.bell_.fd() < 0 || !out.add(out.bell_.fd(), EPOLLIN, kBell)) return Status::fail(LS_IO, system_error("cannot wait on transfer sockets"));
  return Status::good();
}

bool Poller::add(int fd, uint32_t events, uint64_t data) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  return ::epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void Poller::change(int fd, uint32_t events, uint64_t data) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  ::epoll_ctl(epoll_.fd(), EPOLL_CTL_MOD, fd, &event);
}

void Poller::ring() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(bell_.fd(), &one, sizeof one);
}

const std::vector<epoll_event> &Poller::wait(Clock::time_point until) {
  events_.resize(64);
  const auto now = Clock::now();
  const auto ms = until <= now ? 0 : std::min<int64_t>(1000, std::chrono::ceil<std::chrono::milliseconds>(std::min(until - now, Clock::duration(std::chrono::seconds(2)))).count());
  const int count = ::epoll_wait(epoll_.fd(), events_.data(), static_cast<int>(events_.size()), static_cast<int>(ms));
  events_.resize(static_cast<size_t>(std::max(count, 0)));
  for (const epoll_event &event : events_)
    if (event.data.u64 == kBell) {
      uint64_t rings;
      [[maybe_unused]] const ssize_t got = ::read(bell_.fd(), &rings, sizeof rings);
    }
  return events_;
}

}  // namespace ls::kv
