#include "send_session.h"

#include <algorithm>

#include "bytes.h"

namespace ls::kv {
namespace {

const char *explain(ls_kv_end reason) {
  switch (reason) {
    case LS_KV_USED: return "this transfer id was used before";
    case LS_KV_EXPIRED: return "the copy under this transfer id was kept for its time and is gone";
    case LS_KV_DROPPED: return "the copy under this transfer id was dropped";
    default: return "this transfer id is not known";
  }
}

}  // namespace

void SendSession::say(const SmallFrame &frame) {
  const Bytes bytes = frame.bytes();
  std::copy(bytes.begin(), bytes.end(), head_.begin() + static_cast<std::ptrdiff_t>(head_bytes_));
  head_bytes_ += bytes.size();
}

size_t SendSession::want(iovec *out) {
  if (state_ == State::sending || state_ == State::over) return 0;
  const std::span<uint8_t> target = reader_.want();
  if (target.empty()) return 0;
  out[0] = {target.data(), target.size()};
  return 1;
}

void SendSession::received(size_t bytes) {
  reader_.received(bytes);
  if (!reader_.error().empty()) {
    if (state_ == State::request) {
      say(refuse_frame(LS_KV_CORRUPT, reader_.error()));
    } else {
      closed(LS_KV_RESET, reader_.error());
    }
    state_ = State::over;
    return;
  }
  if (!reader_.complete()) return;
  if (state_ == State::request) {
    request_arrived();
  } else {
    if (reader_.type() == FrameType::ack) {
      claimed_ = false;
      store_.finish(id_, LS_KV_DONE, kv_sent_);
    } else {
      closed(LS_KV_RESET, "the receiver did not acknowledge");
    }
    state_ = State::over;
  }
  reader_.next();
}

void SendSession::request_arrived() {
  const Bytes payload = reader_.payload();
  state_ = State::over;
  switch (reader_.type()) {
    case FrameType::pull:
      requested_ = true;
      return pull_arrived(payload);
    case FrameType::drop:
      requested_ = true;
      store_.drop(get<uint64_t>(payload.data()));
      return say(SmallFrame(FrameType::dropped, {}));
    case FrameType::hello: return say(refuse_frame(LS_KV_AUTH, "this worker has no transfer key, the receiver has one"));
    default: return say(refuse_frame(LS_KV_CORRUPT, "expected a request"));
  }
}

void SendSession::pull_arrived(Bytes payload) {
  id_ = get<uint64_t>(payload.data());
  first_page_ = page_ = get<uint32_t>(payload.data() + 8);
  Layout theirs;
  std::string wrong = decode_layout(payload.subspan(16), theirs);
  if (wrong.empty()) wrong = layout_difference(layout_, theirs, "prefill worker", "decode worker");
  if (!wrong.empty()) return say(refuse_frame(LS_KV_REFUSED, wrong));
  if (const ls_kv_end reason = store_.claim(id_, staged_); reason != LS_KV_DONE) return say(refuse_frame(reason, explain(reason)));
  claimed_ = true;
  if (first_page_ > staged_->pages()) {
    say(refuse_frame(LS_KV_REFUSED, "first page is " + std::to_string(first_page_) + ", the copy has " + std::to_string(staged_->pages()) + " pages"));
    return closed(LS_KV_REFUSED, "pages beyond the copy were asked for");
  }
  uint8_t accept[16];
  put(accept, staged_->tokens());
  put(accept + 4, staged_->pages());
  put(accept + 8, staged_->content);
  say(SmallFrame(FrameType::accept, accept));
  state_ = State::sending;
  next_frame();
}

// Queues one more frame behind what is queued.
void SendSession::next_frame() {
  if (first_page_ < staged_->pages() && layer_ < layout_.layers) {
    const uint32_t count = std::min(pages_per_frame(layout_.page_bytes), staged_->pages() - page_);
    head_bytes_ += encode_pages(head_.data() + head_bytes_, layer_, page_, {staged_->sums(layer_, page_), count}, layout_.page_bytes);
    data_ = staged_->data(layer_, page_);
    data_bytes_ = count * layout_.page_bytes;
    page_ += count;
    if (page_ == staged_->pages()) {
      page_ = first_page_;
      ++layer_;
    }
    return;
  }
  uint8_t total[8];
  put(total, kv_sent_);
  say(SmallFrame(FrameType::end, total));
  state_ = State::acknowledgement;
}

size_t SendSession::pending(iovec *out) {
  size_t count = 0;
  if (head_sent_ < head_bytes_) out[count++] = {head_.data() + head_sent_, head_bytes_ - head_sent_};
  if (data_sent_ < data_bytes_) out[count++] = {const_cast<uint8_t *>(data_) + data_sent_, data_bytes_ - data_sent_};
  return count;
}

void SendSession::sent(size_t bytes) {
  const size_t of_head = std::min(bytes, head_bytes_ - head_sent_), of_data = bytes - of_head;
  head_sent_ += of_head;
  data_sent_ += of_data;
  kv_sent_ += of_data;
  if (head_sent_ < head_bytes_ || data_sent_ < data_bytes_) return;
  head_bytes_ = head_sent_ = data_bytes_ = data_sent_ = 0;
  if (state_ == State::sending) next_frame();
  else if (state_ == State::acknowledgement) staged_.reset();  // the kernel has it all
}

void SendSession::closed(ls_kv_end reason, const std::string &text) {
  data_bytes_ = data_sent_ = 0;
  staged_.reset();
  if (!claimed_) return;
  claimed_ = false;
  store_.finish(id_, reason, kv_sent_, text);
}

}  // namespace ls::kv
