// The prefill side of one connection: a request comes in, a staged copy or a refusal goes out.
#pragma once
#include "channel.h"
#include "staging.h"

namespace ls::kv {

class SendSession final : public Session {
 public:
  SendSession(StagingStore &store, const Layout &layout) : store_(store), layout_(layout) {}
  ~SendSession() override { closed(LS_KV_RESET, "the receiver closed the connection"); }

  size_t want(iovec *out) override;
  void received(size_t bytes) override;
  size_t pending(iovec *out) override;
  void sent(size_t bytes) override;
  bool over() const override { return state_ == State::over; }

  // A sound request has come; before that, the peer is nobody.
  bool requested() const { return requested_; }
  // The id that is being sent, else 0.
  uint64_t sending_id() const { return claimed_ ? id_ : 0; }
  // The connection is gone before the end of the conversation.
  void closed(ls_kv_end reason, const std::string &text);

 private:
  enum class State { request, sending, acknowledgement, over };
  StagingStore &store_;
  const Layout &layout_;
  State state_ = State::request;
  bool requested_ = false, claimed_ = false;
  FrameReader reader_{0};
  uint64_t id_ = 0, kv_sent_ = 0;
  std::shared_ptr<Staged> staged_;
  uint32_t first_page_ = 0, layer_ = 0, page_ = 0;  // of the next frame

  std::array<uint8_t, 2 * (kHeaderBytes + kMaxSmall)> head_{};  // frames and tables on their way out
  size_t head_bytes_ = 0, head_sent_ = 0;
  const uint8_t *data_ = nullptr;  // KV behind it, in the staged copy
  size_t data_bytes_ = 0, data_sent_ = 0;

  void say(const SmallFrame &frame);
  void request_arrived();
  void pull_arrived(Bytes payload);
  void next_frame();
};

}  // namespace ls::kv
