// The decode side of one connection: a request goes out, KV comes in and lands in its pages while later pages are on their way.
#pragma once
#include <functional>
#include <vector>

#include "channel.h"

namespace ls::kv {

// What is wanted, and where it goes.
struct PullRequest {
  uint64_t id = 0;
  uint32_t first_page = 0;  // leading pages that the receiver has
  uint32_t tokens = 0;      // positions [0, tokens) must be in the copy
  uint64_t content = 0;     // content_of() these tokens
  Layout layout;
  // Memory of one layer of page `index` of the prompt, first_page <= index; page_bytes long.
  std::function<uint8_t *(uint32_t layer, uint32_t index)> page;
  // Where pages are not host memory: one is complete and its checksum right; all of these are in their places.
  std::function<void(uint32_t layer, uint32_t index)> arrived = nullptr;
  std::function<Status()> flush = nullptr;

  uint32_t pages() const { return (tokens + layout.page_tokens - 1) / layout.page_tokens; }
};

class PullSession final : public Session {
 public:
  explicit PullSession(const PullRequest &request);
  size_t want(iovec *out) override;
  // In the middle of a frame: its rest.
  size_t awaited() const override { return state_ == State::data ? (frame_pages_ - frame_done_) * request_.layout.page_bytes - page_have_ : 1; }
  void received(size_t bytes) override;
  size_t pending(iovec *out) override;
  void sent(size_t bytes) override { out_sent_ += bytes; }
  bool over() const override { return state_ == State::over; }

  // When over.
  ls_kv_end reason() const { return reason_; }
  const std::string &text() const { return text_; }
  uint64_t kv_received() const { return kv_received_; }

 private:
  enum class State { answer, frames, data, over };
  const PullRequest &request_;
  State state_ = State::answer;
  ls_kv_end reason_ = LS_KV_CORRUPT;
  std::string text_;
  FrameReader reader_;
  SmallFrame out_;
  size_t out_sent_ = 0;
  uint64_t kv_received_ = 0;
  uint32_t layer_ = 0, page_ = 0;         // expected next
  uint32_t frame_pages_ = 0, frame_done_ = 0;
  size_t page_have_ = 0;                  // bytes of the page that is arriving
  std::array<uint32_t, kMaxPagesPerFrame> sums_{};

  bool all_arrived() const { return request_.first_page >= request_.pages() || layer_ == request_.layout.layers; }
  void end(ls_kv_end reason, std::string text);
  void frame_arrived();
  void pages_arrived(Bytes table);
  void data_arrived(size_t bytes);
};

// Tells the sender that its copy is not wanted.
class DropSession final : public Session {
 public:
  explicit DropSession(uint64_t id);
  size_t want(iovec *out) override;
  void received(size_t bytes) override;
  size_t pending(iovec *out) override;
  void sent(size_t bytes) override { out_sent_ += bytes; }
  bool over() const override { return over_; }

 private:
  FrameReader reader_{0};
  SmallFrame out_;
  size_t out_sent_ = 0;
  bool over_ = false;
};

}  // namespace ls::kv
