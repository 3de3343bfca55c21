#include "engine.h"

#include <algorithm>
#include <random>

#include "config.h"

namespace ls {
namespace {

constexpr uint32_t kMaxPages = 1u << 24;

Status invalid(std::string text) { return Status::fail(LS_INVALID, std::move(text)); }

uint64_t random_seed() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

}  // namespace

Engine::Engine(const ls_config &config, std::unique_ptr<Backend> backend)
    : config_(config), weights_(config), backend_(std::move(backend)), kv_scales_(kv_dtype_scaled(config.kv_dtype) ? size_t{2} * config.layers : 0, 1.0f) {}

Status Engine::require(Phase phase, const char *call) const {
  if (!failure_.empty()) return Status::fail(LS_STATE, std::string(call) + ": the device failed: " + failure_);
  if (phase_ == phase) return Status::good();
  constexpr const char *kDone[] = {"before ls_weights_finish", "after ls_weights_finish and before ls_pool_create", "after ls_pool_create"};
  return Status::fail(LS_STATE, std::string(call) + " is called " + kDone[static_cast<int>(phase)] + " only; this engine is " + kDone[static_cast<int>(phase_)]);
}

// From here on nothing runs; the steps that are submitted are forgotten.
Status Engine::fail_device(int32_t code, const std::string &text) {
  failure_ = text.empty() ? "no reason given" : text;
  pending_steps_ = 0;
  return Status::fail(code, failure_);
}

Status Engine::map_weights(const char *path, uint64_t expected_bytes, uint32_t &file) {
  const std::lock_guard lock(mutex_);
  if (Status status = require(Phase::loading, "ls_weights_map"); !status.ok()) return status;
  return weights_.map(path, expected_bytes, file);
}

Status Engine::set_tensor(uint32_t id, uint32_t file, uint64_t offset, uint64_t bytes, uint32_t dtype, uint32_t rows, uint32_t cols) {
  const std::lock_guard lock(mutex_);
  if (Status status = require(Phase::loading, "ls_weights_set"); !status.ok()) return status;
  return weights_.set(*backend_, id, file, offset, bytes, dtype, rows, cols);
}

Status Engine::set_kv_scales(const float *scales, uint32_t layers) {
  const std::lock_guard lock(mutex_);
  if (Status status = require(Phase::loading, "ls_kv_scales"); !status.ok()) return status;
  if (Status status = check_kv_scales(config_, scales, layers); !status.ok()) return status;
  std::vector<float> copy(scales, scales + size_t{2} * layers);
  if (Status status = backend_->set_kv_scales(copy.data()); !status.ok()) return status;
  kv_scales_ = std::move(copy);
  return Status::good();
}

Status Engine::finish_weights() {
  {
    const std::lock_guard lock(mutex_);
    if (Status status = require(Phase::loading, "ls_weights_finish"); !status.ok()) return status;
    if (Status status = weights_.complete(); !status.ok()) return status;
  }
  // Without the lock: it takes seconds, and ls_pool_stats must answer meanwhile.
  Status status = guard_device("loading weights", [&] { return backend_->finish_weights(load_permille_); });
  const std::lock_guard lock(mutex_);
  if (!status.ok()) return fail_device(status.code, status.text);
  load_permille_.store(1000, std::memory_order_relaxed);
  phase_ = Phase::loaded;
  return Status::good();
}

Status Engine::memory(ls_memory_t &out) {
  const std::lock_guard lock(mutex_);
  if (Status status = require(Phase::loaded, "ls_memory"); !status.ok()) return status;
  out = {};
  out.struct_size = sizeof out;
  return guard_device("asking for memory", [&] { return backend_->memory(out); });
}

Status Engine::create_pool(uint32_t pages) {
  const std::lock_guard lock(mutex_);
  if (Status status = require(Phase::loaded, "ls_pool_create"); !status.ok()) return status;
  if (pages < 1 || pages > kMaxPages) return invalid("pages is " + std::to_string(pages) + ", expected 1.." + std::to_string(kMaxPages));
  pool_.emplace(pages);
  cache_.emplace(*pool_, random_seed());
  slots_.assign(config_.max_seqs, Sequence{});
  free_slots_.clear();
  copies_.reserve(config_.max_seqs);
  gated_.reserve(config_.max_seqs);
  for (uint32_t slot = config_.max_seqs; slot > 0; --slot) free_slots_.push_back(static_cast<int32_t>(slot - 1));
  if (Status status = guard_device("reserving KV pages", [&] { return backend_->create_pool(pages); }); !status.ok()) {
    cache_.reset();
    pool_.reset();
    return status;
  }
  phase_ = Phase::serving;
  return Status::good();
}

void Engine::stats(ls_pool_stats_t &out) {
  const std::lock_guard lock(mutex_);
  out = {};
  out.struct_size = sizeof out;
  if (phase_ != Phase::serving) return;
  out.total = pool_->total();
  out.free = pool_->free_count();
  out.cached = pool_->cached_count();
  out.held = pool_->held_count();
  out.open_seqs = static_cast<uint32_t>(slots_.size() - free_slots_.size());
  out.evictions_lo = static_cast<uint32_t>(cache_->evictions());
  out.evictions_hi = static_cast<uint32_t>(cache_->evictions() >> 32);
}

Engine::Sequence *Engine::find_open(int32_t slot) {
  if (slot < 0 || static_cast<size_t>(slot) >= slots_.size()) return nullptr;
  Sequence &sequence = slots_[static_cast<size_t>(slot)];
  return sequence.open ? &sequence : nullptr;
}

Status Engine::check_prompt(const char *call, const int32_t *tokens, uint32_t count, const int32_t *out) const {
  if (Status status = require(Phase::serving, call); !status.ok()) return status;
  if (tokens == nullptr || out == nullptr) return invalid("tokens or out is NULL");
  if (count < 1 || count > config_.max_context) return invalid("count is " + std::to_string(count) + ", expected 1.." + std::to_string(config_.max_context) + " (max_context)");
  for (uint32_t i = 0; i < count; ++i)
    if (tokens[i] < 0 || static_cast<uint32_t>(tokens[i]) >= config_.vocab)
      return invalid("token " + std::to_string(i) + " is " + std::to_string(tokens[i]) + ", expected 0.." + std::to_string(config_.vocab - 1));
  if (free_slots_.empty()) return Status::fail(LS_NO_SLOTS, "all " + std::to_string(config_.max_seqs) + " slots (max_seqs) are open");
  return Status::good();
}

// A sequence over the longest cached prefix. It does not hold these pages yet, and has room for one more.
Engine::Sequence Engine::match_prefix(const int32_t *tokens, uint32_t count, uint64_t domain) {
  Sequence sequence;
  // At least the last token is computed, since its logits are wanted.
  if (config_.prefix_cache) cache_->match(domain, tokens, (count - 1) / LS_PAGE_TOKENS, sequence.pages);
  sequence.attached = static_cast<uint32_t>(sequence.pages.size());
  sequence.completed = sequence.attached * LS_PAGE_TOKENS;
  sequence.tokens.assign(tokens, tokens + sequence.completed);
  sequence.open = true;
  sequence.serial = ++serial_;
  sequence.domain = domain;
  sequence.pages.reserve(sequence.attached + 1);
  sequence.tokens.reserve(sequence.completed + LS_PAGE_TOKENS);
  return sequence;
}

int32_t Engine::place(Sequence &&sequence) {
  const int32_t slot = free_slots_.back();
  free_slots_.pop_back();
  slots_[static_cast<size_t>(slot)] = std::move(sequence);
  return slot;
}

Status Engine::open(const int32_t *tokens, uint32_t count, uint64_t domain, int32_t *out) {
  const std::lock_guard lock(mutex_);
  if (Status status = check_prompt("ls_seq_open", tokens, count, out); !status.ok()) return status;
  Sequence sequence = match_prefix(tokens, count, domain);
  cache_->attach(sequence.pages);
  if (config_.prefix_cache) copy_head(sequence, tokens, count);
  out[1] = static_cast<int32_t>(sequence.completed);
  out[2] = static_cast<int32_t>(sequence.opened_at = sequence.computed());
  out[0] = place(std::move(sequence));
  return Status::good();
}

// The tokens behind the attached pages, as far as a resident page has them. Nothing here can fail.
void Engine::copy_head(Sequence &sequence, const int32_t *tokens, uint32_t count) {
  tokens += sequence.completed;
  const uint32_t limit = std::min<uint32_t>(LS_PAGE_TOKENS, count - 1 - sequence.completed);
  uint32_t same;
  const int32_t from = cache_->match_head(sequence.domain, sequence.pages.empty() ? -1 : sequence.pages.back(), tokens, limit, same);
  if (from < 0) return;
  if (pool_->free_count() == 0) {
    if (pool_->cached_count() == 0) return;
    cache_->evict();
  }
  const int32_t to = pool_->take();
  // Equal when the page to copy was itself the one to evict.
  if (from != to) copies_.push_back({from, to});
  sequence.pages.push_back(to);
  sequence.tokens.insert(sequence.tokens.end(), tokens, tokens + same);
}

Status Engine::close(int32_t slot, uint32_t commit) {
  const std::lock_guard lock(mutex_);
  // Also after a failure of the device: closing is how its owner cleans up. What it computed is not trusted then.
  if (phase_ != Phase::serving) return require(Phase::serving, "ls_seq_close");
  Sequence *sequence = find_open(slot);
  if (sequence == nullptr) return invalid("slot " + std::to_string(slot) + " is not open");
  const bool keep = config_.prefix_cache && failure_.empty();
  end_transfers(*sequence, slot);
  // A copy that no step has taken up yet: its page may become another's.
  if (sequence->attached < sequence->pages.size())
    std::erase_if(copies_, [page = sequence->pages[sequence->attached]](const PageCopy &copy) { return copy.to == page; });
  if (!gated_.empty()) open_gates();
  cache_->release(sequence->domain, sequence->tokens.data(), sequence->pages, keep ? std::min(commit, sequence->completed) : 0);
  *sequence = Sequence{};  // gives the memory back, too
  free_slots_.push_back(slot);
  return Status::good();
}

Status Engine::clear_cache() {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::serving) return require(Phase::serving, "ls_cache_clear");
  if (config_.prefix_cache) cache_->clear();
  return Status::good();
}

Status Engine::drain_events(int32_t *words, uint32_t capacity, uint32_t &written) {
  const std::lock_guard lock(mutex_);
  written = 0;
  if (phase_ != Phase::serving) return require(Phase::serving, "ls_events_drain");
  if (words == nullptr && capacity > 0) return invalid("words is NULL");
  capacity = std::min(capacity, static_cast<uint32_t>(INT32_MAX));  // the count is returned as an int32
  while (cache_->events_pending()) {
    const uint32_t needed = cache_->next_event_words();
    if (needed > capacity - written) {
      if (written > 0) break;
      return invalid("capacity is " + std::to_string(capacity) + " words, the next event needs " + std::to_string(needed));
    }
    written += cache_->take_event(words + written);
  }
  return Status::good();
}

Status Engine::check() {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::serving) return require(Phase::serving, "ls_pool_check");
  const auto broken = [](const std::string &text) { return Status::fail(LS_INTERNAL, "pool check: " + text); };
  const uint32_t total = pool_->total();
  std::vector<uint32_t> holders(total, 0);
  std::vector<const Sequence *> first_holder(total, nullptr);
  size_t open = 0;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    const Sequence &s = slots_[slot];
    const std::string name = "slot " + std::to_string(slot);
    if (!s.open) {
      if (!s.pages.empty()) return broken(name + " is closed and has pages");
      continue;
    }
    ++open;
    if (s.pages.size() != (size_t{s.computed()} + LS_PAGE_TOKENS - 1) / LS_PAGE_TOKENS)
      return broken(name + " has " + std::to_string(s.pages.size()) + " pages for " + std::to_string(s.computed()) + " tokens");
    if (s.completed > s.computed() || s.attached > s.pages.size()) return broken(name + " has completed or attached more than it has");
    for (size_t i = 0; i < s.pages.size(); ++i) {
      const int32_t page = s.pages[i];
      if (page < 0 || static_cast<uint32_t>(page) >= total) return broken(name + " has page " + std::to_string(page) + " outside the pool");
      const size_t p = static_cast<size_t>(page);
      if (holders[p]++ == 0) first_holder[p] = &s;
      if (i >= s.attached && pool_->resident(page)) return broken(name + " writes page " + std::to_string(page) + ", which is in the prefix cache");
      if (holders[p] == 1) continue;
      // Two holders: both took it from the prefix cache, at the same place after the same tokens.
      const Sequence &other = *first_holder[p];
      const auto page_tokens = [i](const Sequence &q) { return q.tokens.begin() + static_cast<std::ptrdiff_t>(i) * LS_PAGE_TOKENS; };
      const bool shared = i < s.attached && i < other.attached && other.pages[i] == page && (i == 0 || other.pages[i - 1] == s.pages[i - 1]) && other.domain == s.domain &&
                          std::equal(page_tokens(s), page_tokens(s) + LS_PAGE_TOKENS, page_tokens(other));
      if (!shared) return broken(name + " shares page " + std::to_string(page) + " with a sequence of another prefix");
    }
  }
  if (open + free_slots_.size() != slots_.size()) return broken(std::to_string(open) + " open and " + std::to_string(free_slots_.size()) + " free slots of " + std::to_string(slots_.size()));
  if (std::string text = check_transfers(); !text.empty()) return broken(text);
  if (std::string text = pool_->check(holders); !text.empty()) return broken(text);
  if (std::string text = cache_->check(); !text.empty()) return broken(text);
  return Status::good();
}

}  // namespace ls
