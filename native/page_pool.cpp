#include "page_pool.h"

namespace ls {

PagePool::PagePool(uint32_t total) : pages_(total) {
  free_.reserve(total);
  for (uint32_t page = total; page > 0; --page) free_.push_back(static_cast<int32_t>(page - 1));
}

int32_t PagePool::take() {
  const int32_t page = free_.back();
  free_.pop_back();
  pages_[static_cast<size_t>(page)].holders = 1;
  return page;
}

void PagePool::hold(int32_t page) {
  Page &p = pages_[static_cast<size_t>(page)];
  if (p.holders++ == 0) --cached_;
}

void PagePool::drop(int32_t page) {
  Page &p = pages_[static_cast<size_t>(page)];
  if (--p.holders > 0) return;
  if (p.resident) {
    ++cached_;
  } else {
    free_.push_back(page);
  }
}

void PagePool::make_resident(int32_t page) { pages_[static_cast<size_t>(page)].resident = true; }

void PagePool::end_residence(int32_t page) {
  Page &p = pages_[static_cast<size_t>(page)];
  p.resident = false;
  if (p.holders > 0) return;
  --cached_;
  free_.push_back(page);
}

std::string PagePool::check(const std::vector<uint32_t> &counted_holders) const {
  std::vector<uint8_t> listed(pages_.size(), 0);
  for (const int32_t page : free_) {
    if (page < 0 || static_cast<size_t>(page) >= pages_.size()) return "free list holds page " + std::to_string(page) + " outside the pool";
    if (listed[static_cast<size_t>(page)]) return "page " + std::to_string(page) + " is twice in the free list";
    listed[static_cast<size_t>(page)] = 1;
  }
  uint32_t cached = 0, held = 0;
  for (size_t i = 0; i < pages_.size(); ++i) {
    const Page &p = pages_[i];
    const std::string name = "page " + std::to_string(i);
    if (p.holders != counted_holders[i])
      return name + " counts " + std::to_string(p.holders) + " holders, block tables show " + std::to_string(counted_holders[i]);
    const bool free = p.holders == 0 && !p.resident;
    if (free != (listed[i] != 0)) return name + (free ? " belongs to nobody and is missing from the free list" : " is in use and in the free list");
    if (p.holders > 0) ++held;
    else if (p.resident) ++cached;
  }
  if (cached != cached_) return "cached is " + std::to_string(cached_) + ", pages show " + std::to_string(cached);
  if (held != held_count()) return "held is " + std::to_string(held_count()) + ", pages show " + std::to_string(held);
  if (free_.size() + cached + held != pages_.size()) return "free + cached + held is not the total of " + std::to_string(pages_.size());
  return {};
}

}  // namespace ls
