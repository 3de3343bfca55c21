#include "protocol.h"

#include <algorithm>

#include "bytes.h"
#include "crc32c.h"

namespace ls::kv {
namespace {

void encode_header(uint8_t *out, FrameType type, uint32_t length) {
  put(out, kMagic);
  put(out + 4, kVersion);
  put(out + 6, static_cast<uint16_t>(type));
  put(out + 8, length);
}

// Payload length of each type: exact, or the most for refusals and pages.
struct Limit {
  size_t least, most;
};
Limit limit_of(FrameType type, uint64_t page_bytes) {
  switch (type) {
    case FrameType::pull: return {16 + kLayoutBytes, 16 + kLayoutBytes};
    case FrameType::drop: return {8, 8};
    case FrameType::accept: return {16, 16};
    case FrameType::pages:
      if (page_bytes == 0) break;
      return {kPagesFixed + 4 + page_bytes, kPagesFixed + kMaxPagesPerFrame * (4 + page_bytes)};
    case FrameType::end: return {8, 8};
    case FrameType::ack: return {0, 0};
    case FrameType::refuse: return {4, 4 + kMaxText};
    case FrameType::dropped: return {0, 0};
    case FrameType::hello: return {32, 32};
    case FrameType::proof_server: return {64, 64};
    case FrameType::proof_client: return {32, 32};
  }
  return {1, 0};
}

}  // namespace

SmallFrame::SmallFrame(FrameType type, Bytes payload) : size_(kHeaderBytes + payload.size()) {
  encode_header(data_.data(), type, static_cast<uint32_t>(payload.size()));
  std::copy(payload.begin(), payload.end(), data_.begin() + kHeaderBytes);
  put(data_.data() + 12, crc32c(crc32c(0, data_.data(), 12), payload.data(), payload.size()));
}

SmallFrame refuse_frame(uint32_t reason, const std::string &text) {
  uint8_t payload[4 + kMaxText];
  put(payload, reason);
  const size_t bytes = std::min(text.size(), kMaxText);
  std::copy_n(text.data(), bytes, payload + 4);
  return SmallFrame(FrameType::refuse, {payload, 4 + bytes});
}

std::string decode_refusal(Bytes payload, Refusal &out) {
  if (payload.size() < 4) return "a refusal of " + std::to_string(payload.size()) + " bytes";
  out.reason = get<uint32_t>(payload.data());
  out.text.assign(payload.begin() + 4, payload.end());
  for (char &c : out.text)
    if (c < ' ' || c > '~') c = '?';
  return {};
}

size_t encode_pages(uint8_t *out, uint32_t layer, uint32_t first, std::span<const uint32_t> page_crcs, uint64_t page_bytes) {
  const auto count = static_cast<uint32_t>(page_crcs.size());
  encode_header(out, FrameType::pages, static_cast<uint32_t>(kPagesFixed + count * (4 + page_bytes)));
  uint8_t *table = out + kHeaderBytes;
  put(table, layer);
  put(table + 4, first);
  put(table + 8, count);
  put(table + 12, uint32_t{0});
  std::memcpy(table + kPagesFixed, page_crcs.data(), page_crcs.size_bytes());
  const size_t table_bytes = kPagesFixed + page_crcs.size_bytes();
  put(out + 12, crc32c(crc32c(0, out, 12), table, table_bytes));
  return kHeaderBytes + table_bytes;
}

uint32_t pages_per_frame(uint64_t page_bytes) { return static_cast<uint32_t>(std::clamp<uint64_t>(kFrameTarget / page_bytes, 1, kMaxPagesPerFrame)); }

std::span<uint8_t> FrameReader::want() {
  if (complete_ || !error_.empty()) return {};
  return {data_.data() + have_, need_ - have_};
}

void FrameReader::received(size_t bytes) {
  have_ += bytes;
  // A frame without payload is complete with its header.
  while (have_ == need_ && !complete_ && error_.empty()) {
    if (have_ == kHeaderBytes && need_ == kHeaderBytes) {
      header_arrived();
      if (need_ == kHeaderBytes && error_.empty()) table_arrived();
    } else {
      table_arrived();
    }
  }
}

void FrameReader::header_arrived() {
  const uint8_t *at = data_.data();
  if (const auto magic = get<uint32_t>(at); magic != kMagic) {
    error_ = "the peer does not speak this protocol";
    return;
  }
  if (const auto version = get<uint16_t>(at + 4); version != kVersion) {
    error_ = "protocol version is " + std::to_string(version) + ", expected " + std::to_string(kVersion);
    return;
  }
  header_ = {static_cast<FrameType>(get<uint16_t>(at + 6)), get<uint32_t>(at + 8), get<uint32_t>(at + 12)};
  const Limit limit = limit_of(header_.type, page_bytes_);
  if (header_.length < limit.least || header_.length > limit.most) {
    error_ = "a frame of type " + std::to_string(static_cast<uint32_t>(header_.type)) + " and " + std::to_string(header_.length) + " bytes is not expected";
    return;
  }
  if (header_.type != FrameType::pages) {
    need_ = kHeaderBytes + header_.length;
    return;
  }
  // The length alone tells the number of pages.
  const uint64_t body = header_.length - kPagesFixed;
  if (body % (4 + page_bytes_) != 0) {
    error_ = "a pages frame of " + std::to_string(header_.length) + " bytes is not whole pages";
    return;
  }
  need_ = kHeaderBytes + kPagesFixed + static_cast<size_t>(4 * (body / (4 + page_bytes_)));
}

void FrameReader::table_arrived() {
  const Bytes body = payload();
  if (crc32c(crc32c(0, data_.data(), 12), body.data(), body.size()) != header_.crc) {
    error_ = "the checksum of a frame is wrong";
    return;
  }
  if (header_.type == FrameType::pages && get<uint32_t>(body.data() + 8) != (body.size() - kPagesFixed) / 4) {
    error_ = "the length of a pages frame is not that of its pages";
    return;
  }
  complete_ = true;
}

}  // namespace ls::kv
