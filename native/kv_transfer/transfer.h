// All that moves KV between engines, put together for one engine.
#pragma once
#include <memory>

#include "kv_transfer/client.h"
#include "kv_transfer/server.h"
#include "kv_transfer/stager.h"

namespace ls::kv {

// The settings of ls_kv_config with its defaults filled in; LS_INVALID names field, value and what was expected.
struct Settings {
  std::chrono::milliseconds hold{};
  ServerOptions server;
  ClientOptions client;
  uint32_t ranks = 1;
};
Status read_settings(const ls_kv_config *config, const uint8_t *key, Settings &out);

// Destroyed in reverse order: the threads before what they use.
struct Transfer {
  Transfer(const Layout &layout_, const Settings &settings, Backend &backend)
      : layout(layout_), store(settings.hold, endings), stager(backend, layout_.layers), client(endings, settings.client) {}
  const Layout layout;
  Endings endings;
  StagingStore store;
  Stager stager;
  std::unique_ptr<Server> server;  // null: this engine only pulls
  Client client;
};

}  // namespace ls::kv
