// The parts of a transfer without sockets: sums, ciphers, layout, frames, staged copies and the two conversations.
#include <cstring>
#include <random>

#include "kv_support.h"
#include "kv_transfer/bytes.h"
#include "kv_transfer/crc32c.h"
#include "kv_transfer/page_sum.h"

using namespace ls;
using namespace ls::kv;
using namespace ls::test;

namespace {

ByteVector hex(std::string_view text) {
  ByteVector out;
  for (size_t i = 0; i + 1 < text.size(); i += 2) out.push_back(static_cast<uint8_t>(std::stoi(std::string(text.substr(i, 2)), nullptr, 16)));
  return out;
}
template <size_t N>
std::array<uint8_t, N> array(const ByteVector &bytes) {
  std::array<uint8_t, N> out;
  CHECK_EQ(bytes.size(), N);
  std::copy(bytes.begin(), bytes.end(), out.begin());
  return out;
}
template <class A>
ByteVector bytes_of(const A &a) {
  return ByteVector(a.begin(), a.end());
}
Bytes text(std::string_view t) { return {reinterpret_cast<const uint8_t *>(t.data()), t.size()}; }
ByteVector counting(size_t n, uint8_t first = 0) {
  ByteVector out(n);
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(first + i);
  return out;
}

// RFC 8439 2.8.2.
const char *const kSunscreen = "Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would be it.";

}  // namespace

TEST("kv unit: CRC-32C") {
  CHECK_EQ(crc32c(0, "123456789", 9), 0xE3069283u);
  const ByteVector zeros(32, 0);
  CHECK_EQ(crc32c(0, zeros.data(), 32), 0x8A9136AAu);  // RFC 3720 B.4
  std::mt19937 random(1);
  ByteVector data(2000);
  for (uint8_t &b : data) b = static_cast<uint8_t>(random());
  for (const size_t n : {0ul, 1ul, 7ul, 8ul, 9ul, 999ul, 2000ul}) CHECK_EQ(crc32c(crc32c(0, data.data(), n / 3), data.data() + n / 3, n - n / 3), crc32c(0, data.data(), n));
}

// The definition, word by word.
static uint32_t plain_page_sum(const ByteVector &data) {
  uint64_t a[8] = {}, b[8] = {};
  for (size_t at = 0; at < data.size(); at += 64)
    for (size_t lane = 0; lane < 8; ++lane) {
      uint64_t word = 0;
      for (size_t i = 0; i < 8; ++i)
        if (at + 8 * lane + i < data.size()) word |= uint64_t{data[at + 8 * lane + i]} << 8 * i;
      a[lane] += word;
      b[lane] += a[lane];
    }
  uint64_t h = data.size();
  for (size_t lane = 0; lane < 8; ++lane)
    for (const uint64_t v : {a[lane], b[lane]}) {
      h = (h ^ v) * 0x9E3779B97F4A7C15u;
      h ^= h >> 29;
    }
  return static_cast<uint32_t>(h ^ h >> 32);
}

TEST("kv unit: the sum of a page is the definition's, and notices bits, swaps and lengths") {
  std::mt19937 random(2);
  for (const size_t n : {0ul, 1ul, 8ul, 63ul, 64ul, 65ul, 128ul, 1000ul, 4096ul}) {
    ByteVector data(n);
    for (uint8_t &b : data) b = static_cast<uint8_t>(random());
    const uint32_t sum = page_sum(data.data(), n);
    CHECK_EQ(sum, plain_page_sum(data));
    for (size_t bit = 0; bit < 8 * n; ++bit) {
      data[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      CHECK(page_sum(data.data(), n) != sum);
      data[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    }
    if (n >= 128) {
      // Words of one lane that changed places, and words of two lanes.
      for (const size_t other : {64ul, 8ul}) {
        std::swap_ranges(data.begin(), data.begin() + 8, data.begin() + static_cast<std::ptrdiff_t>(other));
        CHECK(page_sum(data.data(), n) != sum);
        std::swap_ranges(data.begin(), data.begin() + 8, data.begin() + static_cast<std::ptrdiff_t>(other));
      }
    }
    data.push_back(0);
    CHECK(page_sum(data.data(), n + 1) != sum);
  }
}

TEST("kv unit: SHA-256 and HMAC-SHA256 test vectors") {
  CHECK(bytes_of(sha256(text("abc"))) == hex("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
  CHECK(bytes_of(sha256({})) == hex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
  CHECK(bytes_of(sha256(text("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))) == hex("248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
  Sha256 million;
  const ByteVector part(997, 'a');
  for (size_t left = 1'000'000; left > 0;) {
    const size_t n = std::min(left, part.size());
    million.add(Bytes(part.data(), n));
    left -= n;
  }
  CHECK(bytes_of(million.finish()) == hex("cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));
  // RFC 4231 cases 1, 2 and 6.
  CHECK(bytes_of(hmac_sha256(ByteVector(20, 0x0b), {text("Hi There")})) == hex("b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"));
  CHECK(bytes_of(hmac_sha256(text("Jefe"), {text("what do ya want "), text("for nothing?")})) == hex("5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"));
  CHECK(bytes_of(hmac_sha256(ByteVector(131, 0xaa), {text("Test Using Larger Than Block-Size Key - Hash Key First")})) == hex("60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"));
  CHECK(equal_secret(text("abc"), text("abc")) && !equal_secret(text("abc"), text("abd")) && !equal_secret(text("abc"), text("ab")));
}

TEST("kv unit: ChaCha20-Poly1305 test vectors (RFC 8439)") {
  ByteVector plain(text(kSunscreen).begin(), text(kSunscreen).end());
  ByteVector stream = plain;
  chacha20(array<32>(counting(32)), array<12>(hex("000000000000004a00000000")), 1, stream);
  CHECK(ByteVector(stream.begin(), stream.begin() + 16) == hex("6e2e359a2568f98041ba0728dd0d6981"));
  CHECK(bytes_of(poly1305(array<32>(hex("85d6be7857556d337f4452fe42d506a80103808afb0db2fd4abff6af4149f51b")), {text("Cryptographic Forum Research Group")})) == hex("a8061dc1305136c6c22b8baf0c0127a9"));
  // A.3 vectors 7 and 11: carries through all limbs.
  CHECK(bytes_of(poly1305(array<32>(hex("0200000000000000000000000000000000000000000000000000000000000000")), {Bytes(hex("ffffffffffffffffffffffffffffffff"))})) == hex("03000000000000000000000000000000"));
  CHECK(bytes_of(poly1305(array<32>(hex("0100000000000000040000000000000000000000000000000000000000000000")),
                          {Bytes(hex("e33594d7505e43b900000000000000003394d7505e4379cd010000000000000000000000000000000000000000000000"))})) == hex("13000000000000000000000000000000"));

  const AeadKey key = array<32>(counting(32, 0x80));
  const AeadNonce nonce = array<12>(hex("070000004041424344454647"));
  const ByteVector associated = hex("50515253c0c1c2c3c4c5c6c7");
  ByteVector data = plain;
  const AeadTag tag = aead_seal(key, nonce, associated, data);
  CHECK(bytes_of(tag) == hex("1ae10b594f09e26a7e902ecbd0600691"));
  CHECK(ByteVector(data.begin(), data.begin() + 16) == hex("d31a8d34648e60db7b86afbc53ef7ec2"));
  CHECK(ByteVector(data.end() - 2, data.end()) == hex("6116"));
  CHECK(aead_open(key, nonce, associated, data, tag));
  CHECK(data == plain);
  // Every byte counts: text, associated data, tag, nonce.
  aead_seal(key, nonce, associated, data);
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] ^= 1;
    CHECK(!aead_open(key, nonce, associated, data, tag));
    data[i] ^= 1;
  }
  AeadTag other = tag;
  other[15] ^= 0x80;
  CHECK(!aead_open(key, nonce, associated, data, other) && !aead_open(key, nonce, Bytes(associated).subspan(1), data, tag));
  CHECK(!aead_open(key, array<12>(hex("070000004041424344454648")), associated, data, tag));
  // Long texts, in one and across batches of blocks.
  ByteVector big = counting(100'003);
  const AeadTag big_tag = aead_seal(key, nonce, {}, big);
  CHECK(aead_open(key, nonce, {}, big, big_tag));
  CHECK(big == counting(100'003));
}

TEST("kv unit: a layout survives the wire, and each field that differs is named with both values") {
  const Layout mine = test_layout();
  ByteVector wire(kLayoutBytes);
  encode_layout(mine, wire.data());
  Layout back;
  CHECK_EQ(decode_layout(wire, back), "");
  CHECK(back == mine);
  CHECK_EQ(layout_difference(mine, back, "a", "b"), "");
  const auto differing = [&](auto change) {
    Layout other = mine;
    change(other);
    return layout_difference(other, mine, "prefill worker", "decode worker");
  };
  CHECK_EQ(differing([](Layout &l) { l.layers = 4; }), "layers is 4 on the prefill worker and 3 on the decode worker");
  CHECK_EQ(differing([](Layout &l) { l.kv_heads = 1; }), "kv_heads is 1 on the prefill worker and 2 on the decode worker");
  CHECK_EQ(differing([](Layout &l) { l.head_dim = 32; }), "head_dim is 32 on the prefill worker and 64 on the decode worker");
  CHECK_EQ(differing([](Layout &l) { l.page_tokens = 8; }), "page_tokens is 8 on the prefill worker and 16 on the decode worker");
  CHECK_EQ(differing([](Layout &l) { l.dtype = LS_DTYPE_F32; }), "cache dtype is f32 on the prefill worker and bf16 on the decode worker");
  CHECK_EQ(differing([](Layout &l) { l.dtype = 99; }), "cache dtype is dtype 99 on the prefill worker and bf16 on the decode worker");
  CHECK_EQ(differing([](Layout &l) { l.format = 5; }), "page format is 5 on the prefill worker and 0 on the decode worker");
  CHECK_EQ(differing([](Layout &l) { l.ranks = 2; }), "tensor-parallel ranks is 2 on the prefill worker and 1 on the decode worker");
  CHECK_EQ(differing([](Layout &l) { l.page_bytes = 1; }), "page bytes is 1 on the prefill worker and 4096 on the decode worker");
  CHECK_EQ(differing([](Layout &l) { l.model[0] = 9; }), "model configuration is 0903030303030303... on the prefill worker and 0303030303030303... on the decode worker");
  CHECK_EQ(differing([](Layout &l) { l.scales[31] = 9; }), "cache scales is 0000000000000000... on the prefill worker and 0000000000000000... on the decode worker");
  CHECK(!decode_layout(Bytes(wire).first(127), back).empty());
  wire[0] = 2;
  CHECK_EQ(decode_layout(wire, back), "layout version is 2, expected 1");
  wire[0] = 1, wire[127] = 1;
  CHECK(!decode_layout(wire, back).empty());
}

TEST("kv unit: frames in pieces of any size; every flipped bit is noticed") {
  const ByteVector payload = hex("0807060504030201");
  const SmallFrame frame(FrameType::drop, payload);
  const auto feed = [](FrameReader &reader, ByteVector bytes, size_t piece) {
    for (size_t at = 0; at < bytes.size();) {
      const auto target = reader.want();
      if (target.empty()) return;
      const size_t n = std::min({piece, target.size(), bytes.size() - at});
      std::memcpy(target.data(), bytes.data() + at, n);
      reader.received(n);
      at += n;
    }
  };
  const ByteVector wire(frame.bytes().begin(), frame.bytes().end());
  for (size_t piece = 1; piece <= wire.size(); ++piece) {
    FrameReader reader(0);
    feed(reader, wire, piece);
    CHECK(reader.complete() && reader.type() == FrameType::drop);
    CHECK(ByteVector(reader.payload().begin(), reader.payload().end()) == payload);
  }
  for (size_t bit = 0; bit < 8 * wire.size(); ++bit) {
    ByteVector spoiled = wire;
    spoiled[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    FrameReader reader(0);
    feed(reader, spoiled, 5);
    CHECK(!reader.complete() && !reader.error().empty());
  }
  // Two frames behind each other, one of them without payload.
  FrameReader reader(0);
  ByteVector both;
  const SmallFrame empty(FrameType::ack, {});
  for (const Bytes part : {empty.bytes(), frame.bytes()}) both.insert(both.end(), part.begin(), part.end());
  feed(reader, both, 100);
  CHECK(reader.complete() && reader.type() == FrameType::ack && reader.payload().empty());
  reader.next();
  feed(reader, ByteVector(both.begin() + kHeaderBytes, both.end()), 3);
  CHECK(reader.complete() && reader.type() == FrameType::drop);
}

TEST("kv unit: lengths that do not fit their type are refused before a byte of them is read") {
  for (const auto &[type, length] : std::vector<std::pair<uint16_t, uint32_t>>{{1, 143}, {1, 145}, {2, 0xffffffff}, {3, 0}, {4, 20}, {4, 0x80000000}, {5, 9}, {6, 1}, {7, 3}, {7, 405}, {9, 31}, {12, 0}, {0, 0}, {65535, 16}}) {
    uint8_t header[kHeaderBytes];
    put(header, kMagic);
    put(header + 4, kVersion);
    put(header + 6, type);
    put(header + 8, length);
    put(header + 12, crc32c(0, header, 12));
    FrameReader reader(4096);
    std::memcpy(reader.want().data(), header, sizeof header);
    reader.received(sizeof header);
    if (reader.error().empty()) throw std::runtime_error("type " + std::to_string(type) + ", length " + std::to_string(length) + " was accepted");
    CHECK(reader.want().empty());
  }
}

TEST("kv unit: staged copies are counted to the byte; an id serves once; ends are remembered") {
  const Layout layout = test_layout(3, 4096);
  Endings endings;
  StagingStore store(std::chrono::milliseconds(60'000), endings);
  const StagingCounts &counts = store.counts();
  std::shared_ptr<Staged> a, b, c;
  CHECK(store.create(layout, 33, a).ok() && store.create(layout, 0, b).ok() && store.create(layout, 16, c).ok());
  CHECK_EQ(counts.filling.load(), 3u);
  CHECK_EQ(counts.filling_bytes.load(), uint64_t{3 + 1} * 3 * 4096);
  uint64_t id_a, id_b, id_c;
  CHECK(store.publish(std::move(a), 1, id_a).ok() && store.publish(std::move(b), 2, id_b).ok() && store.publish(std::move(c), 3, id_c).ok());
  CHECK(id_a != id_b && id_b != id_c && id_a != 0);
  CHECK_EQ(counts.filling.load(), 0u);
  CHECK_EQ(counts.filling_bytes.load(), 0u);
  CHECK_EQ(counts.staged_bytes.load(), uint64_t{3 + 1} * 3 * 4096);
  std::shared_ptr<Staged> got;
  CHECK_EQ(store.claim(id_a ^ 1, got), LS_KV_UNKNOWN);
  CHECK_EQ(store.claim(id_a, got), LS_KV_DONE);
  CHECK_EQ(store.claim(id_a, got), LS_KV_USED);
  CHECK_EQ(counts.staged.load(), 3u);
  got.reset();
  store.finish(id_a, LS_KV_DONE, 7);
  store.finish(id_a, LS_KV_RESET, 8);
  CHECK_EQ(store.claim(id_a, got), LS_KV_USED);
  CHECK_EQ(counts.staged.load(), 2u);
  CHECK_EQ(store.drop(id_b), LS_KV_DROPPED);
  CHECK_EQ(store.claim(id_b, got), LS_KV_DROPPED);
  CHECK(store.expire(Clock::now()) > Clock::now());
  store.expire(Clock::now() + std::chrono::seconds(61));
  CHECK_EQ(store.claim(id_c, got), LS_KV_EXPIRED);
  CHECK_EQ(counts.staged.load(), 0u);
  CHECK_EQ(counts.staged_bytes.load(), 0u);
  Ending e;
  const auto any = [](const Ending &) { return true; };
  CHECK(endings.take(e, any) && e.id == id_a && e.reason == LS_KV_DONE && e.bytes == 7);
  CHECK(endings.take(e, any) && e.id == id_b && e.reason == LS_KV_DROPPED);
  CHECK(endings.take(e, any) && e.id == id_c && e.reason == LS_KV_EXPIRED);
  CHECK(!endings.take(e, any));
}

TEST("kv unit: a copy too large for the address space is refused and costs nothing") {
  Endings endings;
  StagingStore store(std::chrono::milliseconds(1), endings);
  std::shared_ptr<Staged> staged;
  CHECK_EQ(store.create(test_layout(1000, 1 << 24), 1u << 24, staged).code, LS_NO_MEMORY);
  CHECK_EQ(store.counts().filling.load(), 0u);
  CHECK_EQ(store.counts().filling_bytes.load(), 0u);
}
