// Copies of prompts' KV in host memory, on the worker that computed them: reserved, filled layer by layer, published under an id, and kept
// until fetched, dropped or too old.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "backend.h"
#include "layout.h"

namespace ls::kv {

using Clock = std::chrono::steady_clock;

// How a transfer ended, for events: on the prefill side of a staged copy, on the decode side of a pull.
struct Ending {
  int32_t slot = -1;    // of the pull; -1 for a staged copy
  uint64_t serial = 0;  // of the pull
  ls_kv_end reason = LS_KV_DONE;
  uint64_t id = 0, bytes = 0;
  uint32_t micros = 0;
  std::string text;
};

// Endings on their way to whoever polls. Bounded: the oldest are lost when nobody does.
class Endings {
 public:
  void add(Ending ending);
  // Takes the oldest, when `fits(it)`. False when there is none or it does not fit.
  bool take(Ending &out, const std::function<bool(const Ending &)> &fits);

 private:
  std::mutex mutex_;
  std::deque<Ending> all_;
};

struct StagingCounts {
  std::atomic<uint64_t> filling{0}, filling_bytes{0}, staged{0}, staged_bytes{0};
};

// One copy: [layer][page][page_bytes] in one mapping, and the sum of each page of each layer. Memory returns to the system with the object.
class Staged {
 public:
  static Status create(const Layout &layout, uint32_t tokens, std::shared_ptr<StagingCounts> counts, std::shared_ptr<Staged> &out);
  ~Staged();
  Staged(const Staged &) = delete;
  Staged &operator=(const Staged &) = delete;

  uint32_t tokens() const { return tokens_; }
  uint32_t pages() const { return pages_; }
  uint64_t bytes() const { return bytes_; }
  uint8_t *data(uint32_t layer, uint32_t page) const { return data_ + (size_t{layer} * pages_ + page) * page_bytes_; }
  uint32_t *sums(uint32_t layer, uint32_t page) { return sums_.data() + size_t{layer} * pages_ + page; }
  // Takes one layer's part of a page in, with its checksum.
  void fill(uint32_t layer, uint32_t page, const uint8_t *from);

  uint32_t planned = 0, copied = 0;    // leading pages that submitted steps fill, and that completed ones have filled; the engine's
  std::atomic<bool> abandoned{false};  // nobody will publish it: filling it further is of no use
  uint64_t content = 0;             // digest of its tokens, set when published

 private:
  friend class StagingStore;
  Staged() = default;
  std::shared_ptr<StagingCounts> counts_;
  uint32_t tokens_ = 0, pages_ = 0;
  uint64_t page_bytes_ = 0, bytes_ = 0;
  uint8_t *data_ = nullptr;
  std::vector<uint32_t> sums_;
  bool published_ = false;
};

// The first 8 bytes of SHA-256 over the token ids: says that both workers mean the same prompt.
uint64_t content_of(std::span<const int32_t> tokens);

// Published copies by id. Thread-safe. An id is valid for one claim; what became of recent ids is remembered.
class StagingStore {
 public:
  StagingStore(std::chrono::milliseconds hold, Endings &endings) : hold_(hold), endings_(endings), counts_(std::make_shared<StagingCounts>()) {}

  const StagingCounts &counts() const { return *counts_; }
  Status create(const Layout &layout, uint32_t tokens, std::shared_ptr<Staged> &out) { return Staged::create(layout, tokens, counts_, out); }
  // Under a fresh random id. The hold begins.
  Status publish(std::shared_ptr<Staged> staged, uint64_t content, uint64_t &id);
  // LS_KV_DONE with the copy, which from now on belongs to one transfer; else what became of the id.
  ls_kv_end claim(uint64_t id, std::shared_ptr<Staged> &out);
  // The claimed transfer is over. Idempotent.
  void finish(uint64_t id, ls_kv_end reason, uint64_t bytes, const std::string &text = {});
  // Drops a copy that waits, or marks one that is being sent, whose sender then stops. What became of an unknown id, else LS_KV_DROPPED.
  ls_kv_end drop(uint64_t id);
  bool drop_wanted(uint64_t id);
  // Drops what is too old; returns when to look again.
  Clock::time_point expire(Clock::time_point now);

 private:
  struct Entry {
    std::shared_ptr<Staged> staged;  // null while it is being sent
    Clock::time_point published;
    bool sending = false, drop = false;
  };
  const std::chrono::milliseconds hold_;
  Endings &endings_;
  std::shared_ptr<StagingCounts> counts_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, Entry> entries_;
  std::deque<std::pair<Clock::time_point, uint64_t>> deadlines_;  // rising, since all are held equally long
  std::unordered_map<uint64_t, ls_kv_end> past_;
  std::deque<uint64_t> past_order_;
  void end(std::unordered_map<uint64_t, Entry>::iterator it, ls_kv_end reason, uint64_t bytes, const std::string &text);
};

}  // namespace ls::kv
