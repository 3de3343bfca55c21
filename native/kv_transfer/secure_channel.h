// The channel under a pre-shared key.
//
//   client: hello{nonce}            server: proof_server{nonce, HMAC(key, "server" client nonce, server nonce)}
//   client: proof_client{HMAC(key, "client" …)}
// then in both directions records: length u32 · cipher text · tag 16, ChaCha20-Poly1305 under HMAC(key, direction, nonces), the length as
// associated data and the number of the record as nonce. Whoever has not proved the key is told nothing and costs one record buffer.
#pragma once
#include <vector>

#include "channel.h"

namespace ls::kv {

class SecureChannel final : public Channel {
 public:
  SecureChannel(Session &session, Side side, Bytes key);
  Flow receive(Transport &transport, size_t budget) override;
  Flow send(Transport &transport, size_t budget) override;
  bool sending() override;
  bool finished() override { return session_.over() && !sending(); }

 private:
  static constexpr size_t kRecord = 1 << 16, kLength = 4, kTag = 16;
  using Nonce = std::array<uint8_t, 32>;

  Session &session_;
  const Side side_;
  const std::vector<uint8_t> key_;
  bool open_ = false, closing_ = false;
  FrameReader handshake_{0};
  Nonce client_nonce_{}, server_nonce_{};
  AeadKey send_key_{}, receive_key_{};
  uint64_t sent_records_ = 0, received_records_ = 0;
  std::vector<uint8_t> in_, out_;  // one record each; made when the handshake is done, before that out_ is a frame
  size_t in_have_ = 0, out_sent_ = 0;

  Digest proof(std::string_view side) const;
  void derive_keys();
  bool handshake_frame();
  bool record_arrived();
  bool deliver(Bytes data);
  void seal();
  Flow fail(ls_kv_end reason, std::string text);
  void say(FrameType type, Bytes payload);
};

}  // namespace ls::kv
