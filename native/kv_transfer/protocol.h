// Frames of the transfer protocol, version 1. Little-endian. docs/kv-transfer.md describes the conversation.
//
//   header (16 bytes)   magic u32 "LSKV" · version u16 · type u16 · payload length u32 · CRC-32C u32
// The checksum covers the first 12 bytes of the header and the payload; of a `pages` frame only the payload's table, which holds a checksum
// of each page.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "layout.h"

struct iovec;

namespace ls::kv {

constexpr uint32_t kMagic = 0x564b534c;
constexpr uint16_t kVersion = 1;
constexpr size_t kHeaderBytes = 16;
constexpr size_t kMaxSmall = 512;  // longest payload of every frame but `pages`
constexpr size_t kMaxText = 400;
constexpr size_t kPagesFixed = 16;
constexpr uint32_t kMaxPagesPerFrame = 64;
constexpr size_t kFrameTarget = 1 << 19;  // bytes of KV in a frame, if a page is smaller

enum class FrameType : uint16_t {
  pull = 1,     // client: id u64, first page u32, 0 u32, layout 128
  drop = 2,     // client: id u64
  accept = 3,   // server: tokens u32, pages u32, digest of the tokens u64
  pages = 4,    // server: layer u32, first u32, count u32, 0 u32, CRC-32C u32 [count], KV [count][page bytes]
  end = 5,      // server: bytes of KV sent u64
  ack = 6,      // client: nothing; all arrived and is sound
  refuse = 7,   // server: reason u32 (ls_kv_end), UTF-8 text for people
  dropped = 8,  // server: nothing
  hello = 9,    // client: nonce 32; the first frame when there is a pre-shared key
  proof_server = 10,  // server: nonce 32, HMAC 32
  proof_client = 11   // client: HMAC 32
};

struct Header {
  FrameType type{};
  uint32_t length = 0, crc = 0;
};

// The frame complete with header and checksum. payload: <= kMaxSmall bytes.
class SmallFrame {
 public:
  SmallFrame() = default;
  SmallFrame(FrameType type, Bytes payload);
  Bytes bytes() const { return {data_.data(), size_}; }

 private:
  std::array<uint8_t, kHeaderBytes + kMaxSmall> data_;
  size_t size_ = 0;
};
// text is cut to kMaxText bytes.
SmallFrame refuse_frame(uint32_t reason, const std::string &text);
struct Refusal {
  uint32_t reason = 0;
  std::string text;  // what is not printable ASCII is replaced
};
// An error text, or empty.
std::string decode_refusal(Bytes payload, Refusal &out);

// Writes the header of a `pages` frame and the fixed part of its table; the caller has the checksums behind them.
size_t encode_pages(uint8_t *out, uint32_t layer, uint32_t first, std::span<const uint32_t> page_crcs, uint64_t page_bytes);
uint32_t pages_per_frame(uint64_t page_bytes);

// Takes a frame off a stream of bytes: all of a small one, or header and table of a `pages` frame, whose KV the owner reads itself.
class FrameReader {
 public:
  // page_bytes: what one page of a `pages` frame holds; 0 = such frames are refused.
  explicit FrameReader(uint64_t page_bytes) : page_bytes_(page_bytes) {}

  // Where the next bytes go; nothing once a frame is complete or broken.
  std::span<uint8_t> want();
  void received(size_t bytes);

  bool complete() const { return complete_; }
  const std::string &error() const { return error_; }  // not empty: the stream is of no further use
  FrameType type() const { return header_.type; }
  Bytes payload() const { return {data_.data() + kHeaderBytes, have_ - kHeaderBytes}; }  // of a `pages` frame: its table
  void next() { have_ = 0, need_ = kHeaderBytes, complete_ = false; }

 private:
  uint64_t page_bytes_;
  std::array<uint8_t, kHeaderBytes + kMaxSmall> data_;
  size_t have_ = 0, need_ = kHeaderBytes;
  bool complete_ = false;
  Header header_;
  std::string error_;
  void header_arrived();
  void table_arrived();
};
static_assert(kPagesFixed + 4 * kMaxPagesPerFrame <= kMaxSmall);

}  // namespace ls::kv
