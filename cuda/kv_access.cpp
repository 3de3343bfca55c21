#include "kv_access.h"

#include <algorithm>

namespace ls::cuda {

// Two frames of pages: one is on its way while the next lands.
constexpr uint32_t kLanePages = 2 * kKvWriterPages;

Status Lane::create(Group &group, uint32_t pages, std::unique_ptr<Lane> &out) {
  std::unique_ptr<Lane> lane(new Lane(group, pages));
  if (Status status = use_device(group.rank(0).device()); !status.ok()) return status;
  if (Status status = lane->memory_.alloc(pages * group.page_bytes()); !status.ok()) return status;
  for (uint32_t r = 0; r < group.ranks(); ++r) {
    if (Status status = use_device(group.rank(r).device()); !status.ok()) return status;
    if (Status status = stream_create(lane->streams_[r].out()); !status.ok()) return status;
  }
  out = std::move(lane);
  return Status::good();
}

Status Lane::copy(bool out, uint32_t index, uint32_t layer, int32_t page) {
  const size_t shard = group_.page_bytes() / group_.ranks();
  for (uint32_t r = 0; r < group_.ranks(); ++r) {
    Rank &rank = group_.rank(r);
    if (group_.ranks() > 1)
      if (Status status = use_device(rank.device()); !status.ok()) return status;
    uint8_t *host = this->page(index) + r * shard, *device = rank.page(layer, page);
    if (Status status = copy_async(out ? host : device, out ? device : host, shard, streams_[r].get()); !status.ok()) return status;
  }
  return Status::good();
}

Status Lane::sync() {
  for (const OwnedStream &stream : streams_)
    if (Status status = stream_sync(stream.get()); !status.ok()) return status;
  return Status::good();
}

Status KvAccess::lease(std::unique_ptr<Lane> &out) {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      out = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!out) return Lane::create(group_, kLanePages, out);
  return use_device(group_.rank(0).device());
}

void KvAccess::give_back(std::unique_ptr<Lane> lane) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(lane));
}

// One half of the lane is filled while the other is taken.
Status KvAccess::read(uint32_t layer, const int32_t *pages, uint32_t count, const std::function<void(uint32_t, const uint8_t *)> &take) {
  std::unique_ptr<Lane> lane;
  if (Status status = lease(lane); !status.ok()) return status;
  const uint32_t half = lane->pages() / 2;
  const auto fetch = [&](uint32_t first) {
    Status status;
    for (uint32_t i = first; status.ok() && i < std::min(count, first + half); ++i) status = lane->copy(true, i % lane->pages(), layer, pages[i]);
    return status;
  };
  Status status = fetch(0);
  for (uint32_t first = 0; status.ok() && first < count; first += half) {
    if (status = lane->sync(); !status.ok()) break;
    if (status = fetch(first + half); !status.ok()) break;
    for (uint32_t i = first; i < std::min(count, first + half); ++i) take(i, lane->page(i % lane->pages()));
  }
  if (Status ended = lane->sync(); status.ok()) status = std::move(ended);
  if (status.ok()) give_back(std::move(lane));
  return status;
}

// Pages land in the lane, one place after the other, and go on to the device. A place is used again when everything that left before has
// arrived: places of a frame that is landing are never more than half of the lane.
class KvAccess::Writer final : public KvWriter {
 public:
  Writer(KvAccess &access, std::unique_ptr<Lane> lane, std::vector<int32_t> pages) : access_(access), lane_(std::move(lane)), pages_(std::move(pages)) {}
  ~Writer() override {
    if (flush().ok()) access_.give_back(std::move(lane_));
  }

  uint8_t *page(uint32_t layer, uint32_t index) override {
    for (const Landing &landing : landing_)
      if (landing.layer == layer && landing.index == index) return lane_->page(landing.place);
    const uint32_t place = next_++ % lane_->pages();
    // At the beginning of a half: its earlier pages have had the time of the other half to arrive.
    if (place % kKvWriterPages == 0)
      if (Status status = lane_->sync(); !status.ok() && failure_.ok()) failure_ = std::move(status);
    landing_.push_back({layer, index, place});
    return lane_->page(place);
  }

  void arrived(uint32_t layer, uint32_t index) override {
    const auto at = std::find_if(landing_.begin(), landing_.end(), [&](const Landing &l) { return l.layer == layer && l.index == index; });
    if (at == landing_.end()) return;
    Status status = use_device(access_.group_.rank(0).device());
    if (status.ok()) status = lane_->copy(false, at->place, layer, pages_[index]);
    if (!status.ok() && failure_.ok()) failure_ = std::move(status);
    landing_.erase(at);
  }

  Status flush() override {
    Status status = lane_->sync();
    return failure_.ok() ? status : failure_;
  }

 private:
  struct Landing {
    uint32_t layer, index, place;
  };
  KvAccess &access_;
  std::unique_ptr<Lane> lane_;
  const std::vector<int32_t> pages_;
  std::vector<Landing> landing_;  // at most a frame
  uint32_t next_ = 0;
  Status failure_;
};

std::unique_ptr<KvWriter> KvAccess::writer(const std::vector<int32_t> &pages) {
  std::unique_ptr<Lane> lane;
  if (!lease(lane).ok()) return nullptr;
  return std::make_unique<Writer>(*this, std::move(lane), pages);
}

}  // namespace ls::cuda
