#include "weights.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>

#include "config.h"

namespace ls {
namespace {

struct FileDescriptor {
  int fd;
  ~FileDescriptor() {
    if (fd >= 0) ::close(fd);
  }
};

Status io_error(const char *path, const std::string &what) { return Status::fail(LS_IO, std::string(path) + ": " + what); }
std::string errno_text(const char *call) { return std::string(call) + " failed: " + std::strerror(errno); }
std::string shape_text(uint32_t rows, uint32_t cols) { return "(" + std::to_string(rows) + ", " + std::to_string(cols) + ")"; }

}  // namespace

WeightFiles::~WeightFiles() {
  for (const Mapping &m : files_) ::munmap(const_cast<uint8_t *>(m.data), m.bytes);
}

Status WeightFiles::map(const char *path, uint64_t expected_bytes, uint32_t &file) {
  if (path == nullptr || *path == '\0') return Status::fail(LS_INVALID, "path is empty");
  if (files_.size() >= std::numeric_limits<int32_t>::max()) return Status::fail(LS_INVALID, "too many weight files");
  files_.reserve(files_.size() + 1);
  Mapping mapping{path, nullptr, 0};
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  const FileDescriptor file_descriptor{::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file_descriptor.fd < 0) return io_error(path, errno_text("open"));
  struct stat info {};
  if (::fstat(file_descriptor.fd, &info) != 0) return io_error(path, errno_text("fstat"));
  if (!S_ISREG(info.st_mode)) return io_error(path, "not a regular file");
  mapping.bytes = static_cast<uint64_t>(info.st_size);
  if (mapping.bytes == 0) return io_error(path, "the file is empty");
  if (mapping.bytes < expected_bytes) return io_error(path, "the file has " + std::to_string(mapping.bytes) + " bytes, expected at least " + std::to_string(expected_bytes));
  void *data = ::mmap(nullptr, mapping.bytes, PROT_READ, MAP_PRIVATE, file_descriptor.fd, 0);
  if (data == MAP_FAILED) return io_error(path, errno_text("mmap"));
  // Hints: start reading ahead, and use huge pages where the file system can. Neither is needed, so failures do not matter.
  ::madvise(data, mapping.bytes, MADV_WILLNEED);
  ::madvise(data, mapping.bytes, MADV_HUGEPAGE);
  mapping.data = static_cast<const uint8_t *>(data);
  file = static_cast<uint32_t>(files_.size());
  files_.push_back(std::move(mapping));
  return Status::good();
}

Status WeightFiles::set(Backend &backend, uint32_t id, uint32_t file, uint64_t offset, uint64_t bytes, uint32_t dtype, uint32_t rows, uint32_t cols) {
  const std::string name = tensor_name(id);
  const auto invalid = [&](const std::string &what) { return Status::fail(LS_INVALID, name + ": " + what); };
  const std::optional<TensorShape> shape = tensor_shape(config_, id);
  if (!shape) return invalid("this model has no such tensor (id " + std::to_string(id) + ", " + std::to_string(config_.layers) + " layers)");
  if (placed_.contains(id)) return invalid("set twice");
  if (rows != shape->rows || cols != shape->cols) return invalid("shape is " + shape_text(rows, cols) + ", expected " + shape_text(shape->rows, shape->cols));
  if (dtype_name(dtype) == nullptr) return Status::fail(LS_UNSUPPORTED, name + ": dtype " + std::to_string(dtype) + " is unknown");
  if (shape->vector && dtype_quantised(dtype))
    return Status::fail(LS_UNSUPPORTED, name + ": dtype is " + dtype_name(dtype) + ", expected f32, f16 or bf16");
  const std::optional<uint64_t> exact = tensor_bytes(dtype, rows, cols);
  if (!exact) return invalid("cols is " + std::to_string(cols) + ", expected a multiple of 32 for " + dtype_name(dtype));
  if (bytes != *exact)
    return invalid("has " + std::to_string(bytes) + " bytes, expected " + std::to_string(*exact) + " for " + dtype_name(dtype) + " " + shape_text(rows, cols));
  if (file >= files_.size()) return invalid("file is " + std::to_string(file) + ", expected less than " + std::to_string(files_.size()));
  const Mapping &mapping = files_[file];
  if (offset > mapping.bytes || bytes > mapping.bytes - offset)
    return invalid("bytes " + std::to_string(offset) + " + " + std::to_string(bytes) + " reach past the " + std::to_string(mapping.bytes) + " bytes of " + mapping.path);

  TensorView view{mapping.data + offset, bytes, static_cast<ls_dtype>(dtype), rows, cols};
  const uint64_t alignment = dtype == LS_DTYPE_F32 ? 4 : 2;
  if (offset % alignment != 0) {
    realigned_.reserve(realigned_.size() + 1);
    realigned_.emplace_back(static_cast<uint8_t *>(::operator new(bytes, std::align_val_t{64})));
    std::memcpy(realigned_.back().get(), view.data, bytes);
    view.data = realigned_.back().get();
  }
  placed_.reserve(placed_.size() + 1);
  if (Status status = backend.set_tensor(id, view); !status.ok()) return Status::fail(status.code, name + ": " + status.text);
  placed_.insert(id);
  return Status::good();
}

Status WeightFiles::complete() const {
  for (const uint32_t id : required_tensors(config_))
    if (!placed_.contains(id)) return Status::fail(LS_INVALID, "missing tensor: " + tensor_name(id));
  return Status::good();
}

}  // namespace ls
