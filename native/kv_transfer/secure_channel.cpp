#include "secure_channel.h"

#include <algorithm>
#include <cstring>

#include "bytes.h"
#include "random.h"

namespace ls::kv {
namespace {

Bytes text_bytes(std::string_view text) { return {reinterpret_cast<const uint8_t *>(text.data()), text.size()}; }

AeadNonce record_nonce(uint64_t number) {
  AeadNonce nonce{};
  put(nonce.data() + 4, number);
  return nonce;
}

}  // namespace

SecureChannel::SecureChannel(Session &session, Side side, Bytes key) : session_(session), side_(side), key_(key.begin(), key.end()) {
  Nonce &own = side == Side::client ? client_nonce_ : server_nonce_;
  if (Status status = random_bytes(own); !status.ok()) {
    failure_ = {LS_KV_AUTH, status.text};
    closing_ = true;
    return;
  }
  if (side == Side::client) say(FrameType::hello, client_nonce_);
}

void SecureChannel::say(FrameType type, Bytes payload) {
  const SmallFrame frame(type, payload);
  out_.assign(frame.bytes().begin(), frame.bytes().end());
  out_sent_ = 0;
}

Digest SecureChannel::proof(std::string_view side) const { return hmac_sha256(key_, {text_bytes("layerscale kv transfer 1 "), text_bytes(side), client_nonce_, server_nonce_}); }

void SecureChannel::derive_keys() {
  const Digest to_server = proof("keys to server"), to_client = proof("keys to client");
  send_key_ = side_ == Side::client ? to_server : to_client;
  receive_key_ = side_ == Side::client ? to_client : to_server;
  in_.resize(kLength + kRecord + kTag);
  open_ = true;
}

Flow SecureChannel::fail(ls_kv_end reason, std::string text) {
  failure_ = {reason, std::move(text)};
  closing_ = true;
  return Flow::failed;
}

// False: the handshake is at its end, and not well.
bool SecureChannel::handshake_frame() {
  const Bytes payload = handshake_.payload();
  const auto refuse = [&](const char *text) {
    if (side_ == Side::server) {
      const SmallFrame frame = refuse_frame(LS_KV_AUTH, text);
      out_.assign(frame.bytes().begin(), frame.bytes().end());
      out_sent_ = 0;
    }
    fail(LS_KV_AUTH, text);
    return false;
  };
  if (side_ == Side::client && handshake_.type() == FrameType::refuse) {
    Refusal refusal;
    if (!decode_refusal(payload, refusal).empty()) return refuse("the peer refused and did not say why");
    fail(LS_KV_AUTH, refusal.text);
    return false;
  }
  if (side_ == Side::server && handshake_.type() == FrameType::hello && client_nonce_ == Nonce{}) {
    std::copy(payload.begin(), payload.end(), client_nonce_.begin());
    if (client_nonce_ == Nonce{}) return refuse("the nonce is zero");
    uint8_t answer[64];
    std::copy(server_nonce_.begin(), server_nonce_.end(), answer);
    const Digest mine = proof("server");
    std::copy(mine.begin(), mine.end(), answer + 32);
    say(FrameType::proof_server, answer);
  } else if (side_ == Side::client && handshake_.type() == FrameType::proof_server) {
    std::copy_n(payload.begin(), 32, server_nonce_.begin());
    if (!equal_secret(proof("server"), payload.subspan(32))) return refuse("the sender does not have this worker's transfer key");
    say(FrameType::proof_client, proof("client"));
    derive_keys();
  } else if (side_ == Side::server && handshake_.type() == FrameType::proof_client && client_nonce_ != Nonce{}) {
    if (!equal_secret(proof("client"), payload)) return refuse("the receiver does not have this worker's transfer key");
    derive_keys();
  } else {
    return refuse("this worker wants the transfer key proved first");
  }
  handshake_.next();
  return true;
}

bool SecureChannel::deliver(Bytes data) {
  while (!data.empty()) {
    iovec segments[kMaxSegments];
    const size_t count = session_.want(segments);
    if (count == 0) return false;
    size_t moved = 0;
    for (size_t i = 0; i < count && moved < data.size(); ++i) {
      const size_t take = std::min(segments[i].iov_len, data.size() - moved);
      std::memcpy(segments[i].iov_base, data.data() + moved, take);
      moved += take;
    }
    session_.received(moved);
    data = data.subspan(moved);
  }
  return true;
}

bool SecureChannel::record_arrived() {
  const size_t length = in_have_ - kLength - kTag;
  AeadTag tag;
  std::copy_n(in_.begin() + static_cast<std::ptrdiff_t>(kLength + length), kTag, tag.begin());
  const std::span<uint8_t> text(in_.data() + kLength, length);
  if (!aead_open(receive_key_, record_nonce(received_records_++), Bytes(in_.data(), kLength), text, tag)) {
    fail(LS_KV_CORRUPT, "an encrypted record was altered");
    return false;
  }
  in_have_ = 0;
  if (deliver(text)) return true;
  fail(LS_KV_CORRUPT, "the peer sent more than was expected");
  return false;
}

Flow SecureChannel::receive(Transport &transport, size_t budget) {
  for (size_t done = 0; done < budget;) {
    if (closing_) return Flow::failed;
    std::span<uint8_t> target;
    if (!open_) {
      target = handshake_.want();
    } else if (in_have_ < kLength) {
      target = {in_.data() + in_have_, kLength - in_have_};
    } else {
      const uint32_t length = get<uint32_t>(in_.data());
      if (length == 0 || length > kRecord) return fail(LS_KV_CORRUPT, "an encrypted record of " + std::to_string(length) + " bytes");
      target = {in_.data() + in_have_, kLength + length + kTag - in_have_};
    }
    iovec segment{target.data(), target.size()};
    const ssize_t got = transport.read(&segment, 1);
    if (got == -EAGAIN) return Flow::blocked;
    if (got <= 0) return Flow::closed;
    bytes_received_ += static_cast<size_t>(got);
    done += static_cast<size_t>(got);
    if (!open_) {
      handshake_.received(static_cast<size_t>(got));
      if (!handshake_.error().empty()) return fail(LS_KV_CORRUPT, handshake_.error());
      if (handshake_.complete() && !handshake_frame()) return Flow::failed;
      continue;
    }
    in_have_ += static_cast<size_t>(got);
    if (in_have_ > kLength && in_have_ == kLength + get<uint32_t>(in_.data()) + kTag && !record_arrived()) return Flow::failed;
  }
  return Flow::more;
}

void SecureChannel::seal() {
  iovec segments[kMaxSegments];
  out_.resize(kLength);
  while (out_.size() < kLength + kRecord) {
    const size_t count = session_.pending(segments);
    if (count == 0) break;
    size_t moved = 0;
    for (size_t i = 0; i < count && out_.size() < kLength + kRecord; ++i) {
      const auto *from = static_cast<const uint8_t *>(segments[i].iov_base);
      const size_t take = std::min(segments[i].iov_len, kLength + kRecord - out_.size());
      out_.insert(out_.end(), from, from + take);
      moved += take;
    }
    session_.sent(moved);
  }
  out_sent_ = 0;
  if (out_.size() == kLength) return out_.clear();
  put(out_.data(), static_cast<uint32_t>(out_.size() - kLength));
  const AeadTag tag = aead_seal(send_key_, record_nonce(sent_records_++), Bytes(out_.data(), kLength), std::span(out_).subspan(kLength));
  out_.insert(out_.end(), tag.begin(), tag.end());
}

Flow SecureChannel::send(Transport &transport, size_t budget) {
  for (size_t done = 0; done < budget;) {
    if (out_sent_ == out_.size()) {
      out_.clear();
      out_sent_ = 0;
      if (!open_ || closing_) return Flow::blocked;
      seal();
      if (out_.empty()) return Flow::blocked;
    }
    iovec segment{out_.data() + out_sent_, out_.size() - out_sent_};
    const ssize_t put = transport.write(&segment, 1);
    if (put == -EAGAIN) return Flow::blocked;
    if (put < 0) return Flow::closed;
    out_sent_ += static_cast<size_t>(put);
    done += static_cast<size_t>(put);
  }
  return Flow::more;
}

bool SecureChannel::sending() {
  if (out_sent_ < out_.size()) return true;
  iovec segments[kMaxSegments];
  return open_ && !closing_ && session_.pending(segments) > 0;
}

}  // namespace ls::kv
