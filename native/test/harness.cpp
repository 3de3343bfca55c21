#include "harness.h"

#include <unistd.h>

#include <cstdlib>
#include <numeric>
#include <stdexcept>

#include "check.h"
#include "config.h"

namespace ls::test {

Tokens range(int32_t first, uint32_t count) {
  Tokens tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

ls_config small_config(const Options &o) {
  ls_config c{};
  c.struct_size = sizeof c;
  c.hidden = 32;
  c.layers = 2;
  c.heads = 2;
  c.kv_heads = 1;
  c.head_dim = 16;
  c.intermediate = 64;
  c.vocab = o.vocab;
  c.tied_embeddings = 1;
  c.max_context = o.max_context;
  c.max_seqs = o.max_seqs;
  c.max_batch_tokens = o.max_batch_tokens;
  c.kv_dtype = o.kv_dtype;
  c.prefix_cache = o.prefix_cache;
  c.rms_eps = 1e-5f;
  c.attn_scale = 0.25f;
  c.rope_scale = 1;
  return c;
}

std::vector<float> small_inv_freq(const ls_config &config) { return std::vector<float>(config.head_dim / 2, 0.5f); }

std::string last_error() {
  std::string text(static_cast<size_t>(ls_last_error(nullptr, 0)) + 1, '\0');
  ls_last_error(text.data(), static_cast<uint32_t>(text.size()));
  text.pop_back();
  return text;
}

TempFile::TempFile(uint64_t bytes) {
  const char *dir = std::getenv("TMPDIR");
  path_ = std::string(dir ? dir : "/tmp") + "/layerscale-test-XXXXXX";
  const int fd = ::mkstemp(path_.data());
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw std::runtime_error("cannot make a file at " + path_);
  ::close(fd);
}
TempFile::~TempFile() { ::unlink(path_.c_str()); }

std::vector<int32_t> pack_plan(const std::vector<RowSpec> &rows, uint32_t step) {
  std::vector<int32_t> words(LS_PLAN_HEADER_WORDS, 0);
  words[0] = static_cast<int32_t>(rows.size());
  words[2] = static_cast<int32_t>(step);
  Tokens all;
  for (const RowSpec &r : rows) {
    const int32_t row[LS_PLAN_ROW_WORDS] = {r.slot,
                                            static_cast<int32_t>(r.start),
                                            static_cast<int32_t>(r.tokens.size()),
                                            static_cast<int32_t>((r.sample ? LS_ROW_SAMPLE : 0) | r.n_logprobs << 8),
                                            std::bit_cast<int32_t>(r.temperature),
                                            std::bit_cast<int32_t>(r.top_p),
                                            static_cast<int32_t>(static_cast<uint32_t>(r.seed)),
                                            static_cast<int32_t>(static_cast<uint32_t>(r.seed >> 32))};
    words.insert(words.end(), std::begin(row), std::end(row));
    all.insert(all.end(), r.tokens.begin(), r.tokens.end());
  }
  words[1] = static_cast<int32_t>(all.size());
  words.insert(words.end(), all.begin(), all.end());
  return words;
}

int32_t load_zeros(ls_engine *engine, const ls_config &config) {
  const uint64_t most = uint64_t{4} * config.hidden * std::max({config.vocab, config.intermediate, config.heads * config.head_dim});
  const TempFile file(most);
  const int32_t index = ls_weights_map(engine, file.path(), most);
  if (index < 0) return index;
  for (const uint32_t id : required_tensors(config)) {
    const TensorShape shape = *tensor_shape(config, id);
    const int32_t code = ls_weights_set(engine, id, static_cast<uint32_t>(index), 0, *tensor_bytes(LS_DTYPE_F32, shape.rows, shape.cols), LS_DTYPE_F32, shape.rows, shape.cols);
    if (code < 0) return code;
  }
  return LS_OK;
}

Rig::Rig(const Options &options) : config(small_config(options)) {
  CHECK_EQ(ls_engine_create(&config, small_inv_freq(config).data(), &engine), LS_OK);
  CHECK_EQ(load_zeros(engine, config), LS_OK);
  if (!options.kv_scales.empty()) CHECK_EQ(ls_kv_scales(engine, options.kv_scales.data(), static_cast<uint32_t>(options.kv_scales.size() / 2)), LS_OK);
  CHECK_EQ(ls_weights_finish(engine), LS_OK);
  CHECK_EQ(ls_pool_create(engine, options.pages), LS_OK);
}
Rig::~Rig() { ls_engine_destroy(engine); }

Opened Rig::open(const Tokens &tokens, uint64_t domain) {
  int32_t out[3] = {-1, 0, 0};
  const int32_t code = ls_seq_open(engine, tokens.data(), static_cast<uint32_t>(tokens.size()), static_cast<uint32_t>(domain), static_cast<uint32_t>(domain >> 32), out);
  return {code, out[0], static_cast<uint32_t>(out[1]), static_cast<uint32_t>(out[2])};
}

int32_t Rig::submit(const std::vector<RowSpec> &rows, uint32_t step) {
  const std::vector<int32_t> plan = pack_plan(rows, step);
  return ls_step_submit(engine, plan.data(), static_cast<uint32_t>(plan.size()));
}

Result Rig::wait(uint32_t capacity) {
  std::vector<int32_t> words(capacity, 0x55555555);
  Result r;
  r.code = ls_step_wait(engine, words.data(), capacity);
  if (r.code < 0) return r;
  size_t at = 0;
  const auto take = [&] { return words.at(at++); };
  const auto count = static_cast<uint32_t>(take());
  r.step = static_cast<uint32_t>(take());
  r.free = static_cast<uint32_t>(take());
  r.cached = static_cast<uint32_t>(take());
  r.held = static_cast<uint32_t>(take());
  r.total = static_cast<uint32_t>(take());
  CHECK(take() >= 0);
  CHECK_EQ(take(), 0);
  for (uint32_t i = 0; i < count; ++i) {
    ResultRow row;
    row.slot = take();
    row.token = take();
    row.logprob = std::bit_cast<float>(take());
    for (int32_t n = take(); n > 0; --n) {
      const int32_t token = take();
      row.top.emplace_back(token, std::bit_cast<float>(take()));
    }
    r.rows.push_back(std::move(row));
  }
  CHECK_EQ(static_cast<int32_t>(at), r.code);
  return r;
}

ResultRow Rig::wait_row() {
  const Result r = wait();
  if (r.code < 0) throw std::runtime_error("wait: " + last_error());
  return r.rows.at(0);
}

void Rig::compute(int32_t slot, const Tokens &tokens, uint32_t from) {
  while (from < tokens.size()) {
    const size_t len = std::min<size_t>(tokens.size() - from, config.max_batch_tokens);
    const auto first = tokens.begin() + from;
    const bool last = from + len == tokens.size();
    if (submit({{.slot = slot, .start = from, .tokens = Tokens(first, first + static_cast<std::ptrdiff_t>(len)), .sample = last}}) != LS_OK) throw std::runtime_error("submit: " + last_error());
    const Result r = wait();
    if (r.code < 0) throw std::runtime_error("wait: " + last_error());
    if (last) CHECK_EQ(r.rows.at(0).token, next_token(tokens, config.vocab));
    from += static_cast<uint32_t>(len);
  }
}

uint32_t Rig::serve(const Tokens &tokens, uint64_t domain, uint32_t commit) {
  const Opened seq = open(tokens, domain);
  if (seq.code != LS_OK) throw std::runtime_error("open: " + last_error());
  compute(seq.slot, tokens, seq.start);
  CHECK_EQ(close(seq.slot, commit), LS_OK);
  check();
  return seq.cached;
}

ls_pool_stats_t Rig::stats() {
  ls_pool_stats_t s{};
  s.struct_size = sizeof s;
  CHECK_EQ(ls_pool_stats(engine, &s), LS_OK);
  return s;
}

std::string Rig::snapshot() {
  const ls_pool_stats_t s = stats();
  std::string text;
  for (const uint32_t v : {s.total, s.free, s.cached, s.held, s.open_seqs, s.evictions_lo}) text += std::to_string(v) + " ";
  return text;
}

void Rig::check() {
  if (ls_pool_check(engine) != LS_OK) throw std::runtime_error(last_error());
  const ls_pool_stats_t s = stats();
  CHECK_EQ(s.free + s.cached + s.held, s.total);
}

std::vector<Event> Rig::events(uint32_t capacity) {
  std::vector<int32_t> words(capacity);
  std::vector<Event> all;
  for (;;) {
    const int32_t written = ls_events_drain(engine, words.data(), capacity);
    if (written < 0) throw std::runtime_error("drain: " + last_error());
    if (written == 0) return all;
    for (size_t at = 0; at < static_cast<size_t>(written);) {
      Event e;
      e.kind = words.at(at++);
      if (e.kind != LS_EVENT_CLEARED) e.page = words.at(at++);
      if (e.kind == LS_EVENT_STORED) {
        e.parent = words.at(at++);
        e.domain = static_cast<uint32_t>(words.at(at++));
        e.domain |= static_cast<uint64_t>(static_cast<uint32_t>(words.at(at++))) << 32;
        for (int i = 0; i < LS_PAGE_TOKENS; ++i) e.tokens.push_back(words.at(at++));
      }
      all.push_back(std::move(e));
    }
  }
}

}  // namespace ls::test
