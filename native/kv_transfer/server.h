// The listener of a prefill worker, on a thread of its own. Whoever connects gets a small fixed buffer and a deadline, and memory only through
// a valid id.
#pragma once
#include <atomic>
#include <memory>
#include <thread>
#include <unordered_map>

#include "send_session.h"
#include "socket.h"

namespace ls::kv {

struct ServerOptions {
  std::chrono::milliseconds request{10'000};     // from the connection to a complete request
  std::chrono::milliseconds connection{60'000};  // longest life of a connection
  uint32_t max_connections = 256;
  std::vector<uint8_t> key;  // empty = none
};

class Server {
 public:
  Server(const Layout &layout, StagingStore &store, ServerOptions options) : layout_(layout), store_(store), options_(std::move(options)) {}
  ~Server();
  Server(const Server &) = delete;
  Server &operator=(const Server &) = delete;

  // Listens and starts the thread.
  Status start(const Address &address);
  uint16_t port() const { return port_; }
  // Something changed in the store that its deadlines do not tell.
  void wake() { poller_.ring(); }
  uint32_t connections() const { return connections_count_.load(std::memory_order_relaxed); }
  // Connections closed to make room for others.
  uint64_t turned_away() const { return turned_away_.load(std::memory_order_relaxed); }

 private:
  struct Connection {
    Socket socket;
    std::unique_ptr<SendSession> session;
    std::unique_ptr<Channel> channel;
    Clock::time_point begin;  // of the connection, or of lingering
    uint32_t events = EPOLLIN;
    bool lingering = false;  // all is said; waits for the peer to close, so that the last words are not lost
  };
  static constexpr uint64_t kListener = Poller::kBell - 1;

  const Layout layout_;
  StagingStore &store_;
  const ServerOptions options_;
  Socket listener_;
  Poller poller_;
  uint16_t port_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> connections_count_{0};
  std::atomic<uint64_t> turned_away_{0};
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  uint64_t serial_ = 0;
  Clock::time_point accept_again_{};  // not the epoch: accepting pauses, the process is out of descriptors
  std::thread thread_;

  void run();
  void accept_all();
  void make_room();
  // False: to be closed.
  bool serve(Connection &connection, uint64_t id, uint32_t ready);
  void close(uint64_t id);
  Clock::time_point sweep();
};

}  // namespace ls::kv
