// Server and client over real sockets, without engines: bytes, faults, bounds, strangers.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <chrono>
#include <random>

#include "kv_support.h"
#include "kv_transfer/bytes.h"

using namespace ls;
using namespace ls::kv;
using namespace ls::test;
using std::chrono::milliseconds;

namespace {

// A prefill side and a decode side over plain memory.
struct Pair {
  Layout layout;
  Endings sent, pulled;
  StagingStore store;
  Server server;
  Client client;
  uint64_t serial = 0;

  explicit Pair(Layout l = test_layout(), ServerOptions so = {}, ClientOptions co = {}, milliseconds hold = milliseconds(60'000), const char *host = "127.0.0.1")
      : layout(l), store(hold, sent), server(layout, store, std::move(so)), client(pulled, std::move(co)) {
    Address address;
    CHECK(parse_address(host, 0, address).ok());
    if (Status status = server.start(address); !status.ok()) throw std::runtime_error(status.text);
    CHECK(client.start().ok());
  }
  static uint64_t content(uint32_t tokens) { return 1000 + tokens; }

  uint64_t publish(uint32_t tokens) {
    std::shared_ptr<Staged> staged;
    CHECK(store.create(layout, tokens, staged).ok());
    ByteVector page(layout.page_bytes);
    for (uint32_t layer = 0; layer < layout.layers; ++layer)
      for (uint32_t p = 0; p < staged->pages(); ++p) {
        std::mt19937 random(layer * 10'000 + p);
        for (size_t i = 0; i + 4 <= page.size(); i += 4) put(page.data() + i, static_cast<uint32_t>(random()));
        staged->fill(layer, p, page.data());
      }
    uint64_t id;
    CHECK(store.publish(std::move(staged), content(tokens), id).ok());
    server.wake();
    return id;
  }
  struct Target {
    std::shared_ptr<ByteVector> held;  // by the pull too: a test may look away before it ends
    ByteVector &memory = *held;
    std::shared_ptr<Pull> pull;
    uint64_t serial = 0;
    explicit Target(std::shared_ptr<ByteVector> m) : held(std::move(m)) {}
  };
  std::shared_ptr<Target> pull(uint64_t id, uint32_t tokens, uint32_t first = 0, uint32_t port = 0, const char *host = "127.0.0.1", Layout *other = nullptr) {
    auto target = std::make_shared<Target>(std::make_shared<ByteVector>());
    PullRequest request{id, first, tokens, content(tokens), other ? *other : layout, {}};
    const uint32_t pages = request.pages();
    target->memory.assign(size_t{layout.layers} * pages * layout.page_bytes, 0xee);
    request.page = [held = target->held, pages, bytes = layout.page_bytes](uint32_t layer, uint32_t index) { return held->data() + (size_t{layer} * pages + index) * bytes; };
    Address address;
    CHECK(parse_address(host, port ? port : server.port(), address).ok());
    target->serial = ++serial;
    target->pull = std::make_shared<Pull>(address, std::move(request), 0, target->serial);
    client.pull(target->pull);
    return target;
  }
  void expect_content(const Target &target, uint32_t tokens, uint32_t first = 0) {
    const uint32_t pages = (tokens + 15) / 16;
    for (uint32_t layer = 0; layer < layout.layers; ++layer)
      for (uint32_t p = 0; p < pages; ++p) {
        std::mt19937 random(layer * 10'000 + p);
        const uint8_t *at = target.memory.data() + (size_t{layer} * pages + p) * layout.page_bytes;
        for (size_t i = 0; i + 4 <= layout.page_bytes; i += 4)
          if (get<uint32_t>(at + i) != (p < first ? 0xeeeeeeeeu : static_cast<uint32_t>(random()))) throw std::runtime_error("layer " + std::to_string(layer) + " page " + std::to_string(p) + " is wrong");
      }
  }
  Ending next(Endings &endings) {
    Ending e;
    wait_until("an ending", [&] { return endings.take(e, [](const Ending &) { return true; }); });
    return e;
  }
  // All memory of copies and connections is given back.
  void expect_clean() {
    wait_until("nothing staged", [&] { return store.counts().staged == 0 && store.counts().staged_bytes == 0; });
    wait_until("no pulls", [&] { return client.active() == 0; });
    wait_until("no connections", [&] { return server.connections() == 0; });
  }
};

ServerOptions quick_server() { return {milliseconds(300), milliseconds(1500), 256, {}}; }
ClientOptions quick_client() { return {milliseconds(500), milliseconds(500), milliseconds(1500), {}}; }

}  // namespace

TEST("kv net: all pages of a prompt arrive, or those that were missing") {
  Pair pair;
  for (const uint32_t tokens : {1u, 16u, 17u, 1000u, 5000u})
    for (const uint32_t first : {0u, 1u, (tokens + 15) / 16}) {
      const uint64_t id = pair.publish(tokens);
      const auto target = pair.pull(id, tokens, first);
      const Ending e = pair.next(pair.pulled);
      if (e.reason != LS_KV_DONE) throw std::runtime_error(e.text);
      const uint64_t bytes = uint64_t{(tokens + 15) / 16 - first} * 3 * 4096;
      CHECK_EQ(e.bytes, bytes);
      pair.expect_content(*target, tokens, first);
      const Ending s = pair.next(pair.sent);
      CHECK(s.reason == LS_KV_DONE && s.id == id && s.bytes == bytes);
    }
  pair.expect_clean();
}

TEST("kv net: forty transfers at once") {
  Pair pair(test_layout(4, 20'000));
  std::vector<std::shared_ptr<Pair::Target>> targets;
  for (uint32_t i = 0; i < 40; ++i) targets.push_back(pair.pull(pair.publish(16 * (1 + i)), 16 * (1 + i)));
  for (int i = 0; i < 40; ++i) CHECK_EQ(pair.next(pair.pulled).reason, LS_KV_DONE);
  for (uint32_t i = 0; i < 40; ++i) pair.expect_content(*targets[i], 16 * (1 + i));
  pair.expect_clean();
}

TEST("kv net: over IPv6, where the machine has it") {
  Address address;
  CHECK(parse_address("[::1]", 0, address).ok());
  Socket probe;
  uint16_t port;
  if (!listen_on(address, probe, port).ok()) return;  // no IPv6 here
  Pair pair(test_layout(), {}, {}, milliseconds(60'000), "::1");
  const auto target = pair.pull(pair.publish(100), 100, 0, 0, "::1");
  CHECK_EQ(pair.next(pair.pulled).reason, LS_KV_DONE);
  pair.expect_content(*target, 100);
}

TEST("kv net: addresses are numeric") {
  Address address;
  for (const char *host : {"", "localhost", "256.1.1.1", "::g", "10.0.0.1 ", "example.com"}) CHECK_EQ(parse_address(host, 1, address).code, LS_INVALID);
  CHECK_EQ(parse_address("127.0.0.1", 65536, address).code, LS_INVALID);
  CHECK_EQ(parse_address(nullptr, 1, address).code, LS_INVALID);
  CHECK(parse_address("fe80::1%1", 1, address).ok() && parse_address("10.0.0.1", 65535, address).ok());
}

TEST("kv net: an id is good for one transfer; unknown, used, dropped and expired ids are told apart") {
  Pair pair(test_layout(), {}, {}, milliseconds(400));
  const uint64_t id = pair.publish(100);
  pair.pull(id ^ 1, 100);
  CHECK_EQ(pair.next(pair.pulled).reason, LS_KV_UNKNOWN);
  pair.pull(id, 100);
  CHECK_EQ(pair.next(pair.pulled).reason, LS_KV_DONE);
  CHECK_EQ(pair.next(pair.sent).reason, LS_KV_DONE);
  pair.pull(id, 100);
  CHECK_EQ(pair.next(pair.pulled).reason, LS_KV_USED);
  const uint64_t old = pair.publish(100), dropped = pair.publish(100);
  CHECK_EQ(pair.store.drop(dropped), LS_KV_DROPPED);
  CHECK_EQ(pair.next(pair.sent).reason, LS_KV_DROPPED);
  pair.pull(dropped, 100);
  CHECK_EQ(pair.next(pair.pulled).reason, LS_KV_DROPPED);
  const Ending expired = pair.next(pair.sent);
  CHECK(expired.reason == LS_KV_EXPIRED && expired.id == old);
  pair.pull(old, 100);
  CHECK_EQ(pair.next(pair.pulled).reason, LS_KV_EXPIRED);
  pair.expect_clean();
}

TEST("kv net: another layout, another prompt or another length is refused by name, and the copy is dropped") {
  Pair pair;
  Layout other = pair.layout;
  other.dtype = LS_DTYPE_F32;
  pair.pull(pair.publish(100), 100, 0, 0, "127.0.0.1", &other);
  Ending e = pair.next(pair.pulled);
  CHECK_EQ(e.reason, LS_KV_REFUSED);
  CHECK_EQ(e.text, "cache dtype is bf16 on the prefill worker and f32 on the decode worker");
  CHECK_EQ(pair.next(pair.sent).reason, LS_KV_DROPPED);
  pair.pull(pair.publish(100), 99);
  e = pair.next(pair.pulled);
  CHECK_EQ(e.reason, LS_KV_REFUSED);
  CHECK_EQ(e.text, "tokens is 100 on the prefill worker and 99 on the decode worker");
  CHECK(pair.next(pair.sent).reason != LS_KV_DONE);
  std::shared_ptr<Staged> staged;
  CHECK(pair.store.create(pair.layout, 100, staged).ok());
  uint64_t id;
  CHECK(pair.store.publish(std::move(staged), 77, id).ok());
  pair.pull(id, 100);
  e = pair.next(pair.pulled);
  CHECK_EQ(e.reason, LS_KV_REFUSED);
  CHECK(e.text.find("token ids") != std::string::npos);
  pair.expect_clean();
}

TEST("kv net: a flipped bit anywhere is noticed") {
  Pair pair;
  std::mt19937 random(3);
  for (uint64_t round = 0; round < 60; ++round) {
    // In the answer, in tables, in pages, in the end.
    const uint64_t at = round < 40 ? round * 2 : random() % (7 * 3 * 4096);
    Proxy proxy(pair.server.port(), {Proxy::Fault::flip, at});
    pair.pull(pair.publish(100), 100, 0, proxy.port());
    const Ending e = pair.next(pair.pulled);
    if (e.reason != LS_KV_CORRUPT) throw std::runtime_error("byte " + std::to_string(at) + " ended with " + std::to_string(e.reason) + " " + e.text);
  }
  pair.expect_clean();
}

TEST("kv net: a sender that resets or stops in the middle costs a bounded time") {
  Pair pair(test_layout(), quick_server(), quick_client());
  for (const uint64_t at : {0ul, 20ul, 30'000ul}) {
    Proxy resets(pair.server.port(), {Proxy::Fault::reset, at});
    pair.pull(pair.publish(500), 500, 0, resets.port());
    CHECK_EQ(pair.next(pair.pulled).reason, LS_KV_RESET);
  }
  for (const uint64_t at : {0ul, 30'000ul}) {
    Proxy stalls(pair.server.port(), {Proxy::Fault::stall, at});
    pair.pull(pair.publish(500), 500, 0, stalls.port());
    CHECK_EQ(pair.next(pair.pulled).reason, LS_KV_TIMEOUT);
  }
  // A route that accepts and says nothing; nobody there at all.
  SilentListener silent;
  pair.pull(pair.publish(500), 500, 0, silent.port());
  CHECK_EQ(pair.next(pair.pulled).reason, LS_KV_TIMEOUT);
  uint32_t dead;
  {
    SilentListener gone;
    dead = gone.port();
  }
  pair.pull(pair.publish(500), 500, 0, dead);
  CHECK_EQ(pair.next(pair.pulled).reason, LS_KV_NO_ROUTE);
  for (int i = 0; i < 3; ++i) pair.store.expire(Clock::now() + milliseconds(61'000));
  pair.expect_clean();
}

TEST("kv net: a trickle is cut at the longest time of a connection") {
  Pair pair(test_layout(), {}, quick_client());
  Proxy slow(pair.server.port(), {Proxy::Fault::slow, ~uint64_t{0}});
  pair.pull(pair.publish(2000), 2000, 0, slow.port());
  const Ending e = pair.next(pair.pulled);
  CHECK_EQ(e.reason, LS_KV_TIMEOUT);
  CHECK(e.bytes > 0);
  pair.expect_clean();
}

TEST("kv net: a receiver slow at first, then fast, gets every byte (64 MiB)") {
  Pair pair(test_layout(8, 1 << 16));
  constexpr uint32_t kTokens = 128 * 16;
  Proxy slow(pair.server.port(), {Proxy::Fault::slow, 64 << 10});
  const auto target = pair.pull(pair.publish(kTokens), kTokens, 0, slow.port());
  const Ending e = pair.next(pair.pulled);
  CHECK_EQ(e.reason, LS_KV_DONE);
  CHECK_EQ(e.bytes, uint64_t{64} << 20);
  CHECK(slow.passed() > uint64_t{64} << 20);
  pair.expect_content(*target, kTokens);
  pair.expect_clean();
}

TEST("kv net: a receiver that never reads holds a copy for the connection's time only") {
  Pair pair(test_layout(8, 1 << 16), quick_server());
  const uint64_t id = pair.publish(4096);
  uint8_t payload[16 + kLayoutBytes] = {};
  put(payload, id);
  encode_layout(pair.layout, payload + 16);
  RawPeer peer(pair.server.port());
  peer.send(SmallFrame(FrameType::pull, payload).bytes());
  const Ending e = pair.next(pair.sent);
  CHECK(e.id == id && e.reason == LS_KV_TIMEOUT);
  pair.expect_clean();
}

TEST("kv net: a copy is dropped by its receiver while it waits and while it is sent") {
  Pair pair(test_layout(8, 1 << 16));
  Address address;
  CHECK(parse_address("127.0.0.1", pair.server.port(), address).ok());
  const uint64_t waiting = pair.publish(100);
  pair.client.drop(address, waiting);
  Ending e = pair.next(pair.sent);
  CHECK(e.id == waiting && e.reason == LS_KV_DROPPED);
  Proxy stalls(pair.server.port(), {Proxy::Fault::stall, 100'000});
  const uint64_t sending = pair.publish(4096);
  pair.pull(sending, 4096, 0, stalls.port());
  wait_until("bytes under way", [&] { return stalls.passed() >= 100'000; });
  pair.client.drop(address, sending);
  e = pair.next(pair.sent);
  CHECK(e.id == sending && e.reason == LS_KV_DROPPED);
  wait_until("its memory is back", [&] { return pair.store.counts().staged_bytes == 0; });
}

TEST("kv net: cancelled at any moment, the pages are left alone and the sender drops the copy") {
  Pair pair(test_layout(8, 1 << 14));
  std::mt19937 random(5);
  for (int round = 0; round < 120; ++round) {
    const uint32_t tokens = 16 * (1 + static_cast<uint32_t>(random() % 200));
    const uint64_t id = pair.publish(tokens);
    const auto target = pair.pull(id, tokens);
    for (uint32_t spin = static_cast<uint32_t>(random() % 4) * static_cast<uint32_t>(random() % 3000); spin > 0; --spin) std::atomic_signal_fence(std::memory_order_seq_cst);
    if (round % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    pair.client.cancel(*target->pull);
    const ByteVector left = target->memory;
    wait_until("the copy is gone", [&] { return pair.store.counts().staged == 0; });
    wait_until("the pull is gone", [&] { return pair.client.active() == 0; });
    CHECK(left == target->memory);
  }
  pair.expect_clean();
}

TEST("kv net: strangers: silence, a byte at a time, noise, wrong frames; transfers go on") {
  Pair pair(test_layout(), quick_server());
  RawPeer silent(pair.server.port()), trickle(pair.server.port());
  const SmallFrame drop(FrameType::drop, ByteVector(8, 1));
  std::thread slowly([&] {
    for (const uint8_t b : drop.bytes().first(20)) {
      trickle.send({&b, 1});
      std::this_thread::sleep_for(milliseconds(30));
    }
  });
  std::mt19937 random(7);
  ByteVector noise(1 << 20);
  for (uint8_t &b : noise) b = static_cast<uint8_t>(random());
  RawPeer noisy(pair.server.port());
  noisy.send(noise);
  noisy.expect_closed();
  // A frame of the other side, and a request that is not whole.
  RawPeer wrong(pair.server.port()), cut(pair.server.port());
  wrong.send(SmallFrame(FrameType::ack, {}).bytes());
  const ByteVector answer = wrong.receive(kHeaderBytes + 4);
  CHECK_EQ(get<uint16_t>(answer.data() + 6), static_cast<uint16_t>(FrameType::refuse));
  wrong.expect_closed();
  cut.send(drop.bytes().first(10));
  const auto target = pair.pull(pair.publish(1000), 1000);
  CHECK_EQ(pair.next(pair.pulled).reason, LS_KV_DONE);
  pair.expect_content(*target, 1000);
  silent.expect_closed();
  trickle.expect_closed();
  cut.expect_closed();
  slowly.join();
  pair.expect_clean();
}

TEST("kv net: a thousand idle connections shut nobody out") {
  Pair pair(test_layout(), {milliseconds(20'000), milliseconds(20'000), 64, {}});
  std::vector<std::unique_ptr<RawPeer>> crowd;
  uint32_t most = 0;
  for (int i = 0; i < 1000; ++i) {
    try {
      crowd.push_back(std::make_unique<RawPeer>(pair.server.port()));
    } catch (const std::exception &) {
      break;  // this process has no more descriptors
    }
    most = std::max(most, pair.server.connections());
    if (i % 250 != 100) continue;
    const auto target = pair.pull(pair.publish(300), 300);
    CHECK_EQ(pair.next(pair.pulled).reason, LS_KV_DONE);
    pair.expect_content(*target, 300);
  }
  CHECK(crowd.size() > 200);
  CHECK(most <= 64);
  wait_until("the oldest were turned away", [&] { return pair.server.turned_away() + 64 >= crowd.size(); });
  crowd.front()->expect_closed();
  crowd.clear();
  pair.expect_clean();
}

TEST("kv net: under a key: bytes are encrypted, and both sides must have it") {
  const ByteVector key(32, 0x5a);
  ServerOptions so;
  ClientOptions co;
  so.key = key, co.key = key;
  Pair pair(test_layout(8, 1 << 14), so, co);
  const auto target = pair.pull(pair.publish(2000), 2000);
  const Ending e = pair.next(pair.pulled);
  if (e.reason != LS_KV_DONE) throw std::runtime_error(e.text);
  pair.expect_content(*target, 2000);
  CHECK_EQ(pair.next(pair.sent).reason, LS_KV_DONE);
  // Any flipped bit ends it.
  for (const uint64_t at : {5ul, 20ul, 60ul, 79ul, 81ul, 100ul, 5'000ul, 70'000ul, 900'000ul}) {
    Proxy proxy(pair.server.port(), {Proxy::Fault::flip, at});
    pair.pull(pair.publish(2000), 2000, 0, proxy.port());
    const Ending flipped = pair.next(pair.pulled);
    if (flipped.reason != LS_KV_CORRUPT && flipped.reason != LS_KV_AUTH) throw std::runtime_error("byte " + std::to_string(at) + " ended with " + std::to_string(flipped.reason) + " " + flipped.text);
    CHECK(pair.next(pair.sent).reason != LS_KV_DONE);
  }
}

namespace {

// A client with `client_key` against a server with `server_key`.
Ending unequal(const ByteVector &server_key, const ByteVector &client_key) {
  ServerOptions so;
  ClientOptions co;
  so.key = server_key, co.key = client_key;
  Pair pair(test_layout(), so, co);
  pair.pull(pair.publish(16), 16);
  return pair.next(pair.pulled);
}

}  // namespace

TEST("kv net: another key, a key on one side only") {
  const ByteVector key(32, 1), other(16, 2);
  for (const auto &[server, client] : std::vector<std::pair<ByteVector, ByteVector>>{{key, other}, {key, {}}, {{}, key}}) {
    const Ending e = unequal(server, client);
    if (e.reason != LS_KV_AUTH) throw std::runtime_error("ended with " + std::to_string(e.reason) + " " + e.text);
    CHECK(!e.text.empty());
  }
}
