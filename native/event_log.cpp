#include "event_log.h"

namespace ls {

EventLog::EventLog(uint32_t pages) : cells_(size_t{2} * pages + 1), pages_(static_cast<int32_t>(pages)) {}

void EventLog::append(int32_t cell) {
  Cell &c = cells_[static_cast<size_t>(cell)];
  c = {tail_, -1, true};
  if (tail_ >= 0) cells_[static_cast<size_t>(tail_)].next = cell;
  else head_ = cell;
  tail_ = cell;
}

void EventLog::unlink(int32_t cell) {
  Cell &c = cells_[static_cast<size_t>(cell)];
  if (c.prev >= 0) cells_[static_cast<size_t>(c.prev)].next = c.next;
  else head_ = c.next;
  if (c.next >= 0) cells_[static_cast<size_t>(c.next)].prev = c.prev;
  else tail_ = c.prev;
  c = {};
}

void EventLog::stored(int32_t page) { append(page); }

void EventLog::removed(int32_t page) {
  // Never reported: its children were stored after it and removed before it, so theirs are gone from the log already.
  if (cells_[static_cast<size_t>(page)].linked) return unlink(page);
  append(pages_ + page);
}

void EventLog::cleared() {
  while (head_ >= 0) unlink(head_);
  append(2 * pages_);
}

EventLog::Event EventLog::front() const {
  if (head_ < pages_) return {LS_EVENT_STORED, head_};
  if (head_ < 2 * pages_) return {LS_EVENT_REMOVED, head_ - pages_};
  return {LS_EVENT_CLEARED, -1};
}

std::string EventLog::check() const {
  size_t listed = 0, linked = 0;
  int32_t prev = -1;
  for (int32_t cell = head_; cell >= 0; cell = cells_[static_cast<size_t>(cell)].next) {
    const Cell &c = cells_[static_cast<size_t>(cell)];
    if (!c.linked || c.prev != prev || ++listed > cells_.size()) return "event log: broken link at cell " + std::to_string(cell);
    prev = cell;
  }
  if (prev != tail_) return "event log: the last event is not the tail";
  for (const Cell &c : cells_) linked += c.linked ? 1 : 0;
  if (linked != listed) return "event log: " + std::to_string(linked) + " cells linked, " + std::to_string(listed) + " listed";
  return {};
}

}  // namespace ls
