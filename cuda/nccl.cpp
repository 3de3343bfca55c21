#include "nccl.h"

#include <dlfcn.h>
#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>

namespace ls::cuda {

std::atomic<int> nccl_limit_seconds{60};

namespace {

constexpr int kSuccess = 0, kInProgress = 7;  // ncclResult_t
constexpr int kInt32 = 2, kFloat32 = 7;       // ncclDataType_t
constexpr int kSum = 0;                       // ncclRedOp_t
constexpr int kOldest = 21300;                // CUDA graphs came with 2.9, ncclGetLastError with 2.13
constexpr auto kLook = std::chrono::milliseconds(50);

Status unsupported(std::string text) { return Status::fail(LS_UNSUPPORTED, std::move(text)); }

// Up to 2.8 the code was 1000 * major + 100 * minor + patch.
std::string version_text(int code) {
  const int major = code < 10000 ? code / 1000 : code / 10000, rest = code < 10000 ? code % 1000 : code % 10000;
  return std::to_string(major) + "." + std::to_string(rest / 100) + "." + std::to_string(rest % 100);
}

std::string result_text(const NcclApi &api, const std::string &call, int result, ncclComm *comm) {
  const char *what = api.GetErrorString(result), *last = api.GetLastError(comm);
  std::string text = "NCCL " + version_text(api.version) + ": " + call + ": " + (what != nullptr ? what : "error") + " (" + std::to_string(result) + ")";
  if (last != nullptr && *last != '\0') text += std::string(": ") + last;
  return text;
}

}  // namespace

Status nccl_load(NcclApi &out) {
  const char *given = std::getenv("LAYERSCALE_NCCL_LIB");
  const std::string path = given != nullptr && *given != '\0' ? given : "libnccl.so.2";
  // Never closed: NCCL keeps threads of its own.
  void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char *why = dlerror();
    return unsupported("NCCL cannot be loaded (LAYERSCALE_NCCL_LIB names another library): " + std::string(why != nullptr ? why : path));
  }
  std::string missing;
  const auto find = [&](auto &to, const char *name) {
    void *symbol = dlsym(library, name);
    if (symbol == nullptr && missing.empty()) missing = name;
    std::memcpy(&to, &symbol, sizeof to);
  };
  find(out.GetVersion, "ncclGetVersion");
  if (out.GetVersion == nullptr) return unsupported(path + " has no function ncclGetVersion: not a library of NCCL");
  if (out.GetVersion(&out.version) != kSuccess || out.version < kOldest)
    return unsupported("NCCL " + version_text(out.version) + " (" + path + ") is too old: expected " + version_text(kOldest) + " or later");
  find(out.GetErrorString, "ncclGetErrorString"), find(out.GetLastError, "ncclGetLastError");
  find(out.CommInitAll, "ncclCommInitAll"), find(out.CommDestroy, "ncclCommDestroy"), find(out.CommAbort, "ncclCommAbort"), find(out.CommGetAsyncError, "ncclCommGetAsyncError");
  find(out.GroupStart, "ncclGroupStart"), find(out.GroupEnd, "ncclGroupEnd"), find(out.AllReduce, "ncclAllReduce"), find(out.Broadcast, "ncclBroadcast");
  return missing.empty() ? Status::good() : unsupported("NCCL " + version_text(out.version) + " (" + path + ") has no function " + missing);
}

// Setting up connects the ranks through sockets and has no limit of its own: it runs on a thread that is left behind when it does not end.
Status NcclGroup::create(const std::vector<int> &devices, std::unique_ptr<NcclGroup> &out) {
  NcclApi api{};
  if (Status status = nccl_load(api); !status.ok()) return status;
  struct Setup {
    std::vector<ncclComm *> comms;
    Status status;
  };
  std::promise<Setup> promise;
  std::future<Setup> ready = promise.get_future();
  std::thread([api, devices, promise = std::move(promise)]() mutable {
    Setup setup{std::vector<ncclComm *>(devices.size()), use_device(devices[0])};
    if (setup.status.ok())
      if (const int result = api.CommInitAll(setup.comms.data(), static_cast<int>(devices.size()), devices.data()); result != kSuccess)
        setup.status = unsupported(result_text(api, "ncclCommInitAll of " + std::to_string(devices.size()) + " GPUs", result, nullptr));
    promise.set_value(std::move(setup));
  }).detach();
  if (ready.wait_for(std::chrono::seconds(nccl_limit_seconds)) != std::future_status::ready)
    return unsupported("NCCL " + version_text(api.version) + ": ncclCommInitAll has not ended within " + std::to_string(nccl_limit_seconds) + " s");
  Setup setup = ready.get();
  if (!setup.status.ok()) return setup.status;
  out.reset(new NcclGroup(api, std::move(setup.comms)));
  return Status::good();
}

NcclGroup::NcclGroup(const NcclApi &api, std::vector<ncclComm *> comms) : api_(api), comms_(std::move(comms)), watch_([this] { watch(); }) { pthread_setname_np(watch_.native_handle(), "ls-nccl"); }

NcclGroup::~NcclGroup() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  watch_.join();
  if (!failure_.ok()) return;  // aborted, which frees them
  api_.GroupStart();
  for (ncclComm *comm : comms_) api_.CommDestroy(comm);
  api_.GroupEnd();
}

Status NcclGroup::problem(uint32_t rank, const char *call, int result) const {
  return Status::fail(LS_INTERNAL, result_text(api_, std::string(call) + " on rank " + std::to_string(rank), result, comms_[rank]));
}

Status NcclGroup::all_reduce(uint32_t rank, float *data, size_t n, Stream stream) {
  if (Status status = failure(); !status.ok()) return status;
  return called(rank, "ncclAllReduce", api_.AllReduce(data, data, n, kFloat32, kSum, comms_[rank], stream));
}

Status NcclGroup::share(uint32_t rank, int32_t *data, size_t n, Stream stream) {
  if (Status status = failure(); !status.ok()) return status;
  return called(rank, "ncclBroadcast", api_.Broadcast(data, data, n, kInt32, 0, comms_[rank], stream));
}

Status NcclGroup::called(uint32_t rank, const char *call, int result) {
  if (result == kSuccess) return Status::good();
  // An abort meanwhile ends the call, too, and what failed first is told.
  if (Status status = failure(); !status.ok()) return status;
  // The others wait for this rank on their devices.
  fail(problem(rank, call, result).text);
  return failure();
}

Status NcclGroup::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void NcclGroup::fail(std::string text) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = Status::fail(LS_INTERNAL, std::move(text));
  }
  changed_.notify_all();
}

void NcclGroup::begin() {
  {
    const std::lock_guard lock(mutex_);
    ++under_way_, ++progress_;
  }
  changed_.notify_all();
}

void NcclGroup::end() {
  const std::lock_guard lock(mutex_);
  --under_way_, ++progress_;
}

void NcclGroup::watch() {
  std::unique_lock lock(mutex_);
  uint64_t seen = 0;
  auto since = std::chrono::steady_clock::now();
  while (failure_.ok()) {
    if (stop_) return;
    if (under_way_ == 0) changed_.wait(lock, [this] { return stop_ || under_way_ > 0 || !failure_.ok(); });
    else changed_.wait_for(lock, kLook);
    if (stop_ || !failure_.ok()) continue;
    const auto now = std::chrono::steady_clock::now();
    if (seen != progress_) seen = progress_, since = now;
    else if (now - since > std::chrono::seconds(nccl_limit_seconds)) failure_ = Status::fail(LS_INTERNAL, "NCCL " + version_text(api_.version) + ": a step has not ended within " + std::to_string(nccl_limit_seconds) + " s (--tp)");
    lock.unlock();
    Status found;
    for (uint32_t r = 0; found.ok() && r < comms_.size(); ++r) {
      int error = kSuccess;
      const int result = api_.CommGetAsyncError(comms_[r], &error);
      if (result != kSuccess) found = problem(r, "ncclCommGetAsyncError", result);
      else if (error != kSuccess && error != kInProgress) found = problem(r, "a sum over the ranks", error);
    }
    lock.lock();
    if (!found.ok() && failure_.ok()) failure_ = std::move(found);
  }
  // All at once: each tells its device to give up, then waits until nothing runs and no graph holds it any more.
  lock.unlock();
  api_.GroupStart();
  for (ncclComm *comm : comms_) api_.CommAbort(comm);
  api_.GroupEnd();
}

}  // namespace ls::cuda
