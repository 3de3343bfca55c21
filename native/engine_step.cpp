// The hot half of the engine: submit and wait.
#include <algorithm>
#include <bit>
#include <chrono>
#include <utility>

#include "engine.h"

namespace ls {
namespace {

uint32_t pages_for(uint32_t tokens) { return (tokens + LS_PAGE_TOKENS - 1) / LS_PAGE_TOKENS; }

// Room for `more` further elements; grows by doubling, so that a sequence extended token by token copies itself O(log n) times.
template <class T>
void reserve_more(std::vector<T> &v, size_t more) {
  if (v.capacity() - v.size() < more) v.reserve(std::max(v.size() + more, v.capacity() * 2));
}

}  // namespace

Status Engine::submit(const int32_t *plan, uint32_t words) {
  const std::lock_guard lock(mutex_);
  if (Status status = require(Phase::serving, "ls_step_submit"); !status.ok()) return status;
  if (pending_steps_ == steps_.size()) return Status::fail(LS_STATE, "ls_step_submit: two steps are submitted already; wait for one first");
  Step &step = steps_[(oldest_step_ + pending_steps_) % steps_.size()];
  uint32_t pages_needed = 0;
  if (Status status = parse_plan(config_, plan, words, step); !status.ok()) return status;
  if (Status status = check_rows(step, pages_needed); !status.ok()) return status;
  const uint32_t available = pool_->free_count() + pool_->cached_count();
  if (pages_needed > available)
    return Status::fail(LS_NO_PAGES, "the plan needs " + std::to_string(pages_needed) + " new pages; " + std::to_string(available) + " of " +
                                         std::to_string(pool_->total()) + " are free or evictable");
  reserve_rows(step, pages_needed);
  // Nothing can fail from here on: whole or nothing. (A device that fails ends the engine.)
  while (pool_->free_count() < pages_needed) cache_->evict();
  commit_rows(step);
  ++pending_steps_;
  step.batch.hook = step.stages.empty() ? nullptr : &transfer_->stager;
  if (!backend_->queues()) return Status::good();
  Status status = guard_device("submitting a step", [&] { return backend_->submit(step.batch); });
  return status.ok() ? status : fail_device(status.code, status.text);
}

// What a plan says about sequences. Changes no sequence (plan_mark only tells plans apart).
Status Engine::check_rows(Step &step, uint32_t &pages_needed) {
  const uint64_t mark = ++plan_mark_;
  for (size_t i = 0; i < step.batch.rows.size(); ++i) {
    const StepRow &row = step.batch.rows[i];
    const auto invalid = [&](const std::string &what) { return Status::fail(LS_INVALID, "row " + std::to_string(i) + ": slot " + std::to_string(row.slot) + " " + what); };
    Sequence *sequence = find_open(row.slot);
    if (sequence == nullptr) return invalid("is not open");
    if (sequence->plan_mark == mark) return invalid("is in the plan twice");
    sequence->plan_mark = mark;
    if (sequence->pull) return invalid("is waiting for its transfer");
    if (sequence->pull_failed) return invalid("had a transfer that failed; it can only be closed");
    if (row.start != sequence->computed()) return invalid("has start " + std::to_string(row.start) + ", expected the tokens computed so far, " + std::to_string(sequence->computed()));
    if (row.tokens[0] == kCarryToken && !sequence->sampled) return invalid("carries a token (-1), and its row before did not sample");
    pages_needed += pages_for(row.start + row.len) - static_cast<uint32_t>(sequence->pages.size());
  }
  return Status::good();
}

// All memory that commit_rows fills.
void Engine::reserve_rows(Step &step, uint32_t pages_needed) {
  size_t pages = pages_needed;
  for (const StepRow &row : step.batch.rows) {
    Sequence &sequence = slots_[static_cast<size_t>(row.slot)];
    reserve_more(sequence.tokens, row.len);
    reserve_more(sequence.pages, pages_for(row.start + row.len) - sequence.pages.size());
    pages += sequence.pages.size();
  }
  step.pages.clear();
  step.pages.reserve(pages);
  step.owners.assign(step.batch.rows.size(), Step::Owner{});
  step.batch.copies.reserve(copies_.size());
  step.stages.clear();
  step.stages.reserve(step.batch.rows.size());
}

void Engine::commit_rows(Step &step) {
  const uint64_t submission = ++submissions_;
  step.batch.copies.assign(copies_.begin(), copies_.end());
  copies_.clear();
  for (const int32_t slot : gated_) {
    PullGate &gate = slots_[static_cast<size_t>(slot)].gate;
    if (std::exchange(gate.copy_source, false)) gate.submission = submission;
  }
  for (size_t i = 0; i < step.batch.rows.size(); ++i) {
    StepRow &row = step.batch.rows[i];
    Sequence &sequence = slots_[static_cast<size_t>(row.slot)];
    Step::Owner &owner = step.owners[i];
    owner.serial = sequence.serial;
    int32_t &first = step.tokens[static_cast<size_t>(row.tokens - step.tokens.data())];
    if (first == kCarryToken) {
      first = sequence.sample;
      // Still unknown: the step before is pending, and its completion fills it in. A device that queues steps does so itself.
      if (first == kCarryToken) row.carry_row = owner.carry_row = sequence.sample_row;
    }
    sequence.tokens.insert(sequence.tokens.end(), row.tokens, row.tokens + row.len);
    while (sequence.pages.size() < pages_for(sequence.computed())) sequence.pages.push_back(pool_->take());
    sequence.sampled = row.sample;
    sequence.sample_step = submission;
    sequence.sample_row = static_cast<int32_t>(i);
    sequence.sample = kCarryToken;
    row.pages = step.pages.data() + step.pages.size();
    row.page_count = static_cast<uint32_t>(sequence.pages.size());
    step.pages.insert(step.pages.end(), sequence.pages.begin(), sequence.pages.end());
    if (sequence.staged) plan_staging(sequence, row, step);
  }
}

Status Engine::wait(int32_t *result, uint32_t capacity, uint32_t &written) {
  written = 0;
  Step *step = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (Status status = require(Phase::serving, "ls_step_wait"); !status.ok()) return status;
    if (pending_steps_ == 0) return Status::fail(LS_STATE, "ls_step_wait: no step is submitted");
    if (running_) return Status::fail(LS_STATE, "ls_step_wait: another thread is waiting");
    step = &steps_[oldest_step_];
    if (result == nullptr) return Status::fail(LS_INVALID, "result is NULL");
    if (capacity < step->result_words) return Status::fail(LS_INVALID, "capacity is " + std::to_string(capacity) + " words, the result of this step needs " + std::to_string(step->result_words));
    running_ = true;
  }
  // Without the lock: a pending step is touched by nobody else.
  const auto begin = std::chrono::steady_clock::now();
  output_.rows.clear();
  const bool staging = !step->stages.empty();
  if (staging) transfer_->stager.begin(step->stages);
  Status status = guard_device("running a step", [&] { return backend_->queues() ? backend_->wait(step->batch, output_) : backend_->run(step->batch, output_); });
  if (staging)
    if (Status copied = transfer_->stager.finish(status.ok()); status.ok()) status = std::move(copied);
  const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin).count();

  const std::lock_guard lock(mutex_);
  running_ = false;
  if (!status.ok()) return fail_device(status.code, status.text);
  if (std::string text = check_output(config_, *step, output_); !text.empty()) return fail_device(LS_INTERNAL, text);
  apply(*step);
  written = pack(*step, static_cast<uint32_t>(std::min<int64_t>(micros, INT32_MAX)), result);
  return Status::good();
}

// Takes the completed step out of the ring and hands its samples on: to open sequences, and to the rows of the next step that wait for them.
void Engine::apply(Step &step) {
  const uint64_t submission = submissions_ - (pending_steps_ - 1);
  oldest_step_ = (oldest_step_ + 1) % static_cast<uint32_t>(steps_.size());
  --pending_steps_;
  for (const kv::StageJob &job : step.stages) job.staged->copied = job.end;
  step.stages.clear();
  if (!gated_.empty()) open_gates();
  for (size_t i = 0; i < step.batch.rows.size(); ++i) {
    const StepRow &row = step.batch.rows[i];
    Sequence &sequence = slots_[static_cast<size_t>(row.slot)];
    if (sequence.serial != step.owners[i].serial) continue;  // closed meanwhile (serial 0), or opened anew
    sequence.completed = row.start + row.len;
    if (row.sample && sequence.sample_step == submission) sequence.sample = output_.rows[i].token;
  }
  if (pending_steps_ == 0) return;
  Step &next = steps_[oldest_step_];
  for (size_t i = 0; i < next.batch.rows.size(); ++i) {
    const StepRow &row = next.batch.rows[i];
    const Step::Owner &owner = next.owners[i];
    if (owner.carry_row < 0) continue;
    const int32_t token = output_.rows[static_cast<size_t>(owner.carry_row)].token;
    next.tokens[static_cast<size_t>(row.tokens - next.tokens.data())] = token;
    Sequence &sequence = slots_[static_cast<size_t>(row.slot)];
    if (sequence.serial == owner.serial) sequence.tokens[row.start] = token;
  }
}

uint32_t Engine::pack(const Step &step, uint32_t micros, int32_t *result) const {
  int32_t *w = result;
  const auto put = [&w](uint32_t value) { *w++ = static_cast<int32_t>(value); };
  for (const uint32_t value : {static_cast<uint32_t>(step.batch.rows.size()), step.batch.step, pool_->free_count(), pool_->cached_count(), pool_->held_count(), pool_->total(), micros, 0u}) put(value);
  for (size_t i = 0; i < step.batch.rows.size(); ++i) {
    const StepRow &row = step.batch.rows[i];
    const RowOutput &out = output_.rows[i];
    *w++ = row.slot;
    *w++ = row.sample ? out.token : -1;
    put(row.sample ? std::bit_cast<uint32_t>(out.logprob) : 0);
    const size_t n_top = row.sample ? out.top.size() : 0;
    put(static_cast<uint32_t>(n_top));
    for (size_t t = 0; t < n_top; ++t) {
      *w++ = out.top[t].first;
      put(std::bit_cast<uint32_t>(out.top[t].second));
    }
  }
  return static_cast<uint32_t>(w - result);
}

}  // namespace ls
