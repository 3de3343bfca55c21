// An engine whose weights are not there yet, for tests of the calls before ls_weights_finish.
#pragma once
#include <cstdint>
#include <string>

#include "check.h"
#include "config.h"
#include "harness.h"

namespace ls::test {

inline bool says(const std::string &part) { return last_error().find(part) != std::string::npos; }

// An engine that is still loading, over a file of zeros.
struct Loading {
  ls_config config;
  ls_engine *engine = nullptr;
  TempFile file{1 << 20};
  uint32_t index = 0;
  explicit Loading(ls_config c = small_config()) : config(c) {
    CHECK_EQ(ls_engine_create(&config, small_inv_freq(config).data(), &engine), LS_OK);
    const int32_t code = ls_weights_map(engine, file.path(), 1 << 20);
    CHECK(code >= 0);
    index = static_cast<uint32_t>(code);
  }
  ~Loading() { ls_engine_destroy(engine); }
  // bytes: the exact size unless given.
  int32_t set(uint32_t id, uint32_t dtype, uint32_t rows, uint32_t cols, uint64_t offset = 0, int64_t bytes = -1) {
    return ls_weights_set(engine, id, index, offset, bytes < 0 ? ls::tensor_bytes(dtype, rows, cols).value_or(0) : static_cast<uint64_t>(bytes), dtype, rows, cols);
  }
};

}  // namespace ls::test
