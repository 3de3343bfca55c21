// Weight files mapped read-only, and the tensors placed in them.
#pragma once
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <unordered_set>
#include <vector>

#include "backend.h"

namespace ls {

// Every byte that reaches the backend lies in a mapping of this object, which must outlive the backend.
class WeightFiles {
 public:
  explicit WeightFiles(const ls_config &config) : config_(config) {}
  ~WeightFiles();
  WeightFiles(const WeightFiles &) = delete;
  WeightFiles &operator=(const WeightFiles &) = delete;

  // Maps a regular file. LS_IO: cannot be opened or mapped, or is shorter than expected_bytes.
  Status map(const char *path, uint64_t expected_bytes, uint32_t &file);
  // Checks one tensor against the config and its file, and hands it to the backend. LS_INVALID, LS_UNSUPPORTED (unknown dtype).
  Status set(Backend &backend, uint32_t id, uint32_t file, uint64_t offset, uint64_t bytes, uint32_t dtype, uint32_t rows, uint32_t cols);
  // LS_INVALID naming the first tensor that the config demands and nobody set.
  Status complete() const;

 private:
  struct Mapping {
    std::string path;
    const uint8_t *data = nullptr;
    uint64_t bytes = 0;
  };
  struct AlignedFree {
    void operator()(uint8_t *p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  ls_config config_;
  std::vector<Mapping> files_;
  std::unordered_set<uint32_t> placed_;
  // Copies of tensors whose file offset is no multiple of their element size, so that backends may read them as typed arrays.
  std::vector<std::unique_ptr<uint8_t, AlignedFree>> realigned_;
};

}  // namespace ls
