#include "server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>

namespace ls::kv {
namespace {

constexpr size_t kBudget = 4 << 20;  // bytes moved for one connection before the next has its turn
constexpr std::chrono::milliseconds kAcceptPause{100}, kLinger{2'000};

}  // namespace

Server::~Server() {
  stop_ = true;
  poller_.ring();
  if (thread_.joinable()) thread_.join();
}

Status Server::start(const Address &address) {
  if (Status status = Poller::create(poller_); !status.ok()) return status;
  if (Status status = listen_on(address, listener_, port_); !status.ok()) return status;
  if (!poller_.add(listener_.fd(), EPOLLIN, kListener)) return Status::fail(LS_IO, "cannot wait on the transfer listener");
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "ls-kv-send");
  return Status::good();
}

void Server::run() {
  while (!stop_) {
    for (const epoll_event &event : poller_.wait(sweep())) {
      if (event.data.u64 == Poller::kBell) continue;
      if (event.data.u64 == kListener) {
        accept_all();
        continue;
      }
      const auto it = connections_.find(event.data.u64);
      if (it != connections_.end() && !serve(*it->second, it->first, event.events)) close(it->first);
    }
  }
  connections_.clear();
}

void Server::accept_all() {
  // A bounded number at a time, so that a flood of connections does not starve those that are served.
  for (int i = 0; i < 64; ++i) {
    Socket socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.fd() < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        accept_again_ = Clock::now() + kAcceptPause;
        poller_.change(listener_.fd(), 0, kListener);
      }
      return;
    }
    if (connections_.size() >= options_.max_connections) make_room();
    if (connections_.size() >= options_.max_connections) {
      ++turned_away_;
      continue;
    }
    const int on = 1;
    ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    auto connection = std::make_unique<Connection>();
    connection->session = std::make_unique<SendSession>(store_, layout_);
    connection->channel = make_channel(*connection->session, Side::server, options_.key);
    connection->begin = Clock::now();
    connection->socket = std::move(socket);
    const uint64_t id = ++serial_;
    if (!poller_.add(connection->socket.fd(), EPOLLIN, id)) continue;
    connections_.emplace(id, std::move(connection));
    connections_count_ = static_cast<uint32_t>(connections_.size());
  }
}

// The oldest connection without a valid request goes: holding connections open shuts nobody out.
void Server::make_room() {
  uint64_t oldest = 0;
  for (const auto &[id, connection] : connections_)
    if (connection->session->sending_id() == 0 && (oldest == 0 || id < oldest)) oldest = id;
  if (oldest == 0) return;
  ++turned_away_;
  close(oldest);
}

bool Server::serve(Connection &c, uint64_t id, uint32_t ready) {
  Channel &channel = *c.channel;
  if (ready & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) {
    switch (channel.receive(c.socket, kBudget)) {
      case Flow::closed: return false;
      case Flow::failed:
        // Says why, if it has something to say, and ends.
        channel.send(c.socket, kBudget);
        c.session->closed(LS_KV_RESET, channel.failure().text);
        return false;
      default: break;
    }
  }
  if (channel.sending() && channel.send(c.socket, kBudget) == Flow::closed) return false;
  if (channel.finished() && !c.lingering) {
    c.lingering = true;
    c.begin = Clock::now();
    ::shutdown(c.socket.fd(), SHUT_WR);
  }
  const uint32_t wanted = EPOLLIN | (channel.sending() ? EPOLLOUT : 0u);
  if (wanted != c.events) poller_.change(c.socket.fd(), c.events = wanted, id);
  return true;
}

void Server::close(uint64_t id) {
  connections_.erase(id);
  connections_count_ = static_cast<uint32_t>(connections_.size());
}

// Ends what is over its time; returns when to look again.
Clock::time_point Server::sweep() {
  const auto now = Clock::now();
  Clock::time_point next = store_.expire(now);
  if (accept_again_ != Clock::time_point{}) {
    if (now >= accept_again_) {
      accept_again_ = {};
      poller_.change(listener_.fd(), EPOLLIN, kListener);
    } else {
      next = std::min(next, accept_again_);
    }
  }
  for (auto it = connections_.begin(); it != connections_.end();) {
    Connection &c = *it->second;
    const uint64_t sending = c.session->sending_id();
    const auto deadline = c.begin + (c.lingering ? kLinger : c.session->requested() ? options_.connection : std::min(options_.request, options_.connection));
    const bool late = now >= deadline;
    if (late || (sending != 0 && store_.drop_wanted(sending))) {
      c.session->closed(late ? LS_KV_TIMEOUT : LS_KV_DROPPED, late ? "the connection reached its longest time" : "");
      it = connections_.erase(it);
      continue;
    }
    next = std::min(next, deadline);
    ++it;
  }
  connections_count_ = static_cast<uint32_t>(connections_.size());
  return next;
}

}  // namespace ls::kv
