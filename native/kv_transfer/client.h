// Pulls of a decode worker, many at once, on a thread of its own. Each ends once, within its bounds; a pull that ends without having fetched
// tells the sender to drop the copy.
#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "pull_session.h"
#include "socket.h"

namespace ls::kv {

struct ClientOptions {
  std::chrono::milliseconds connect{5'000};      // until the connection stands
  std::chrono::milliseconds idle{10'000};        // without a byte
  std::chrono::milliseconds connection{60'000};  // all in all
  std::vector<uint8_t> key;  // empty = none
};

// Shared by who wants it and the thread that does it.
class Pull {
 public:
  Pull(Address from, PullRequest request, int32_t slot, uint64_t serial) : address_(from), request_(std::move(request)), slot_(slot), serial_(serial) {}
  const PullRequest &request() const { return request_; }
  const Address &address() const { return address_; }

 private:
  friend class Client;
  const Address address_;
  const PullRequest request_;
  const int32_t slot_;
  const uint64_t serial_;
  std::atomic<bool> cancelled_{false};
  std::mutex memory_;  // held while bytes land in the pages
};

class Client {
 public:
  Client(Endings &endings, ClientOptions options) : endings_(endings), options_(std::move(options)) {}
  ~Client();
  Client(const Client &) = delete;
  Client &operator=(const Client &) = delete;

  Status start();
  // An Ending with its slot and serial follows, unless it is cancelled.
  void pull(std::shared_ptr<Pull> pull);
  // When this returns, nothing is written to the pages any more. The sender is told to drop the copy.
  void cancel(Pull &pull);
  // Tells the sender to drop a copy. Best effort, within the bounds of a connection.
  void drop(const Address &from, uint64_t id);
  uint32_t active() const { return active_.load(std::memory_order_relaxed); }

 private:
  struct Job {
    std::shared_ptr<Pull> pull;  // null: a drop
    std::unique_ptr<Session> session;
    std::unique_ptr<Channel> channel;
    Socket socket;
    Clock::time_point begin, last_byte;
    bool connected = false;
    uint32_t events = EPOLLOUT;
    size_t low_water = 1;  // bytes that must wait in the socket before it counts as readable
  };
  struct Drop {
    Address from;
    uint64_t id = 0;
  };
  static constexpr size_t kMaxDrops = 1024, kMaxDropJobs = 32;

  Endings &endings_;
  const ClientOptions options_;
  Poller poller_;
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> active_{0};
  std::mutex mutex_;
  std::deque<std::shared_ptr<Pull>> new_pulls_;
  std::deque<Drop> new_drops_;
  std::unordered_map<uint64_t, std::unique_ptr<Job>> jobs_;
  size_t drop_jobs_ = 0;
  uint64_t serial_ = 0;
  std::thread thread_;

  void run();
  void take_new();
  void begin(std::unique_ptr<Job> job, const Address &to);
  bool serve(Job &job, uint64_t id, uint32_t ready);
  void end(Job &job, ls_kv_end reason, const std::string &text);
  void remove(uint64_t id);
  Clock::time_point sweep();
};

}  // namespace ls::kv
