// A library with the calls of NCCL that really sums over the ranks of one process, on the simulator's streams, and fails when told to.
#pragma once

struct CUstream_st;

struct FakeNccl {
  int version = 22803;
  int init_error = 0;     // ncclResult_t of ncclCommInitAll
  int fail_call = 0;      // the n-th ncclAllReduce of the last rank returns ncclSystemError
  int broken_sum = 0;     // the n-th sum of the last rank never ends, and ncclCommGetAsyncError tells ncclRemoteError
  int endless_sum = 0;    // the n-th sum of the last rank never ends, and nobody says anything
  float apart = 0;        // the sums of rank r are multiplied by 1 + r * apart: what NCCL promises not to do
  // Runs fn(arg) on a stream, or keeps it for the graph that is being captured.
  void (*enqueue)(CUstream_st *stream, void (*fn)(void *), void *arg) = nullptr;
};

struct FakeNcclCounts {
  int calls = 0;          // of ncclAllReduce
  int sums = 0;           // that ended, of all ranks
  int open = 0;           // communicators neither destroyed nor aborted
  int aborted = 0;
  int late = 0;           // calls and sums of communicators that are gone, calls outside of a group that belong into one
};

// Exported by the library under these names.
using FakeNcclReset = void (*)(const FakeNccl *settings);  // "fake_nccl_reset": and counts from zero
using FakeNcclCount = void (*)(FakeNcclCounts *out);       // "fake_nccl_count"
