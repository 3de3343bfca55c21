// Between a conversation (Session), which only says where bytes come from and go to, and whatever carries them. With a pre-shared key the
// channel first proves both sides to each other and then encrypts; the session does not notice.
#pragma once
#include <sys/types.h>
#include <sys/uio.h>

#include <memory>
#include <optional>
#include <string>

#include "aead.h"
#include "backend.h"
#include "protocol.h"

namespace ls::kv {

constexpr size_t kMaxSegments = kMaxPagesPerFrame + 2;

class Session {
 public:
  virtual ~Session() = default;
  // Where the next received bytes go, in this order: segments, at most kMaxSegments. 0 = nothing is expected now.
  virtual size_t want(iovec *out) = 0;
  // How many bytes are sure to come before anything is answered; waking up for fewer is of no use.
  virtual size_t awaited() const { return 1; }
  // `bytes` of them have arrived.
  virtual void received(size_t bytes) = 0;
  // What is to be sent; 0 = nothing now.
  virtual size_t pending(iovec *out) = 0;
  virtual void sent(size_t bytes) = 0;
  // The conversation has ended; what is pending is still sent.
  virtual bool over() const = 0;
};

// A stream of bytes, as a non-blocking socket is.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual ssize_t read(iovec *segments, size_t count) = 0;  // bytes, 0 = the peer closed, -errno
  virtual ssize_t write(iovec *segments, size_t count) = 0;  // bytes, -errno
};

enum class Flow {
  blocked,  // nothing more can be done now
  more,     // the budget is used up
  closed,   // the peer closed or reset the stream
  failed    // the peer broke the protocol of the channel: failure() says how
};
struct ChannelFailure {
  ls_kv_end reason = LS_KV_CORRUPT;
  std::string text;
};

class Channel {
 public:
  virtual ~Channel() = default;
  // Moves about `budget` bytes at most.
  virtual Flow receive(Transport &transport, size_t budget) = 0;
  virtual Flow send(Transport &transport, size_t budget) = 0;
  // Bytes wait to be sent.
  virtual bool sending() = 0;
  // See Session::awaited(); counted on the wire.
  virtual size_t awaited() const { return 1; }
  // The last thing to say has been said.
  virtual bool finished() = 0;
  uint64_t bytes_received() const { return bytes_received_; }
  const ChannelFailure &failure() const { return failure_; }

 protected:
  uint64_t bytes_received_ = 0;
  ChannelFailure failure_;
};

enum class Side { client, server };
// key: empty = plain. The session outlives the channel.
std::unique_ptr<Channel> make_channel(Session &session, Side side, Bytes key);

}  // namespace ls::kv
