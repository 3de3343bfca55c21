// Builds an engine over the fake device in one line, and speaks the ABI for the tests.
#pragma once
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "fake_backend.h"
#include "layerscale.h"

namespace ls::test {

using Tokens = std::vector<int32_t>;
// first, first+1, … (count ids).
Tokens range(int32_t first, uint32_t count);

struct Options {
  uint32_t pages = 32, max_seqs = 4, max_context = 256, max_batch_tokens = 128, vocab = 1000, prefix_cache = 1, kv_dtype = LS_KV_F32;
  std::vector<float> kv_scales = {};  // empty: ls_kv_scales is not called
};
ls_config small_config(const Options &options = {});
std::vector<float> small_inv_freq(const ls_config &config);
std::string last_error();

// A file of zeros that is gone with the object.
class TempFile {
 public:
  explicit TempFile(uint64_t bytes);
  ~TempFile();
  TempFile(const TempFile &) = delete;
  TempFile &operator=(const TempFile &) = delete;
  const char *path() const { return path_.c_str(); }

 private:
  std::string path_;
};

struct RowSpec {
  int32_t slot = 0;
  uint32_t start = 0;
  Tokens tokens;
  bool sample = true;
  uint32_t n_logprobs = 0;
  float temperature = 0, top_p = 1;
  uint64_t seed = 0;
};
std::vector<int32_t> pack_plan(const std::vector<RowSpec> &rows, uint32_t step = 0);

struct ResultRow {
  int32_t slot = 0, token = 0;
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;
};
struct Result {
  int32_t code = 0;  // words written or a negative status
  uint32_t step = 0, free = 0, cached = 0, held = 0, total = 0;
  std::vector<ResultRow> rows;
};
struct Event {
  int32_t kind = 0, page = -1, parent = -1;
  uint64_t domain = 0;
  Tokens tokens;
};
struct Opened {
  int32_t code = 0, slot = -1;
  uint32_t cached = 0, start = 0;
};

// An engine that is ready to serve. Every wrapper returns the ABI's status.
class Rig {
 public:
  explicit Rig(const Options &options = {});
  ~Rig();
  Rig(const Rig &) = delete;
  Rig &operator=(const Rig &) = delete;

  ls_engine *engine = nullptr;
  ls_config config{};

  Opened open(const Tokens &tokens, uint64_t domain = 0);
  int32_t close(int32_t slot, uint32_t commit = ~0u) { return ls_seq_close(engine, slot, commit); }
  int32_t submit(const std::vector<RowSpec> &rows, uint32_t step = 0);
  Result wait(uint32_t capacity = 1u << 16);
  // The first row of the oldest step, which must succeed.
  ResultRow wait_row();
  int32_t wait_token() { return wait_row().token; }
  // Opens, computes all of it in chunks, closes with `commit`. Returns the cached tokens.
  uint32_t serve(const Tokens &tokens, uint64_t domain = 0, uint32_t commit = ~0u);
  // Computes tokens[from..] of an open slot.
  void compute(int32_t slot, const Tokens &tokens, uint32_t from);
  ls_pool_stats_t stats();
  // All counts as text: what a refused call must not change.
  std::string snapshot();
  // ls_pool_check and free + cached + held == total; throws with the text otherwise.
  void check();
  std::vector<Event> events(uint32_t capacity = 1u << 20);
};

// Sets every tensor that `config` demands from one file of zeros. Returns the first failing status.
int32_t load_zeros(ls_engine *engine, const ls_config &config);

}  // namespace ls::test
