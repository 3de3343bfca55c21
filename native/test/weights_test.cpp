// Weight files and tensors: what is refused, and what reaches the device.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>

#include "check.h"
#include "config.h"
#include "loading.h"

using namespace ls::test;

TEST("weights_map: missing, directory, FIFO, empty, short") {
  Loading l;
  const auto refused = [&](const char *path, uint64_t bytes, const char *part) {
    const int32_t code = ls_weights_map(l.engine, path, bytes);
    if (code != LS_IO || !says(part) || !says(path)) check::fail(__FILE__, __LINE__, std::to_string(code) + " " + last_error());
  };
  refused("/nonexistent/model.gguf", 0, "No such file");
  refused("/tmp", 0, "not a regular file");
  const std::string fifo = std::string(l.file.path()) + ".fifo";
  CHECK_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  refused(fifo.c_str(), 0, "not a regular file");
  ::unlink(fifo.c_str());
  const TempFile empty(0);
  refused(empty.path(), 0, "empty");
  refused(l.file.path(), (1 << 20) + 1, "1048577");
  CHECK_EQ(ls_weights_map(l.engine, nullptr, 0), LS_INVALID);
  CHECK_EQ(ls_weights_map(l.engine, "", 0), LS_INVALID);
  CHECK_EQ(ls_weights_map(l.engine, l.file.path(), 5), 1);  // longer than promised is fine
}

TEST("weights_set: role, shape, dtype, size, range, duplicates") {
  Loading l;
  const uint32_t q1 = 256 + LS_ROLE_Q;  // layer 1: (32, 32)
  const auto refused = [&](int32_t code, int32_t expected, const char *part) {
    if (code != expected || !says(part)) check::fail(__FILE__, __LINE__, std::to_string(code) + " " + last_error() + ", expected " + part);
  };
  refused(l.set(0, LS_DTYPE_F32, 32, 32), LS_INVALID, "no such tensor");
  refused(l.set(77, LS_DTYPE_F32, 32, 32), LS_INVALID, "tensor id 77");
  refused(l.set(2 * 256 + LS_ROLE_Q, LS_DTYPE_F32, 32, 32), LS_INVALID, "layer 2 q: this model has no such tensor");
  refused(l.set(~0u, LS_DTYPE_F32, 32, 32), LS_INVALID, "no such tensor");
  refused(l.set(256 + LS_ROLE_EMBEDDING, LS_DTYPE_F32, 1000, 32), LS_INVALID, "no such tensor");
  refused(l.set(LS_ROLE_LM_HEAD, LS_DTYPE_F32, 1000, 32), LS_INVALID, "lm_head");  // tied
  refused(l.set(LS_ROLE_Q_BIAS, LS_DTYPE_F32, 1, 32), LS_INVALID, "layer 0 q_bias");
  refused(l.set(LS_ROLE_Q_NORM, LS_DTYPE_F32, 1, 16), LS_INVALID, "layer 0 q_norm");
  refused(l.set(q1, LS_DTYPE_F32, 32, 64), LS_INVALID, "layer 1 q: shape is (32, 64), expected (32, 32)");
  refused(l.set(q1, LS_DTYPE_F32, 0, 0), LS_INVALID, "shape");
  refused(l.set(q1, LS_DTYPE_F32, ~0u, ~0u), LS_INVALID, "shape");
  refused(l.set(q1, 6, 32, 32), LS_UNSUPPORTED, "dtype 6");
  refused(l.set(LS_ROLE_ATTN_NORM, LS_DTYPE_Q8_0, 1, 32), LS_UNSUPPORTED, "layer 0 attn_norm: dtype is q8_0");
  refused(l.set(q1, LS_DTYPE_F32, 32, 32, 0, 4095), LS_INVALID, "4095 bytes, expected 4096");
  refused(l.set(q1, LS_DTYPE_F32, 32, 32, 0, 0), LS_INVALID, "0 bytes");
  refused(l.set(q1, LS_DTYPE_F32, 32, 32, (1 << 20) - 4092), LS_INVALID, "reach past");
  refused(l.set(q1, LS_DTYPE_F32, 32, 32, ~uint64_t{0} - 100), LS_INVALID, "reach past");
  refused(ls_weights_set(l.engine, q1, 9, 0, 4096, LS_DTYPE_F32, 32, 32), LS_INVALID, "file is 9");
  CHECK(device().tensors.empty());
  CHECK_EQ(l.set(q1, LS_DTYPE_Q4_1, 32, 32, (1 << 20) - 640), LS_OK);
  CHECK_EQ(device().tensors.at(q1).bytes, uint64_t{640});
  refused(l.set(q1, LS_DTYPE_F32, 32, 32), LS_INVALID, "set twice");
  ls_config narrow = small_config();
  narrow.hidden = 40;
  Loading n(narrow);
  refused(n.set(LS_ROLE_Q, LS_DTYPE_Q8_0, 32, 40, 0, 34), LS_INVALID, "multiple of 32");
}

TEST("weights_set: data at an odd offset reaches the device aligned, with the same bytes") {
  Loading l;
  std::FILE *f = std::fopen(l.file.path(), "r+b");
  CHECK(f != nullptr);
  std::vector<uint8_t> bytes(3000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 31);
  std::fwrite(bytes.data(), 1, bytes.size(), f);
  std::fclose(f);
  CHECK_EQ(l.set(LS_ROLE_ATTN_NORM, LS_DTYPE_F32, 1, 32, 1001), LS_OK);
  CHECK_EQ(l.set(LS_ROLE_FFN_NORM, LS_DTYPE_F32, 1, 32, 1000), LS_OK);
  CHECK_EQ(l.set(LS_ROLE_FINAL_NORM, LS_DTYPE_BF16, 1, 32, 7), LS_OK);
  const auto same = [&](uint32_t id, size_t offset, uint64_t alignment) {
    const ls::TensorView &v = device().tensors.at(id);
    CHECK_EQ(reinterpret_cast<uintptr_t>(v.data) % alignment, uintptr_t{0});
    CHECK(std::memcmp(v.data, bytes.data() + offset, v.bytes) == 0);
  };
  same(LS_ROLE_ATTN_NORM, 1001, 4);
  same(LS_ROLE_FFN_NORM, 1000, 4);
  same(LS_ROLE_FINAL_NORM, 7, 2);
}

TEST("weights_finish names the first missing tensor, for every switch of the config") {
  ls_config all = small_config();
  all.qkv_bias = all.o_bias = all.qk_norm = 1;
  all.tied_embeddings = 0;
  for (const ls_config &config : {small_config(), all}) {
    const std::vector<uint32_t> ids = ls::required_tensors(config);
    CHECK_EQ(ids.size(), config.tied_embeddings ? size_t{2 + 2 * 9} : size_t{3 + 2 * 15});
    for (const uint32_t missing : ids) {
      Loading l(config);
      for (const uint32_t id : ids) {
        const ls::TensorShape s = *ls::tensor_shape(config, id);
        if (id != missing) CHECK_EQ(l.set(id, LS_DTYPE_F16, s.rows, s.cols), LS_OK);
      }
      CHECK_EQ(ls_weights_finish(l.engine), LS_INVALID);
      CHECK_EQ(last_error(), "missing tensor: " + ls::tensor_name(missing));
      const ls::TensorShape s = *ls::tensor_shape(config, missing);
      CHECK_EQ(l.set(missing, LS_DTYPE_F16, s.rows, s.cols), LS_OK);
      CHECK_EQ(ls_weights_finish(l.engine), LS_OK);
    }
  }
  CHECK_EQ(ls::tensor_name(3 * 256 + LS_ROLE_Q), std::string("layer 3 q"));
}

TEST("load progress and stats answer from another thread while weights load; a failed load ends the engine") {
  Loading l;
  CHECK_EQ(load_zeros(l.engine, l.config), LS_OK);
  std::atomic<bool> gate{false};
  device().finish_gate = &gate;
  device().finish_status = ls::Status::fail(LS_NO_MEMORY, "repack");
  int32_t seen = 0, stats_code = -100;
  std::thread watcher([&] {
    while ((seen = ls_load_progress(l.engine)) != 500) std::this_thread::yield();
    ls_pool_stats_t stats{};
    stats.struct_size = sizeof stats;
    stats_code = ls_pool_stats(l.engine, &stats);
    gate = true;
    gate.notify_all();
  });
  const int32_t code = ls_weights_finish(l.engine);
  watcher.join();
  CHECK_EQ(seen, 500);
  CHECK_EQ(stats_code, LS_OK);
  CHECK_EQ(code, LS_NO_MEMORY);
  CHECK_EQ(ls_weights_finish(l.engine), LS_STATE);
  CHECK_EQ(ls_pool_create(l.engine, 4), LS_STATE);
  CHECK(says("repack"));
}
