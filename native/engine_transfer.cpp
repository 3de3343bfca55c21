// Sequences whose KV goes to another engine, or comes from one.
#include <algorithm>
#include <cstring>

#include "config.h"
#include "engine.h"

namespace ls {
namespace {

constexpr uint64_t kMaxPageBytes = 1u << 24;  // keeps the length of every frame within 32 bits

Status invalid(std::string text) { return Status::fail(LS_INVALID, std::move(text)); }
uint32_t pages_for(uint32_t tokens) { return (tokens + LS_PAGE_TOKENS - 1) / LS_PAGE_TOKENS; }

}  // namespace

Status Engine::start_transfer(const ls_kv_config *config, const uint8_t *model_digest, const uint8_t *key, const char *host, uint32_t &port) {
  const std::lock_guard lock(mutex_);
  port = 0;
  if (Status status = require(Phase::serving, "ls_kv_start"); !status.ok()) return status;
  if (transfer_) return Status::fail(LS_STATE, "ls_kv_start was called before");
  kv::Settings settings;
  if (Status status = kv::read_settings(config, key, settings); !status.ok()) return status;
  if (model_digest == nullptr) return invalid("model_digest is NULL");
  const KvFormat format = backend_->kv_format();
  if (format.page_bytes == 0 || format.page_bytes > kMaxPageBytes)
    return Status::fail(LS_UNSUPPORTED, "this device cannot move KV with pages of " + std::to_string(format.page_bytes) + " bytes per layer, expected 1.." + std::to_string(kMaxPageBytes));
  kv::Layout layout;
  std::copy_n(model_digest, layout.model.size(), layout.model.begin());
  if (!kv_scales_.empty()) layout.scales = kv::sha256({reinterpret_cast<const uint8_t *>(kv_scales_.data()), kv_scales_.size() * sizeof(float)});
  layout.layers = config_.layers;
  layout.kv_heads = config_.kv_heads;
  layout.head_dim = config_.head_dim;
  layout.page_tokens = LS_PAGE_TOKENS;
  layout.dtype = config_.kv_dtype;
  layout.format = format.id;
  layout.ranks = settings.ranks;
  layout.page_bytes = format.page_bytes;

  auto transfer = std::make_unique<kv::Transfer>(layout, settings, *backend_);
  if (host != nullptr) {
    kv::Address address;
    if (Status status = kv::parse_address(host, 0, address); !status.ok()) return status;
    transfer->server = std::make_unique<kv::Server>(transfer->layout, transfer->store, settings.server);
    if (Status status = transfer->server->start(address); !status.ok()) return status;
    transfer->stager.start();
    port = transfer->server->port();
  }
  if (Status status = transfer->client.start(); !status.ok()) return status;
  transfer_ = std::move(transfer);
  return Status::good();
}

Status Engine::require_transfer(const char *call) const {
  if (Status status = require(Phase::serving, call); !status.ok()) return status;
  return transfer_ ? Status::good() : Status::fail(LS_STATE, std::string(call) + " is called after ls_kv_start only");
}

Status Engine::layout(uint8_t *out) {
  const std::lock_guard lock(mutex_);
  if (Status status = require_transfer("ls_kv_layout"); !status.ok()) return status;
  if (out == nullptr) return invalid("out is NULL");
  kv::encode_layout(transfer_->layout, out);
  return Status::good();
}

Status Engine::transfer_stats(ls_kv_stats_t &out) {
  const std::lock_guard lock(mutex_);
  out = {};
  out.struct_size = sizeof out;
  if (!transfer_) return Status::good();
  const auto split = [](uint64_t value, uint32_t &lo, uint32_t &hi) { lo = static_cast<uint32_t>(value), hi = static_cast<uint32_t>(value >> 32); };
  const kv::StagingCounts &counts = transfer_->store.counts();
  out.staged = static_cast<uint32_t>(counts.staged);
  split(counts.staged_bytes, out.staged_bytes_lo, out.staged_bytes_hi);
  out.filling = static_cast<uint32_t>(counts.filling);
  split(counts.filling_bytes, out.filling_bytes_lo, out.filling_bytes_hi);
  if (transfer_->server) {
    out.connections = transfer_->server->connections();
    out.turned_away = static_cast<uint32_t>(transfer_->server->turned_away());
  }
  out.pulls = transfer_->client.active();
  out.stage_layers = transfer_->stager.staged_layers();
  out.stage_layers_early = transfer_->stager.early_layers();
  split(transfer_->stager.wait_micros(), out.stage_wait_micros_lo, out.stage_wait_micros_hi);
  return Status::good();
}

Status Engine::stage(int32_t slot, uint32_t tokens) {
  const std::lock_guard lock(mutex_);
  if (Status status = require_transfer("ls_kv_stage"); !status.ok()) return status;
  if (!transfer_->server) return Status::fail(LS_STATE, "ls_kv_stage: this engine has no transfer listener");
  Sequence *sequence = find_open(slot);
  if (sequence == nullptr) return invalid("slot " + std::to_string(slot) + " is not open");
  if (sequence->staged || sequence->pull || sequence->pull_failed) return Status::fail(LS_STATE, "slot " + std::to_string(slot) + " is being staged or filled already");
  if (tokens > config_.max_context) return invalid("tokens is " + std::to_string(tokens) + ", expected 0.." + std::to_string(config_.max_context) + " (max_context)");
  return transfer_->store.create(transfer_->layout, tokens, sequence->staged);
}

// The pages that are whole once this row has run, cached ones before them included; the last one also when the row reaches the last token.
void Engine::plan_staging(Sequence &sequence, const StepRow &row, Step &step) {
  kv::Staged &staged = *sequence.staged;
  const uint32_t end = sequence.computed() >= staged.tokens() ? staged.pages() : sequence.computed() / LS_PAGE_TOKENS;
  if (end <= staged.planned) return;
  step.stages.push_back({sequence.staged, row.pages, staged.planned, end});
  staged.planned = end;
}

Status Engine::publish(int32_t slot, uint32_t *out) {
  const std::lock_guard lock(mutex_);
  if (Status status = require_transfer("ls_kv_publish"); !status.ok()) return status;
  if (out == nullptr) return invalid("out is NULL");
  Sequence *sequence = find_open(slot);
  if (sequence == nullptr) return invalid("slot " + std::to_string(slot) + " is not open");
  if (!sequence->staged) return Status::fail(LS_STATE, "slot " + std::to_string(slot) + " is not staged; ls_kv_stage comes first");
  kv::Staged &staged = *sequence->staged;
  // A copied head counts, too: no step has made the copy yet, and its source still has the content; or all steps since have run.
  std::vector<int32_t> table = sequence->pages;
  uint32_t known = sequence->completed;
  if (sequence->opened_at > known) {
    const auto copy = std::find_if(copies_.begin(), copies_.end(), [&](const PageCopy &c) { return c.to == table[sequence->attached]; });
    if (copy != copies_.end()) table[sequence->attached] = copy->from;
    if (copy != copies_.end() || pending_steps_ == 0) known = sequence->opened_at;
  }
  if (known < staged.tokens())
    return Status::fail(LS_STATE, "slot " + std::to_string(slot) + " has computed " + std::to_string(known) + " of the " + std::to_string(staged.tokens()) + " tokens to stage");
  if (staged.copied < staged.planned) return Status::fail(LS_STATE, "slot " + std::to_string(slot) + " has a submitted step that stages; wait for it first");
  if (staged.planned < staged.pages()) {
    if (Status status = transfer_->stager.copy_now({sequence->staged, table.data(), staged.planned, staged.pages()}); !status.ok()) return status;
    staged.planned = staged.copied = staged.pages();
  }
  uint64_t id = 0;
  if (Status status = transfer_->store.publish(sequence->staged, kv::content_of({sequence->tokens.data(), staged.tokens()}), id); !status.ok()) return status;
  sequence->staged.reset();
  transfer_->server->wake();
  out[0] = static_cast<uint32_t>(id);
  out[1] = static_cast<uint32_t>(id >> 32);
  return Status::good();
}

Status Engine::release(uint64_t id) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::serving || !transfer_) return require_transfer("ls_kv_release");
  if (transfer_->store.drop(id) != LS_KV_DROPPED) return invalid("no copy is staged under this id");
  if (transfer_->server) transfer_->server->wake();
  return Status::good();
}

Status Engine::open_pull(const int32_t *tokens, uint32_t count, uint64_t domain, const ls_kv_source *source, const char *host, const uint8_t *layout, int32_t *out) {
  const std::lock_guard lock(mutex_);
  if (Status status = require_transfer("ls_seq_open_pull"); !status.ok()) return status;
  if (source == nullptr || layout == nullptr) return invalid("source or layout is NULL");
  if (source->struct_size != sizeof *source) return invalid("source.struct_size is " + std::to_string(source->struct_size) + ", expected " + std::to_string(sizeof *source));
  // The layout before everything else: no allocation for KV that this engine could not read.
  kv::Layout theirs;
  std::string differs = kv::decode_layout({layout, source->layout_bytes}, theirs);
  if (differs.empty()) differs = kv::layout_difference(theirs, transfer_->layout, "prefill worker", "decode worker");
  if (!differs.empty()) return Status::fail(LS_LAYOUT, differs);
  kv::Address address;
  if (Status status = kv::parse_address(host, source->port, address); !status.ok()) return status;
  if (source->port == 0) return invalid("port is 0, expected 1..65535");
  if (Status status = check_prompt("ls_seq_open_pull", tokens, count, out); !status.ok()) return status;

  const uint32_t known = count - 1;
  Sequence sequence = match_prefix(tokens, count, domain);
  uint32_t head = 0;
  if (config_.prefix_cache && known > sequence.completed)
    cache_->match_head(domain, sequence.pages.empty() ? -1 : sequence.pages.back(), tokens + sequence.completed, std::min<uint32_t>(LS_PAGE_TOKENS, known - sequence.completed), head);
  const uint32_t missing = pages_for(known) - sequence.attached;
  // Attaching takes evictable pages away.
  const auto idle = std::count_if(sequence.pages.begin(), sequence.pages.end(), [&](int32_t page) { return pool_->holders(page) == 0; });
  const uint32_t available = pool_->free_count() + pool_->cached_count() - static_cast<uint32_t>(idle);
  if (missing > available)
    return Status::fail(LS_NO_PAGES, "the pull needs " + std::to_string(missing) + " new pages; " + std::to_string(available) + " of " + std::to_string(pool_->total()) + " are free or evictable");

  out[1] = static_cast<int32_t>(sequence.completed);
  out[2] = static_cast<int32_t>(known);
  if (sequence.completed + head == known) {
    // A page that continues the prefix has the rest: copied, as at ls_seq_open.
    cache_->attach(sequence.pages);
    if (head > 0) copy_head(sequence, tokens, count);
    sequence.opened_at = sequence.computed();
    out[0] = place(std::move(sequence));
    out[3] = 0;
    return Status::good();
  }

  // All that can fail comes first.
  sequence.pages.reserve(sequence.attached + missing);
  sequence.tokens.insert(sequence.tokens.end(), tokens + sequence.completed, tokens + known);
  const auto table = std::make_unique<std::vector<int32_t>>(missing);
  kv::PullRequest request{static_cast<uint64_t>(source->id_hi) << 32 | source->id_lo, sequence.attached, known, kv::content_of({tokens, known}), transfer_->layout, {}};
  const auto writer = std::make_shared<std::unique_ptr<KvWriter>>();
  request.page = [writer, first = sequence.attached](uint32_t layer, uint32_t index) { return (*writer)->page(layer, index - first); };
  request.arrived = [writer, first = sequence.attached](uint32_t layer, uint32_t index) { (*writer)->arrived(layer, index - first); };
  request.flush = [writer] { return (*writer)->flush(); };
  const int32_t slot = free_slots_.back();
  sequence.pull = std::make_shared<kv::Pull>(address, std::move(request), slot, sequence.serial);

  cache_->attach(sequence.pages);
  while (pool_->free_count() < missing) cache_->evict();
  for (int32_t &page : *table) sequence.pages.push_back(page = pool_->take());
  *writer = backend_->kv_writer(*table);
  if (!*writer) {
    // The prefix stays cached; the rest goes back.
    cache_->release(domain, sequence.tokens.data(), sequence.pages, 0);
    return Status::fail(LS_NO_MEMORY, "no memory for a transfer of " + std::to_string(missing) + " pages");
  }
  sequence.gate.submission = submissions_;
  sequence.gate.copy_source = copy_source(sequence);
  place(std::move(sequence));
  gated_.push_back(slot);
  open_gates();
  out[0] = slot;
  out[3] = static_cast<int32_t>(missing);
  return Status::good();
}

bool Engine::copy_source(const Sequence &sequence) const {
  return std::any_of(copies_.begin(), copies_.end(), [&](const PageCopy &copy) { return std::find(sequence.pages.begin() + sequence.attached, sequence.pages.end(), copy.from) != sequence.pages.end(); });
}

// Begins the pulls whose pages no submitted step uses any more.
void Engine::open_gates() {
  if (!failure_.empty()) return;
  const uint64_t completed = submissions_ - pending_steps_;
  std::erase_if(gated_, [&](int32_t slot) {
    Sequence &sequence = slots_[static_cast<size_t>(slot)];
    if (sequence.gate.copy_source) sequence.gate.copy_source = copy_source(sequence);
    if (sequence.gate.copy_source || sequence.gate.submission > completed) return false;
    transfer_->client.pull(sequence.pull);
    return true;
  });
}

// Part of closing: from here on no thread touches the pages.
void Engine::end_transfers(Sequence &sequence, int32_t slot) {
  if (sequence.staged) sequence.staged->abandoned.store(true, std::memory_order_relaxed);
  if (!sequence.pull) return;
  if (std::erase(gated_, slot) > 0) transfer_->client.drop(sequence.pull->address(), sequence.pull->request().id);
  else transfer_->client.cancel(*sequence.pull);
}

Status Engine::drop(const char *host, uint32_t port, uint64_t id) {
  const std::lock_guard lock(mutex_);
  if (Status status = require_transfer("ls_kv_drop"); !status.ok()) return status;
  kv::Address address;
  if (Status status = kv::parse_address(host, port, address); !status.ok()) return status;
  if (port == 0) return invalid("port is 0, expected 1..65535");
  transfer_->client.drop(address, id);
  return Status::good();
}

}  // namespace ls
