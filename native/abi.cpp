// The extern "C" face: arguments checked, no exception crosses, the text of a failure kept per thread.
#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

#include "config.h"
#include "engine.h"

struct ls_engine {
  ls::Engine core;
};

namespace {

using ls::Status;

// A plain buffer: thread-local objects with destructors do not mix with libraries that outlive or precede their threads.
constexpr size_t kErrorCapacity = 4096;
thread_local char last_error[kErrorCapacity];
thread_local size_t last_error_bytes = 0;

// Where to cut `text` so that at most `limit` bytes remain and no UTF-8 sequence is split.
size_t utf8_cut(const char *text, size_t bytes, size_t limit) {
  if (bytes <= limit) return bytes;
  size_t cut = limit;
  while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xc0) == 0x80) --cut;
  return cut;
}

int32_t fail(int32_t code, const char *text, size_t bytes) noexcept {
  last_error_bytes = utf8_cut(text, bytes, kErrorCapacity - 1);
  std::memcpy(last_error, text, last_error_bytes);
  return code;
}
int32_t fail(int32_t code, const char *text) noexcept { return fail(code, text, std::strlen(text)); }

// Copies text NUL-terminated, cut to capacity; returns its full length.
int32_t copy_text(const char *text, size_t bytes, char *out, uint32_t capacity) {
  if (out != nullptr && capacity > 0) {
    const size_t cut = utf8_cut(text, bytes, capacity - 1);
    std::memcpy(out, text, cut);
    out[cut] = '\0';
  }
  return static_cast<int32_t>(bytes);
}

// Runs fn, which returns a Status. LS_OK gives `value()`, a count >= 0.
template <class F, class V>
int32_t guarded(F &&fn, V &&value) noexcept {
  try {
    const Status status = fn();
    if (status.ok()) return value();
    return fail(status.code < 0 ? status.code : LS_INTERNAL, status.text.data(), status.text.size());
  } catch (const std::bad_alloc &) {
    return fail(LS_NO_MEMORY, "out of host memory");
  } catch (const std::length_error &) {
    return fail(LS_NO_MEMORY, "out of host memory");
  } catch (const std::exception &e) {
    return fail(LS_INTERNAL, e.what());
  } catch (...) {
    return fail(LS_INTERNAL, "unknown exception");
  }
}
template <class F>
int32_t guarded(F &&fn) noexcept {
  return guarded(fn, [] { return int32_t{LS_OK}; });
}
// The same with an engine that must not be NULL.
template <class F>
int32_t on_engine(ls_engine *engine, F &&fn) noexcept {
  if (engine == nullptr) return fail(LS_INVALID, "engine is NULL");
  return guarded([&] { return fn(engine->core); });
}
template <class F>
int32_t count_on_engine(ls_engine *engine, F &&fn) noexcept {
  if (engine == nullptr) return fail(LS_INVALID, "engine is NULL");
  uint32_t count = 0;
  return guarded([&] { return fn(engine->core, count); }, [&] { return static_cast<int32_t>(count); });
}

uint64_t join(uint32_t lo, uint32_t hi) { return static_cast<uint64_t>(hi) << 32 | lo; }

}  // namespace

extern "C" {

uint32_t ls_abi_version(void) { return LS_ABI_VERSION; }

int32_t ls_last_error(char *text, uint32_t capacity) { return copy_text(last_error, last_error_bytes, text, capacity); }

int32_t ls_device_info(char *json, uint32_t capacity) {
  int32_t length = 0;
  return guarded(
      [&] {
        std::string text;
        Status status = ls::device_info_json(text);
        if (status.ok()) length = copy_text(text.data(), text.size(), json, capacity);
        return status;
      },
      [&] { return length; });
}

int32_t ls_engine_create(const ls_config *config, const float *inv_freq, ls_engine **out) {
  if (out == nullptr) return fail(LS_INVALID, "out is NULL");
  *out = nullptr;
  return guarded([&]() -> Status {
    if (Status status = ls::validate_config(config, inv_freq); !status.ok()) return status;
    std::unique_ptr<ls::Backend> backend;
    if (Status status = ls::make_backend(*config, inv_freq, backend); !status.ok()) return status;
    *out = new ls_engine{ls::Engine(*config, std::move(backend))};
    return Status::good();
  });
}

void ls_engine_destroy(ls_engine *engine) { delete engine; }

int32_t ls_weights_map(ls_engine *engine, const char *path, uint64_t expected_bytes) {
  return count_on_engine(engine, [&](ls::Engine &core, uint32_t &file) { return core.map_weights(path, expected_bytes, file); });
}

int32_t ls_weights_set(ls_engine *engine, uint32_t tensor_id, uint32_t file, uint64_t offset, uint64_t bytes, uint32_t dtype, uint32_t rows, uint32_t cols) {
  return on_engine(engine, [&](ls::Engine &core) { return core.set_tensor(tensor_id, file, offset, bytes, dtype, rows, cols); });
}

int32_t ls_kv_scales(ls_engine *engine, const float *scales, uint32_t layers) {
  return on_engine(engine, [&](ls::Engine &core) { return core.set_kv_scales(scales, layers); });
}

int32_t ls_weights_finish(ls_engine *engine) {
  return on_engine(engine, [](ls::Engine &core) { return core.finish_weights(); });
}

int32_t ls_load_progress(ls_engine *engine) {
  if (engine == nullptr) return fail(LS_INVALID, "engine is NULL");
  return std::clamp(engine->core.load_permille(), 0, 1000);
}

int32_t ls_memory(ls_engine *engine, ls_memory_t *out) {
  return on_engine(engine, [&](ls::Engine &core) -> Status {
    if (out == nullptr) return Status::fail(LS_INVALID, "out is NULL");
    if (out->struct_size != sizeof *out) return Status::fail(LS_INVALID, "memory.struct_size is " + std::to_string(out->struct_size) + ", expected " + std::to_string(sizeof *out));
    return core.memory(*out);
  });
}

int32_t ls_pool_create(ls_engine *engine, uint32_t pages) {
  return on_engine(engine, [&](ls::Engine &core) { return core.create_pool(pages); });
}

int32_t ls_pool_stats(ls_engine *engine, ls_pool_stats_t *out) {
  return on_engine(engine, [&](ls::Engine &core) -> Status {
    if (out == nullptr) return Status::fail(LS_INVALID, "out is NULL");
    if (out->struct_size != sizeof *out) return Status::fail(LS_INVALID, "stats.struct_size is " + std::to_string(out->struct_size) + ", expected " + std::to_string(sizeof *out));
    core.stats(*out);
    return Status::good();
  });
}

int32_t ls_pool_check(ls_engine *engine) {
  return on_engine(engine, [](ls::Engine &core) { return core.check(); });
}

int32_t ls_seq_open(ls_engine *engine, const int32_t *tokens, uint32_t count, uint32_t domain_lo, uint32_t domain_hi, int32_t *out) {
  return on_engine(engine, [&](ls::Engine &core) { return core.open(tokens, count, join(domain_lo, domain_hi), out); });
}

int32_t ls_seq_close(ls_engine *engine, int32_t slot, uint32_t commit) {
  return on_engine(engine, [&](ls::Engine &core) { return core.close(slot, commit); });
}

int32_t ls_step_submit(ls_engine *engine, const int32_t *plan, uint32_t words) {
  return on_engine(engine, [&](ls::Engine &core) { return core.submit(plan, words); });
}

int32_t ls_step_wait(ls_engine *engine, int32_t *result, uint32_t capacity) {
  return count_on_engine(engine, [&](ls::Engine &core, uint32_t &written) { return core.wait(result, capacity, written); });
}

int32_t ls_cache_clear(ls_engine *engine) {
  return on_engine(engine, [](ls::Engine &core) { return core.clear_cache(); });
}

int32_t ls_events_drain(ls_engine *engine, int32_t *words, uint32_t capacity) {
  return count_on_engine(engine, [&](ls::Engine &core, uint32_t &written) { return core.drain_events(words, capacity, written); });
}

int32_t ls_kv_start(ls_engine *engine, const ls_kv_config *config, const uint8_t *model_digest, const uint8_t *key, const char *host) {
  return count_on_engine(engine, [&](ls::Engine &core, uint32_t &port) { return core.start_transfer(config, model_digest, key, host, port); });
}

int32_t ls_kv_layout(ls_engine *engine, uint8_t *out) {
  return on_engine(engine, [&](ls::Engine &core) { return core.layout(out); });
}

int32_t ls_kv_stats(ls_engine *engine, ls_kv_stats_t *out) {
  return on_engine(engine, [&](ls::Engine &core) -> Status {
    if (out == nullptr) return Status::fail(LS_INVALID, "out is NULL");
    if (out->struct_size != sizeof *out) return Status::fail(LS_INVALID, "stats.struct_size is " + std::to_string(out->struct_size) + ", expected " + std::to_string(sizeof *out));
    return core.transfer_stats(*out);
  });
}

int32_t ls_kv_stage(ls_engine *engine, int32_t slot, uint32_t tokens) {
  return on_engine(engine, [&](ls::Engine &core) { return core.stage(slot, tokens); });
}

int32_t ls_kv_publish(ls_engine *engine, int32_t slot, uint32_t *out) {
  return on_engine(engine, [&](ls::Engine &core) { return core.publish(slot, out); });
}

int32_t ls_kv_release(ls_engine *engine, uint32_t id_lo, uint32_t id_hi) {
  return on_engine(engine, [&](ls::Engine &core) { return core.release(join(id_lo, id_hi)); });
}

int32_t ls_seq_open_pull(ls_engine *engine, const int32_t *tokens, uint32_t count, uint32_t domain_lo, uint32_t domain_hi, const ls_kv_source *source, const char *host, const uint8_t *layout,
                         int32_t *out) {
  return on_engine(engine, [&](ls::Engine &core) { return core.open_pull(tokens, count, join(domain_lo, domain_hi), source, host, layout, out); });
}

int32_t ls_kv_drop(ls_engine *engine, const char *host, uint32_t port, uint32_t id_lo, uint32_t id_hi) {
  return on_engine(engine, [&](ls::Engine &core) { return core.drop(host, port, join(id_lo, id_hi)); });
}

int32_t ls_kv_events(ls_engine *engine, int32_t *words, uint32_t capacity) {
  return count_on_engine(engine, [&](ls::Engine &core, uint32_t &written) { return core.drain_transfers(words, capacity, written); });
}

}  // extern "C"
