// Slots, sequences and steps over one Backend. Everything about pages changes under one mutex, at open, submit, close and clear; the
// device runs steps in the order of their submission (FIFO), which makes early frees safe:
//  - A slot may be closed while a step with a row for it is submitted. The row still runs and its result is returned. It writes only
//    places at or after its start; close() commits tokens of completed steps only, which lie before, and whoever gets those pages next
//    writes them in a later step.
//  - A page copied from may be evicted before the copy runs: copies run before the rows of the step that carries them, and whoever gets
//    the page meanwhile writes it in that step or later.
//  - A transfer writes pages from a thread of its own. It begins when the steps submitted before have run (its gate), and closing the slot
//    ends it before the pages are given away.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "backend.h"
#include "kv_transfer/transfer.h"
#include "page_pool.h"
#include "prefix_cache.h"
#include "step.h"
#include "weights.h"

namespace ls {

// Calls the device; what it throws becomes a Status, since the engine must note the failure.
template <class F>
Status guard_device(const char *what, F &&call) {
  try {
    return call();
  } catch (const std::bad_alloc &) {
    return Status::fail(LS_NO_MEMORY, std::string("out of memory while ") + what);
  } catch (const std::exception &e) {
    return Status::fail(LS_INTERNAL, std::string("exception while ") + what + ": " + e.what());
  } catch (...) {
    return Status::fail(LS_INTERNAL, std::string("exception while ") + what);
  }
}

class Engine {
 public:
  // config is valid. Ownership of the backend passes.
  Engine(const ls_config &config, std::unique_ptr<Backend> backend);

  // Loading, in this order. Engine thread only. Out of order: LS_STATE.
  Status map_weights(const char *path, uint64_t expected_bytes, uint32_t &file);
  Status set_tensor(uint32_t id, uint32_t file, uint64_t offset, uint64_t bytes, uint32_t dtype, uint32_t rows, uint32_t cols);
  // {k, v} of each layer.
  Status set_kv_scales(const float *scales, uint32_t layers);
  Status finish_weights();
  int32_t load_permille() const { return load_permille_.load(std::memory_order_relaxed); }
  Status memory(ls_memory_t &out);
  Status create_pool(uint32_t pages);

  // Any thread; zeros before create_pool.
  void stats(ls_pool_stats_t &out);
  // LS_INTERNAL with the first broken invariant. O(pages + tokens held).
  Status check();

  // out: [slot, cached tokens, start].
  Status open(const int32_t *tokens, uint32_t count, uint64_t domain, int32_t *out);
  Status close(int32_t slot, uint32_t commit);
  Status submit(const int32_t *plan, uint32_t words);
  Status wait(int32_t *result, uint32_t capacity, uint32_t &written);
  Status clear_cache();
  Status drain_events(int32_t *words, uint32_t capacity, uint32_t &written);

  // KV transfer (engine_transfer.cpp).
  Status start_transfer(const ls_kv_config *config, const uint8_t *model_digest, const uint8_t *key, const char *host, uint32_t &port);
  Status layout(uint8_t *out);
  Status transfer_stats(ls_kv_stats_t &out);
  Status stage(int32_t slot, uint32_t tokens);
  Status publish(int32_t slot, uint32_t *out);
  Status release(uint64_t id);
  // out: [slot, cached tokens, start, pages to pull].
  Status open_pull(const int32_t *tokens, uint32_t count, uint64_t domain, const ls_kv_source *source, const char *host, const uint8_t *layout, int32_t *out);
  Status drop(const char *host, uint32_t port, uint64_t id);
  Status drain_transfers(int32_t *words, uint32_t capacity, uint32_t &written);

 private:
  enum class Phase { loading, loaded, serving };

  // When a pull may write its pages.
  struct PullGate {
    uint64_t submission = 0;   // the last submitted step before; it may still use them for others
    bool copy_source = false;  // one of them is the source of a copy that no step has taken up
  };

  struct Sequence {
    bool open = false;
    uint64_t serial = 0;           // changes with every open
    uint64_t domain = 0;
    std::vector<int32_t> tokens;   // of the submitted rows; kCarryToken where the sample is not known yet
    std::vector<int32_t> pages;    // block table: page of token t is pages[t / 16]
    uint32_t attached = 0;         // leading pages taken from the prefix cache, never written by this sequence
    uint32_t completed = 0;        // tokens whose steps have run
    uint32_t opened_at = 0;        // tokens known when it was opened: the attached pages and a copied head
    bool sampled = false;          // the last submitted row samples: a carry is available,
    uint64_t sample_step = 0;      // from this submission,
    int32_t sample_row = -1;       // this row of it,
    int32_t sample = kCarryToken;  // and this is the token, once that step has completed
    uint64_t plan_mark = 0;        // the last plan that named this slot
    std::shared_ptr<kv::Staged> staged;  // its KV is being copied
    std::shared_ptr<kv::Pull> pull;      // its pages are being filled; completed lies before them
    PullGate gate;
    bool pull_failed = false;
    uint32_t computed() const { return static_cast<uint32_t>(tokens.size()); }
  };

  // Destroyed in reverse order: the backend before the mappings it points into.
  const ls_config config_;
  WeightFiles weights_;
  std::unique_ptr<Backend> backend_;
  std::atomic<int32_t> load_permille_{0};
  std::vector<float> kv_scales_;  // {k, v} of each layer, 1 unless set, so that all 1 and none are the same to others; empty without an fp8 cache
  std::unique_ptr<kv::Transfer> transfer_;  // its threads use the backend

  std::mutex mutex_;
  Phase phase_ = Phase::loading;
  std::string failure_;  // not empty: the device failed; sequences can only be closed
  std::optional<PagePool> pool_;
  std::optional<PrefixCache> cache_;
  std::vector<Sequence> slots_;
  std::vector<int32_t> free_slots_;
  std::vector<PageCopy> copies_;  // wanted by sequences opened since the last submit; at most one for each
  std::vector<int32_t> gated_;     // slots whose pull has not begun
  uint64_t serial_ = 0;
  uint64_t plan_mark_ = 0;

  std::array<Step, 2> steps_;  // ring of submitted steps
  uint32_t oldest_step_ = 0, pending_steps_ = 0;
  uint64_t submissions_ = 0;   // id of the latest submitted step
  bool running_ = false;
  StepOutput output_;

  Status require(Phase phase, const char *call) const;
  Status fail_device(int32_t code, const std::string &text);
  Sequence *find_open(int32_t slot);
  Status check_prompt(const char *call, const int32_t *tokens, uint32_t count, const int32_t *out) const;
  Sequence match_prefix(const int32_t *tokens, uint32_t count, uint64_t domain);
  int32_t place(Sequence &&sequence);
  void copy_head(Sequence &sequence, const int32_t *tokens, uint32_t count);
  Status check_rows(Step &step, uint32_t &pages_needed);
  void reserve_rows(Step &step, uint32_t pages_needed);
  void commit_rows(Step &step);
  void apply(Step &step);
  uint32_t pack(const Step &step, uint32_t micros, int32_t *result) const;
  Status require_transfer(const char *call) const;
  void plan_staging(Sequence &sequence, const StepRow &row, Step &step);
  bool copy_source(const Sequence &sequence) const;
  void open_gates();
  void end_transfers(Sequence &sequence, int32_t slot);
  bool apply_ending(const kv::Ending &ending);
  std::string check_transfers() const;
};

}  // namespace ls
