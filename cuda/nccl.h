// NCCL, the library of collectives of NVIDIA, where a machine has it: sums over ranks whose GPUs cannot reach each other's memory. Loaded by
// dlopen when it is wanted; nothing is linked, and no header of it is needed.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime.h"

struct ncclComm;

namespace ls::cuda {

// Calls of libnccl.so.2, as nccl.h of NCCL 2.13 and later declares them (docs.nvidia.com/deeplearning/nccl, "NCCL API"). ncclResult_t,
// ncclDataType_t and ncclRedOp_t are C enums, passed as int; cudaStream_t is CUstream_st *.
struct NcclApi {
  int (*GetVersion)(int *version);
  const char *(*GetErrorString)(int result);
  const char *(*GetLastError)(ncclComm *comm);  // of this thread; comm may be null
  int (*CommInitAll)(ncclComm **comms, int count, const int *devices);
  int (*CommDestroy)(ncclComm *comm);
  int (*CommAbort)(ncclComm *comm);  // also ends what is under way on the device
  int (*CommGetAsyncError)(ncclComm *comm, int *error);
  int (*GroupStart)();
  int (*GroupEnd)();
  int (*AllReduce)(const void *send, void *receive, size_t count, int type, int op, ncclComm *comm, Stream stream);
  int (*Broadcast)(const void *send, void *receive, size_t count, int type, int root, ncclComm *comm, Stream stream);
  int version = 0;  // 10000 * major + 100 * minor + patch
};
// LAYERSCALE_NCCL_LIB, else libnccl.so.2 where the dynamic loader finds it. LS_UNSUPPORTED: no such library, a function is missing, older than 2.13.
Status nccl_load(NcclApi &out);

// Seconds that a step may take before its sums count as stuck, and that setting up may take. For tests to change.
extern std::atomic<int> nccl_limit_seconds;

// A communicator of all ranks, and a thread that watches it while steps are under way: an error that NCCL finds on its own, an error of one rank,
// or a step beyond the limit aborts all communicators, so that whoever waits for the device goes on and finds the failure. Nothing hangs.
class NcclGroup {
 public:
  static Status create(const std::vector<int> &devices, std::unique_ptr<NcclGroup> &out);
  // No work of it is under way, and graphs that hold calls of it are gone.
  ~NcclGroup();
  NcclGroup(const NcclGroup &) = delete;
  NcclGroup &operator=(const NcclGroup &) = delete;

  // data[i] = sum over ranks of data[i], i < n, f32, on the rank's stream, which may be capturing. Called by the rank's own thread.
  Status all_reduce(uint32_t rank, float *data, size_t n, Stream stream);
  // data[i] = that of rank 0, i < n. As above.
  Status share(uint32_t rank, int32_t *data, size_t n, Stream stream);
  // The first failure; good while all is well.
  Status failure() const;
  // Something that waits for sums of all ranks begins; ends. Counted: two steps may be under way.
  void begin();
  void end();

 private:
  NcclGroup(const NcclApi &api, std::vector<ncclComm *> comms);
  const NcclApi api_;
  const std::vector<ncclComm *> comms_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Status failure_;
  int under_way_ = 0;
  uint64_t progress_ = 0;  // counts beginnings and ends
  bool stop_ = false;
  std::thread watch_;

  void fail(std::string text);
  void watch();
  Status called(uint32_t rank, const char *call, int result);
  Status problem(uint32_t rank, const char *call, int result) const;
};

}  // namespace ls::cuda
