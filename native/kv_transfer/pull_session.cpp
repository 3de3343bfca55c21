#include "pull_session.h"

#include <algorithm>

#include "bytes.h"
#include "page_sum.h"

namespace ls::kv {
namespace {

size_t rest_of(const SmallFrame &frame, size_t sent, iovec *out) {
  const Bytes bytes = frame.bytes();
  if (sent >= bytes.size()) return 0;
  out[0] = {const_cast<uint8_t *>(bytes.data()) + sent, bytes.size() - sent};
  return 1;
}

size_t target_of(FrameReader &reader, iovec *out) {
  const std::span<uint8_t> target = reader.want();
  if (target.empty()) return 0;
  out[0] = {target.data(), target.size()};
  return 1;
}

}  // namespace

PullSession::PullSession(const PullRequest &request) : request_(request), reader_(request.layout.page_bytes), page_(request.first_page) {
  uint8_t payload[16 + kLayoutBytes] = {};
  put(payload, request.id);
  put(payload + 8, request.first_page);
  encode_layout(request.layout, payload + 16);
  out_ = SmallFrame(FrameType::pull, payload);
}

size_t PullSession::pending(iovec *out) { return rest_of(out_, out_sent_, out); }

size_t PullSession::want(iovec *out) {
  if (state_ == State::over) return 0;
  if (state_ != State::data) return target_of(reader_, out);
  const size_t page_bytes = request_.layout.page_bytes;
  size_t count = 0;
  for (uint32_t i = frame_done_; i < frame_pages_; ++i) {
    const size_t have = i == frame_done_ ? page_have_ : 0;
    out[count++] = {request_.page(layer_, page_ + i) + have, page_bytes - have};
  }
  return count;
}

void PullSession::received(size_t bytes) {
  if (state_ == State::data) return data_arrived(bytes);
  reader_.received(bytes);
  if (!reader_.error().empty()) return end(LS_KV_CORRUPT, reader_.error());
  if (reader_.complete()) frame_arrived();
}

void PullSession::end(ls_kv_end reason, std::string text) {
  reason_ = reason;
  text_ = std::move(text);
  state_ = State::over;
}

void PullSession::frame_arrived() {
  const Bytes payload = reader_.payload();
  const FrameType type = reader_.type();
  if (type == FrameType::refuse) {
    Refusal refusal;
    if (std::string wrong = decode_refusal(payload, refusal); !wrong.empty()) return end(LS_KV_CORRUPT, wrong);
    const bool known = refusal.reason > LS_KV_DONE && refusal.reason <= LS_KV_AUTH;
    return end(known ? static_cast<ls_kv_end>(refusal.reason) : LS_KV_CORRUPT, refusal.text);
  }
  if (state_ == State::answer && type == FrameType::accept) {
    const auto tokens = get<uint32_t>(payload.data()), pages = get<uint32_t>(payload.data() + 4);
    if (tokens != request_.tokens || pages != request_.pages())
      return end(LS_KV_REFUSED, "tokens is " + std::to_string(tokens) + " on the prefill worker and " + std::to_string(request_.tokens) + " on the decode worker");
    if (get<uint64_t>(payload.data() + 8) != request_.content) return end(LS_KV_REFUSED, "the prompt's token ids on the prefill worker and on the decode worker differ");
    state_ = State::frames;
  } else if (state_ == State::frames && type == FrameType::pages && !all_arrived()) {
    pages_arrived(payload);
  } else if (state_ == State::frames && type == FrameType::end && all_arrived()) {
    if (get<uint64_t>(payload.data()) != kv_received_) return end(LS_KV_CORRUPT, "the sender counts another number of bytes");
    if (Status status = request_.flush ? request_.flush() : Status::good(); !status.ok()) return end(LS_KV_CORRUPT, "the pages of the device: " + status.text);
    out_ = SmallFrame(FrameType::ack, {});
    out_sent_ = 0;
    return end(LS_KV_DONE, {});
  } else {
    return end(LS_KV_CORRUPT, "a frame of type " + std::to_string(static_cast<uint32_t>(type)) + " is not expected now");
  }
  reader_.next();
}

// Frames come in one order without gaps, so that every byte has its place and the whole is bounded.
void PullSession::pages_arrived(Bytes table) {
  const auto layer = get<uint32_t>(table.data()), first = get<uint32_t>(table.data() + 4), count = get<uint32_t>(table.data() + 8);
  if (layer != layer_ || first != page_ || count > request_.pages() - page_)
    return end(LS_KV_CORRUPT, "a frame has layer " + std::to_string(layer) + ", pages " + std::to_string(first) + " + " + std::to_string(count) + ", expected layer " + std::to_string(layer_) +
                                  ", page " + std::to_string(page_));
  std::memcpy(sums_.data(), table.data() + kPagesFixed, 4 * size_t{count});
  frame_pages_ = count;
  frame_done_ = 0;
  page_have_ = 0;
  state_ = State::data;
}

void PullSession::data_arrived(size_t bytes) {
  const size_t page_bytes = request_.layout.page_bytes;
  kv_received_ += bytes;
  while (bytes > 0) {
    const size_t take = std::min(bytes, page_bytes - page_have_);
    page_have_ += take;
    bytes -= take;
    if (page_have_ < page_bytes) return;
    if (page_sum(request_.page(layer_, page_ + frame_done_), page_bytes) != sums_[frame_done_])
      return end(LS_KV_CORRUPT, "the checksum of layer " + std::to_string(layer_) + ", page " + std::to_string(page_ + frame_done_) + " is wrong");
    if (request_.arrived) request_.arrived(layer_, page_ + frame_done_);
    page_have_ = 0;
    if (++frame_done_ < frame_pages_) continue;
    page_ += frame_pages_;
    if (page_ == request_.pages()) {
      page_ = request_.first_page;
      ++layer_;
    }
    state_ = State::frames;
  }
}

DropSession::DropSession(uint64_t id) {
  uint8_t payload[8];
  put(payload, id);
  out_ = SmallFrame(FrameType::drop, payload);
}

size_t DropSession::want(iovec *out) { return over_ ? 0 : target_of(reader_, out); }
size_t DropSession::pending(iovec *out) { return rest_of(out_, out_sent_, out); }
void DropSession::received(size_t bytes) {
  reader_.received(bytes);
  // Whatever the answer: nothing follows from it.
  if (reader_.complete() || !reader_.error().empty()) over_ = true;
}

}  // namespace ls::kv
