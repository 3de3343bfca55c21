// Prefix-cache events that nobody has drained yet, oldest first. Its size is bounded by design, whether or not anybody drains:
//  - a page stored and removed again before anyone looked leaves no event at all;
//  - a clear voids everything before it.
// So a page has at most one pending REMOVED (its old content) and one pending STORED (its new content): 2 * pages + 1 events.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "layerscale.h"

namespace ls {

// An intrusive list over fixed cells; every operation is O(1) and allocates nothing. Not thread-safe.
class EventLog {
 public:
  explicit EventLog(uint32_t pages);

  struct Event {
    ls_event kind;
    int32_t page;  // -1 for CLEARED
  };

  void stored(int32_t page);
  void removed(int32_t page);
  void cleared();

  bool empty() const { return head_ < 0; }
  Event front() const;
  void pop() { unlink(head_); }
  bool stored_pending(int32_t page) const { return cells_[static_cast<size_t>(page)].linked; }

  // Empty = the list is sound.
  std::string check() const;

 private:
  struct Cell {
    int32_t prev = -1, next = -1;
    bool linked = false;
  };
  // Cell p: STORED(p) · cell pages + p: REMOVED(p) · cell 2 * pages: CLEARED.
  std::vector<Cell> cells_;
  int32_t pages_;
  int32_t head_ = -1, tail_ = -1;
  void append(int32_t cell);
  void unlink(int32_t cell);
};

}  // namespace ls
