// Bytes from strangers against both sides of a transfer, plain and under a key. The first byte picks the target. Whatever comes in: no fault,
// nothing written beyond the pages, memory bounded, and no conversation that goes on after nonsense.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kv_support.h"
#include "kv_transfer/bytes.h"
#include "kv_transfer/crc32c.h"
#include "kv_transfer/page_sum.h"

using namespace ls;
using namespace ls::kv;
using namespace ls::test;

namespace {

[[noreturn]] void broken(const char *what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// Gives the input in pieces of changing size, then the end of the stream; swallows what is written.
class Input final : public Transport {
 public:
  Input(Bytes bytes, size_t piece) : bytes_(bytes), piece_(std::max<size_t>(1, piece)) {}
  ssize_t read(iovec *segments, size_t count) override {
    if (bytes_.empty()) return 0;
    ssize_t moved = 0;
    for (size_t i = 0; i < count && !bytes_.empty() && static_cast<size_t>(moved) < piece_; ++i) {
      const size_t take = std::min({segments[i].iov_len, bytes_.size(), piece_ - static_cast<size_t>(moved)});
      std::memcpy(segments[i].iov_base, bytes_.data(), take);
      bytes_ = bytes_.subspan(take);
      moved += static_cast<ssize_t>(take);
    }
    return moved;
  }
  ssize_t write(iovec *segments, size_t count) override {
    ssize_t all = 0;
    for (size_t i = 0; i < count; ++i) {
      volatile uint8_t touch = static_cast<const uint8_t *>(segments[i].iov_base)[0];
      touch = static_cast<const uint8_t *>(segments[i].iov_base)[segments[i].iov_len - 1];
      (void)touch;
      all += static_cast<ssize_t>(segments[i].iov_len);
    }
    written += static_cast<uint64_t>(all);
    return all;
  }
  uint64_t written = 0;

 private:
  Bytes bytes_;
  size_t piece_;
};

void converse(Session &session, Side side, Bytes input, size_t piece, bool key) {
  const ByteVector secret(32, 9);
  const auto channel = make_channel(session, side, key ? Bytes(secret) : Bytes());
  Input transport(input, piece);
  for (int turn = 0; turn < 10'000; ++turn) {
    if (channel->sending() && channel->send(transport, 1 << 20) == Flow::closed) return;
    if (channel->finished()) return;
    const Flow flow = channel->receive(transport, 1 << 20);
    if (flow == Flow::closed || flow == Flow::failed) {
      channel->send(transport, 1 << 20);
      return;
    }
  }
  broken("a conversation does not end");
}

// Frames that are sound up to a few words, behind each other.
ByteVector frames_from(Bytes in, uint64_t page_bytes, uint64_t id, const Layout &layout) {
  ByteVector out;
  while (in.size() >= 4) {
    const uint8_t type = in[0] % 13, words = in[1] % 4, flips = in[2] % 3, place = in[3];
    in = in.subspan(4);
    ByteVector payload;
    switch (static_cast<FrameType>(type)) {
      case FrameType::pull:
        payload.resize(16 + kLayoutBytes);
        put(payload.data(), id);
        encode_layout(layout, payload.data() + 16);
        break;
      case FrameType::drop: payload.resize(8); break;
      case FrameType::accept:
        payload.resize(16);
        put(payload.data(), uint32_t{40});
        put(payload.data() + 4, uint32_t{3});
        put(payload.data() + 8, uint64_t{77});
        break;
      case FrameType::pages: {
        const uint32_t count = 1 + place % 4;
        payload.resize(kPagesFixed + count * (4 + page_bytes));
        put(payload.data() + 8, count);
        ByteVector zeros(page_bytes, 0);
        for (uint32_t i = 0; i < count; ++i) put(payload.data() + kPagesFixed + 4 * i, page_sum(zeros.data(), zeros.size()));
        break;
      }
      case FrameType::end: payload.resize(8); break;
      case FrameType::refuse: payload.resize(4 + place); break;
      case FrameType::hello: payload.assign(32, 1); break;
      case FrameType::proof_server: payload.assign(64, 1); break;
      case FrameType::proof_client: payload.assign(32, 1); break;
      default: payload.resize(place);
    }
    for (uint8_t n = 0; n < words && in.size() >= 5 && payload.size() >= 4; ++n, in = in.subspan(5))
      std::memcpy(payload.data() + in[0] % std::min<size_t>(payload.size() - 3, 32), in.data() + 1, 4);
    uint8_t header[kHeaderBytes];
    put(header, kMagic);
    put(header + 4, kVersion);
    put(header + 6, uint16_t{type});
    put(header + 8, static_cast<uint32_t>(payload.size()));
    const bool pages = type == static_cast<uint8_t>(FrameType::pages);
    put(header + 12, crc32c(crc32c(0, header, 12), payload.data(), pages ? kPagesFixed + 4 * (1 + place % 4) : payload.size()));
    const size_t at = out.size();
    out.insert(out.end(), header, header + kHeaderBytes);
    out.insert(out.end(), payload.begin(), payload.end());
    for (uint8_t n = 0; n < flips && in.size() >= 2; ++n, in = in.subspan(2)) out[at + (in[0] | in[1] << 8) % (out.size() - at)] ^= 0x40;
  }
  return out;
}

void fuzz_sender(Bytes in, bool sound, bool key) {
  const Layout layout = test_layout(2, 64);
  Endings endings;
  StagingStore store(std::chrono::milliseconds(60'000), endings);
  std::shared_ptr<Staged> staged;
  uint64_t id;
  if (!store.create(layout, 40, staged).ok() || !store.publish(std::move(staged), 77, id).ok()) broken("stage");
  const size_t piece = in.empty() ? 1 : in[0];
  {
    SendSession session(store, layout);
    const ByteVector frames = sound ? frames_from(in, 64, id, layout) : ByteVector(in.begin(), in.end());
    converse(session, Side::server, frames, piece, key);
  }
  // Still waiting, or gone with its memory.
  const uint64_t left = store.counts().staged_bytes;
  if (store.drop(id) == LS_KV_DROPPED ? left != 3 * 2 * 64 && left != 0 : left != 0) broken("a copy is lost");
  if (store.counts().staged_bytes != 0) broken("memory of a copy is lost");
}

void fuzz_receiver(Bytes in, bool sound, bool key) {
  const Layout layout = test_layout(2, 64);
  ByteVector memory(2 * 3 * 64, 0);
  memory.shrink_to_fit();
  PullRequest request{5, in.size() > 1 ? in[1] % 3u : 0u, 40, 77, layout, {}};
  request.page = [&](uint32_t layer, uint32_t index) {
    if (layer >= 2 || index >= 3 || index < request.first_page) broken("a page outside the request");
    return memory.data() + (layer * 3 + index) * 64;
  };
  const ByteVector frames = sound ? frames_from(in, 64, 5, layout) : ByteVector(in.begin(), in.end());
  PullSession session(request);
  converse(session, Side::client, frames, in.empty() ? 1 : in[0], key);
  if (session.over() && session.reason() == LS_KV_DONE && session.kv_received() != (3 - request.first_page) * 2 * 64) broken("done without all bytes");
  DropSession drop(5);
  converse(drop, Side::client, frames, 7, key);
}

void fuzz_layout(Bytes in) {
  Layout a, b = test_layout();
  const size_t size = in.size();
  ByteVector wire(kLayoutBytes);
  encode_layout(b, wire.data());
  for (; in.size() >= 2; in = in.subspan(2)) wire[in[0] % kLayoutBytes] = in[1];
  if (size % 16 == 3) wire.resize(size % kLayoutBytes);
  wire.shrink_to_fit();
  if (decode_layout(wire, a).empty() && layout_difference(a, b, "x", "y").empty() != (a == b)) broken("layouts that differ compare as equal");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size == 0) return 0;
  const Bytes in(data + 1, size - 1);
  switch (data[0] % 8) {
    case 0: fuzz_sender(in, false, false); break;
    case 1: fuzz_sender(in, true, false); break;
    case 2: fuzz_sender(in, data[0] & 8, true); break;
    case 3: fuzz_receiver(in, false, false); break;
    case 4: fuzz_receiver(in, true, false); break;
    case 5: fuzz_receiver(in, data[0] & 8, true); break;
    case 6: fuzz_receiver(in, true, false); break;
    default: fuzz_layout(in);
  }
  return 0;
}
