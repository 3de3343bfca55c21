// Ownership of KV pages: a free list, how many open sequences hold each page, and whether the prefix cache keeps it.
// A page is in exactly one state:  free (no holder, not resident) · cached (no holder, resident) · held (>= 1 holder).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ls {

// Page ids are 0..total-1. Nothing here allocates after construction, and every operation is O(1). Not thread-safe.
class PagePool {
 public:
  explicit PagePool(uint32_t total);

  uint32_t total() const { return static_cast<uint32_t>(pages_.size()); }
  uint32_t free_count() const { return static_cast<uint32_t>(free_.size()); }
  uint32_t cached_count() const { return cached_; }
  uint32_t held_count() const { return total() - free_count() - cached_; }

  uint32_t holders(int32_t page) const { return pages_[static_cast<size_t>(page)].holders; }
  bool resident(int32_t page) const { return pages_[static_cast<size_t>(page)].resident; }

  // Takes a free page for one sequence. Precondition: free_count() > 0.
  int32_t take();
  // One more open sequence holds a held or cached page.
  void hold(int32_t page);
  // One holder less. The last one sends the page to the free list, or to the cached state when it is resident.
  void drop(int32_t page);
  // The page enters the prefix cache (it is held at that moment).
  void make_resident(int32_t page);
  // The page leaves the prefix cache; without holders it becomes free.
  void end_residence(int32_t page);

  // Compares against holders counted from the block tables. Empty = sound, else the first broken invariant.
  std::string check(const std::vector<uint32_t> &counted_holders) const;

 private:
  struct Page {
    uint32_t holders = 0;
    bool resident = false;
  };
  std::vector<Page> pages_;
  std::vector<int32_t> free_;  // a stack: recently used memory is handed out first
  uint32_t cached_ = 0;
};

}  // namespace ls
