// What the transfer tests share: an engine that stages and pulls in a few words, raw connections, and a proxy that spoils what passes.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "harness.h"
#include "kv_transfer/client.h"
#include "kv_transfer/server.h"

namespace ls::test {

using ByteVector = std::vector<uint8_t>;

// Polls until `done()`; throws with `what` after 30 s.
void wait_until(const char *what, const std::function<bool()> &done);

struct KvEvent {
  int32_t slot = -1;
  int32_t reason = -1;
  uint64_t id = 0, bytes = 0;
  std::string text;
};
struct KvOptions {
  ls_kv_config config{};
  const char *host = "127.0.0.1";
  uint8_t model = 1;  // every byte of the model's digest
  ByteVector key;
};
struct PullOpened {
  int32_t code = 0, slot = -1;
  uint32_t cached = 0, start = 0, pages = 0;
};

// An engine with transfers on.
class KvRig : public Rig {
 public:
  explicit KvRig(const Options &options = {}, const KvOptions &kv = {});
  uint32_t port = 0;
  std::string host;
  ByteVector layout;

  // Computes a prompt, stages its positions [0, n-1), closes the sequence. Returns the id. `chunk`: tokens per step, 0 = as many as fit.
  uint64_t prefill(const Tokens &tokens, uint32_t commit = 0, uint32_t chunk = 0);
  PullOpened open_pull(const KvRig &from, uint64_t id, const Tokens &tokens, uint32_t port = 0, uint64_t domain = 0);
  // The next event; waits for it.
  KvEvent event();
  std::vector<KvEvent> events();
  ls_kv_stats_t kv_stats();
  uint64_t staged_bytes() {
    const ls_kv_stats_t s = kv_stats();
    return s.staged_bytes_lo | static_cast<uint64_t>(s.staged_bytes_hi) << 32;
  }
  // Computes the last token of a pulled prompt: it must be what the whole prompt gives.
  void expect_decode(int32_t slot, const Tokens &tokens);

 private:
  std::vector<KvEvent> waiting_;
};

// A layout and a memory without an engine.
kv::Layout test_layout(uint32_t layers = 3, uint64_t page_bytes = 4096);

// A blocking connection that says what the test wants.
class RawPeer {
 public:
  explicit RawPeer(uint32_t port, const char *host = "127.0.0.1");
  ~RawPeer();
  RawPeer(const RawPeer &) = delete;
  RawPeer &operator=(const RawPeer &) = delete;
  void send(kv::Bytes bytes);
  // Up to `bytes`, less when the peer closed. Throws when nothing comes for 30 s.
  ByteVector receive(size_t bytes);
  // The peer closed or reset the connection, within 30 s; whatever it sent before is skipped.
  void expect_closed();
  int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

// Listens on a port of its own and passes connections on to `target`, with one fault in what the target sends on
// the first of them.
class Proxy {
 public:
  struct Fault {
    enum Kind { none, flip, reset, stall, slow } kind = none;
    uint64_t at = 0;  // bytes from the target that pass unharmed; slow: bytes that pass at 64 KiB/s
  };
  Proxy(uint32_t target, Fault fault);
  ~Proxy();
  Proxy(const Proxy &) = delete;
  Proxy &operator=(const Proxy &) = delete;
  uint32_t port() const { return port_; }
  uint64_t passed() const { return passed_; }

 private:
  int listener_ = -1;
  uint32_t port_ = 0, target_;
  Fault fault_;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> passed_{0};
  std::thread accepting_;
  std::vector<std::thread> passing_;
  void accept_all();
  void pass(int from, Fault fault);
};

// Listens and never says a word.
class SilentListener {
 public:
  SilentListener();
  ~SilentListener();
  SilentListener(const SilentListener &) = delete;
  SilentListener &operator=(const SilentListener &) = delete;
  uint32_t port() const { return port_; }

 private:
  int fd_ = -1;
  uint32_t port_ = 0;
};

}  // namespace ls::test
