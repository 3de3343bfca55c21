#include "fake_nccl.h"

#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Clique {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<const float *> send;
  size_t arrived = 0;
  unsigned turn = 0;
  bool aborted = false;
  int error = 0;

  // False when the communicators were aborted meanwhile.
  bool meet() {
    std::unique_lock lock(mutex);
    const unsigned mine = turn;
    if (++arrived == send.size()) {
      arrived = 0, ++turn;
      changed.notify_all();
    }
    changed.wait(lock, [&] { return aborted || turn != mine; });
    return turn != mine;
  }
  void never() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return aborted; });
  }
};

std::mutex g_mutex;
FakeNccl g_settings;
FakeNcclCounts g_counts;
int g_group = 0;

}  // namespace

struct Sum {
  struct ncclComm *comm;
  const float *send;
  float *receive;
  size_t count;
  bool shared = false;  // not a sum: what rank 0 has
};

struct ncclComm {
  std::shared_ptr<Clique> clique;
  size_t rank = 0;
  bool gone = false;
  int calls = 0, sums = 0;
  std::vector<std::unique_ptr<Sum>> kept;  // graphs come back to them
};

namespace {

std::vector<std::unique_ptr<ncclComm>> g_comms;  // all that ever were: a late use must be found, not crash

void run(void *arg) {
  const Sum &sum = *static_cast<Sum *>(arg);
  ncclComm &comm = *sum.comm;
  Clique &clique = *comm.clique;
  const size_t ranks = clique.send.size();
  FakeNccl settings;
  bool gone;
  {
    const std::lock_guard lock(g_mutex);
    settings = g_settings;
    gone = comm.gone;
    if (gone && !clique.aborted) ++g_counts.late;
    comm.sums += !sum.shared;
  }
  if (gone) return;
  if (sum.shared) {
    clique.send[comm.rank] = sum.send;
    if (!clique.meet()) return;
    if (comm.rank > 0) std::memcpy(sum.receive, clique.send[0], sum.count * 4);
    clique.meet();
    return;
  }
  if (comm.rank + 1 == ranks && comm.sums == settings.broken_sum) {
    {
      const std::lock_guard lock(clique.mutex);
      clique.error = 6;
    }
    return clique.never();
  }
  if (comm.rank + 1 == ranks && comm.sums == settings.endless_sum) return clique.never();
  clique.send[comm.rank] = sum.send;
  if (!clique.meet()) return;
  // One order for all ranks, another one for every element.
  std::vector<float> total(sum.count);
  for (size_t i = 0; i < sum.count; ++i) {
    total[i] = clique.send[i % ranks][i];
    for (size_t r = 1; r < ranks; ++r) total[i] += clique.send[(i + r) % ranks][i];
    total[i] *= 1 + static_cast<float>(comm.rank) * settings.apart;
  }
  if (!clique.meet()) return;
  std::memcpy(sum.receive, total.data(), sum.count * sizeof(float));
  const std::lock_guard lock(g_mutex);
  ++g_counts.sums;
}

Sum *keep(ncclComm *comm, const void *send, void *receive, size_t count, bool shared) {
  comm->kept.push_back(std::make_unique<Sum>(Sum{comm, static_cast<const float *>(send), static_cast<float *>(receive), count, shared}));
  return comm->kept.back().get();
}

int leave(ncclComm *comm, bool aborted) {
  const std::lock_guard lock(g_mutex);
  if (comm->gone || g_group == 0) ++g_counts.late;
  comm->gone = true;
  --g_counts.open;
  if (!aborted) return 0;
  ++g_counts.aborted;
  const std::lock_guard own(comm->clique->mutex);
  comm->clique->aborted = true;
  comm->clique->changed.notify_all();
  return 0;
}

}  // namespace

EXPORT void fake_nccl_reset(const FakeNccl *settings) {
  const std::lock_guard lock(g_mutex);
  g_settings = *settings;
  g_counts = {};
}
EXPORT void fake_nccl_count(FakeNcclCounts *out) {
  const std::lock_guard lock(g_mutex);
  *out = g_counts;
}

EXPORT int ncclGetVersion(int *version) {
  *version = g_settings.version;
  return 0;
}
EXPORT const char *ncclGetErrorString(int result) { return result == 2 ? "unhandled system error" : result == 6 ? "remote process exited or there was a network error" : "internal error"; }
EXPORT const char *ncclGetLastError(ncclComm *) { return "the fake said so"; }

EXPORT int ncclCommInitAll(ncclComm **comms, int count, const int *) {
  if (g_settings.init_error != 0) return g_settings.init_error;
  auto clique = std::make_shared<Clique>();
  clique->send.resize(static_cast<size_t>(count));
  const std::lock_guard lock(g_mutex);
  for (int r = 0; r < count; ++r) {
    g_comms.push_back(std::make_unique<ncclComm>());
    comms[r] = g_comms.back().get();
    comms[r]->clique = clique;
    comms[r]->rank = static_cast<size_t>(r);
    ++g_counts.open;
  }
  return 0;
}
EXPORT int ncclCommDestroy(ncclComm *comm) { return leave(comm, false); }
EXPORT int ncclCommAbort(ncclComm *comm) { return leave(comm, true); }
EXPORT int ncclCommGetAsyncError(ncclComm *comm, int *error) {
  const std::lock_guard lock(comm->clique->mutex);
  *error = comm->clique->error;
  return 0;
}
EXPORT int ncclGroupStart() { return ++g_group, 0; }
EXPORT int ncclGroupEnd() { return --g_group, 0; }

#ifndef FAKE_NCCL_INCOMPLETE
EXPORT int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, ncclComm *comm, CUstream_st *stream) {
  if (type != 7 || op != 0) return 4;  // the sum of f32 alone
  Sum *sum;
  {
    const std::lock_guard lock(g_mutex);
    ++g_counts.calls;
    if (comm->gone) ++g_counts.late;
    if (comm->rank + 1 == comm->clique->send.size() && ++comm->calls == g_settings.fail_call) return 2;
    sum = keep(comm, send, receive, count, false);
  }
  g_settings.enqueue(stream, run, sum);
  return 0;
}
#endif

EXPORT int ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, ncclComm *comm, CUstream_st *stream) {
  if (type != 2 || root != 0) return 4;  // i32 of rank 0 alone
  Sum *sum;
  {
    const std::lock_guard lock(g_mutex);
    if (comm->gone) ++g_counts.late;
    sum = keep(comm, send, receive, count, true);
  }
  g_settings.enqueue(stream, run, sum);
  return 0;
}
