#include "transfer.h"

namespace ls::kv {
namespace {

struct Field {
  const char *name;
  uint32_t ls_kv_config::*member;
  uint32_t fallback, most;
};
constexpr uint32_t kHour = 3'600'000;
constexpr Field kFields[] = {
    {"hold_ms", &ls_kv_config::hold_ms, 60'000, kHour},       {"connection_ms", &ls_kv_config::connection_ms, 60'000, kHour}, {"request_ms", &ls_kv_config::request_ms, 10'000, kHour},
    {"connect_ms", &ls_kv_config::connect_ms, 5'000, kHour},  {"idle_ms", &ls_kv_config::idle_ms, 10'000, kHour},             {"max_connections", &ls_kv_config::max_connections, 256, 1u << 16},
    {"ranks", &ls_kv_config::ranks, 1, 1024},
};

}  // namespace

Status read_settings(const ls_kv_config *config, const uint8_t *key, Settings &out) {
  const auto invalid = [](std::string text) { return Status::fail(LS_INVALID, "kv config: " + std::move(text)); };
  if (config == nullptr) return invalid("it is NULL");
  if (config->struct_size != sizeof *config) return invalid("struct_size is " + std::to_string(config->struct_size) + ", expected " + std::to_string(sizeof *config));
  ls_kv_config c = *config;
  for (const Field &field : kFields) {
    uint32_t &value = c.*field.member;
    if (value > field.most) return invalid(std::string(field.name) + " is " + std::to_string(value) + ", expected 1.." + std::to_string(field.most) + ", or 0 for " + std::to_string(field.fallback));
    if (value == 0) value = field.fallback;
  }
  if (c.key_bytes != 0 && (c.key_bytes < 16 || c.key_bytes > LS_KV_MAX_KEY_BYTES))
    return invalid("key_bytes is " + std::to_string(c.key_bytes) + ", expected 0 or 16.." + std::to_string(LS_KV_MAX_KEY_BYTES));
  if (c.key_bytes != 0 && key == nullptr) return invalid("key is NULL, expected " + std::to_string(c.key_bytes) + " bytes");
  using std::chrono::milliseconds;
  const std::vector<uint8_t> key_bytes = c.key_bytes ? std::vector<uint8_t>(key, key + c.key_bytes) : std::vector<uint8_t>();
  out.hold = milliseconds(c.hold_ms);
  out.server = {milliseconds(c.request_ms), milliseconds(c.connection_ms), c.max_connections, key_bytes};
  out.client = {milliseconds(c.connect_ms), milliseconds(c.idle_ms), milliseconds(c.connection_ms), key_bytes};
  out.ranks = c.ranks;
  return Status::good();
}

}  // namespace ls::kv
