// A device without arithmetic: KV memory holds token ids, and the next token is a hash of the tokens read back through the block table.
// So a wrong table, a page given away too early, a lost write or a wrong carry shows up as a wrong token.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "backend.h"

namespace ls::test {

// Hash of a token list, extended token by token.
uint64_t extend_hash(uint64_t hash, int32_t token);
constexpr uint64_t kEmptyHash = 0xcbf29ce484222325u;
// What the fake device samples after `tokens`.
int32_t next_token(std::span<const int32_t> tokens, uint32_t vocab);

// What a device saw, and what it should do next.
struct FakeDevice {
  ls_config config{};
  std::vector<float> inv_freq;
  std::map<uint32_t, TensorView> tensors;
  std::vector<float> kv_scales;     // {k, v} of each layer; empty: never set
  std::vector<int32_t> memory;      // (layers, pages * 16); layer l keeps token ^ l << 20
  bool movable = true;              // its KV may be transferred
  std::vector<StepRow> last_rows;   // pointers are dead after the run
  uint32_t runs = 0;
  std::function<void(uint32_t layer)> on_layer;  // called after each layer of a run
  bool alive = false;
  // Failures to inject, each used once.
  Status finish_status, pool_status, run_status;
  bool run_throws = false;
  enum class Tamper { none, token_outside, missing_row, too_many_top, top_outside } tamper = Tamper::none;
  std::atomic<bool> *finish_gate = nullptr;  // finish_weights waits until it is true
};
// The device of the latest engine made; it can be looked at after the engine is gone.
FakeDevice &device();
// What the next make_backend returns when it is a failure.
Status &next_make_status();

}  // namespace ls::test
