#include "channel.h"

#include "secure_channel.h"

namespace ls::kv {
namespace {

// Straight from the socket to where the bytes belong, and back.
class PlainChannel final : public Channel {
 public:
  explicit PlainChannel(Session &session) : session_(session) {}

  Flow receive(Transport &transport, size_t budget) override {
    iovec segments[kMaxSegments];
    for (size_t done = 0; done < budget;) {
      const size_t count = session_.want(segments);
      uint8_t extra;
      // Somebody who says more than the conversation has room for is not answered; a close must be seen, though.
      iovec probe{&extra, 1};
      const ssize_t got = count > 0 ? transport.read(segments, count) : transport.read(&probe, 1);
      if (got == -EAGAIN) return Flow::blocked;
      if (got <= 0) return Flow::closed;
      if (count == 0) {
        failure_ = {LS_KV_CORRUPT, "the peer sent more than was expected"};
        return Flow::failed;
      }
      session_.received(static_cast<size_t>(got));
      bytes_received_ += static_cast<size_t>(got);
      done += static_cast<size_t>(got);
    }
    return Flow::more;
  }

  Flow send(Transport &transport, size_t budget) override {
    iovec segments[kMaxSegments];
    for (size_t done = 0; done < budget;) {
      const size_t count = session_.pending(segments);
      if (count == 0) return Flow::blocked;
      const ssize_t put = transport.write(segments, count);
      if (put == -EAGAIN) return Flow::blocked;
      if (put < 0) return Flow::closed;
      session_.sent(static_cast<size_t>(put));
      done += static_cast<size_t>(put);
    }
    return Flow::more;
  }

  bool sending() override {
    iovec segments[kMaxSegments];
    return session_.pending(segments) > 0;
  }
  size_t awaited() const override { return session_.awaited(); }
  bool finished() override { return session_.over() && !sending(); }

 private:
  Session &session_;
};

}  // namespace

std::unique_ptr<Channel> make_channel(Session &session, Side side, Bytes key) {
  if (key.empty()) return std::make_unique<PlainChannel>(session);
  return std::make_unique<SecureChannel>(session, side, key);
}

}  // namespace ls::kv
