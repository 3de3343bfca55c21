// KV pages of a group as bytes on the host: out for other engines, in from them. Copies go through page-locked memory on streams of their own.
#pragma once
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "group.h"

namespace ls::cuda {

// Page-locked memory for a few pages and, for each rank, a stream that fills or empties it.
class Lane {
 public:
  static Status create(Group &group, uint32_t pages, std::unique_ptr<Lane> &out);
  uint8_t *page(uint32_t index) const { return memory_.as<uint8_t>() + index * group_.page_bytes(); }
  uint32_t pages() const { return pages_; }
  // One layer of a page of the device, all ranks, to or from place `index`.
  Status copy(bool out, uint32_t index, uint32_t layer, int32_t page);
  Status sync();

 private:
  Lane(Group &group, uint32_t pages) : group_(group), pages_(pages), streams_(group.ranks()) {}
  Group &group_;
  const uint32_t pages_;
  HostMemory memory_;
  std::vector<OwnedStream> streams_;
};

// Lanes are made when needed and used again.
class KvAccess {
 public:
  explicit KvAccess(Group &group) : group_(group) {}
  Status read(uint32_t layer, const int32_t *pages, uint32_t count, const std::function<void(uint32_t, const uint8_t *)> &take);
  // Null: no memory.
  std::unique_ptr<KvWriter> writer(const std::vector<int32_t> &pages);

 private:
  class Writer;
  Group &group_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> idle_;
  Status lease(std::unique_ptr<Lane> &out);
  void give_back(std::unique_ptr<Lane> lane);
};

}  // namespace ls::cuda
