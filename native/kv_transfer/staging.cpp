#include "staging.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "bytes.h"
#include "page_sum.h"
#include "random.h"

namespace ls::kv {
namespace {

constexpr size_t kMaxEndings = 1 << 14, kMaxPast = 1 << 13;

uint32_t micros_since(Clock::time_point begin) {
  const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin).count();
  return static_cast<uint32_t>(std::clamp<int64_t>(micros, 0, INT32_MAX));
}

}  // namespace

void Endings::add(Ending ending) {
  const std::lock_guard lock(mutex_);
  if (all_.size() == kMaxEndings) all_.pop_front();
  all_.push_back(std::move(ending));
}

bool Endings::take(Ending &out, const std::function<bool(const Ending &)> &fits) {
  const std::lock_guard lock(mutex_);
  if (all_.empty() || !fits(all_.front())) return false;
  out = std::move(all_.front());
  all_.pop_front();
  return true;
}

Status Staged::create(const Layout &layout, uint32_t tokens, std::shared_ptr<StagingCounts> counts, std::shared_ptr<Staged> &out) {
  std::shared_ptr<Staged> staged(new Staged);
  staged->tokens_ = tokens;
  staged->pages_ = (tokens + layout.page_tokens - 1) / layout.page_tokens;
  staged->page_bytes_ = layout.page_bytes;
  uint64_t bytes;
  if (__builtin_mul_overflow(uint64_t{staged->pages_} * layout.layers, layout.page_bytes, &bytes)) return Status::fail(LS_NO_MEMORY, "the copy does not fit the address space");
  if (bytes > 0) {
    void *mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return Status::fail(LS_NO_MEMORY, "no host memory to stage " + std::to_string(bytes) + " bytes of KV");
    ::madvise(mapped, bytes, MADV_HUGEPAGE);  // fewer page faults; nothing depends on it
    staged->data_ = static_cast<uint8_t *>(mapped);
    staged->bytes_ = bytes;
  }
  staged->sums_.resize(size_t{staged->pages_} * layout.layers);
  staged->counts_ = std::move(counts);
  ++staged->counts_->filling;
  staged->counts_->filling_bytes += bytes;
  out = std::move(staged);
  return Status::good();
}

Staged::~Staged() {
  if (data_) ::munmap(data_, bytes_);
  if (!counts_) return;
  (published_ ? counts_->staged_bytes : counts_->filling_bytes) -= bytes_;
  --(published_ ? counts_->staged : counts_->filling);
}

void Staged::fill(uint32_t layer, uint32_t page, const uint8_t *from) {
  uint8_t *to = data(layer, page);
  std::memcpy(to, from, page_bytes_);
  *sums(layer, page) = page_sum(to, page_bytes_);
}

uint64_t content_of(std::span<const int32_t> tokens) {
  const Digest digest = sha256({reinterpret_cast<const uint8_t *>(tokens.data()), tokens.size_bytes()});
  return get<uint64_t>(digest.data());
}

Status StagingStore::publish(std::shared_ptr<Staged> staged, uint64_t content, uint64_t &id) {
  const std::lock_guard lock(mutex_);
  do {
    uint8_t bytes[8];
    if (Status status = random_bytes(bytes); !status.ok()) return status;
    id = get<uint64_t>(bytes);
  } while (id == 0 || entries_.contains(id) || past_.contains(id));
  staged->content = content;
  const auto now = Clock::now();
  deadlines_.emplace_back(now + hold_, id);
  ++counts_->staged;
  counts_->staged_bytes += staged->bytes_;
  --counts_->filling;
  counts_->filling_bytes -= staged->bytes_;
  staged->published_ = true;
  entries_.emplace(id, Entry{std::move(staged), now, false, false});
  return Status::good();
}

ls_kv_end StagingStore::claim(uint64_t id, std::shared_ptr<Staged> &out) {
  const std::lock_guard lock(mutex_);
  const auto it = entries_.find(id);
  if (it == entries_.end()) {
    const auto past = past_.find(id);
    return past == past_.end() ? LS_KV_UNKNOWN : past->second;
  }
  if (it->second.sending) return LS_KV_USED;
  if (Clock::now() >= it->second.published + hold_) {
    end(it, LS_KV_EXPIRED, 0, {});
    return LS_KV_EXPIRED;
  }
  it->second.sending = true;
  out = std::move(it->second.staged);
  return LS_KV_DONE;
}

void StagingStore::finish(uint64_t id, ls_kv_end reason, uint64_t bytes, const std::string &text) {
  const std::lock_guard lock(mutex_);
  const auto it = entries_.find(id);
  if (it != entries_.end() && it->second.sending) end(it, it->second.drop && reason != LS_KV_DONE ? LS_KV_DROPPED : reason, bytes, text);
}

ls_kv_end StagingStore::drop(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto it = entries_.find(id);
  if (it == entries_.end()) {
    const auto past = past_.find(id);
    return past == past_.end() ? LS_KV_UNKNOWN : past->second;
  }
  if (it->second.sending) it->second.drop = true;
  else end(it, LS_KV_DROPPED, 0, {});
  return LS_KV_DROPPED;
}

bool StagingStore::drop_wanted(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto it = entries_.find(id);
  return it != entries_.end() && it->second.drop;
}

Clock::time_point StagingStore::expire(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  for (; !deadlines_.empty() && deadlines_.front().first <= now; deadlines_.pop_front()) {
    const auto it = entries_.find(deadlines_.front().second);
    // One that is being sent ends with its connection, which is bounded, too.
    if (it != entries_.end() && !it->second.sending) end(it, LS_KV_EXPIRED, 0, {});
  }
  return deadlines_.empty() ? Clock::time_point::max() : deadlines_.front().first;
}

void StagingStore::end(std::unordered_map<uint64_t, Entry>::iterator it, ls_kv_end reason, uint64_t bytes, const std::string &text) {
  const uint64_t id = it->first;
  endings_.add({-1, 0, reason, id, bytes, micros_since(it->second.published), text});
  entries_.erase(it);
  // Whoever asks again is told: expired and dropped by their names, everything else was used.
  past_.emplace(id, reason == LS_KV_EXPIRED || reason == LS_KV_DROPPED ? reason : LS_KV_USED);
  past_order_.push_back(id);
  if (past_order_.size() > kMaxPast) {
    past_.erase(past_order_.front());
    past_order_.pop_front();
  }
}

}  // namespace ls::kv
