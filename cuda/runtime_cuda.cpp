// runtime.h over cudart, which is linked statically and finds the driver at run time.
#include <cuda_runtime_api.h>

#include <cstdio>

#include "kernels/probe.h"
#include "runtime.h"

namespace ls::cuda {
namespace {

Status check(cudaError_t error, const char *call) {
  if (error == cudaSuccess) return Status::good();
  cudaGetLastError();  // the next call starts clean, unless the context is gone
  const int32_t code = error == cudaErrorMemoryAllocation ? LS_NO_MEMORY : error == cudaErrorNoKernelImageForDevice || error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice ? LS_UNSUPPORTED : LS_INTERNAL;
  return Status::fail(code, std::string(call) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

std::string version_text(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

std::string uuid_text(const cudaUUID_t &uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char pair[3];
    std::snprintf(pair, sizeof pair, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += pair;
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
}

}  // namespace

DriverVersions driver_versions() {
  DriverVersions versions;
  if (cudaDriverGetVersion(&versions.driver) != cudaSuccess) versions.driver = 0;
  cudaRuntimeGetVersion(&versions.runtime);
  cudaGetLastError();
  return versions;
}

Status device_count(int &count) {
  count = 0;
  const DriverVersions versions = driver_versions();
  if (versions.driver == 0) return Status::fail(LS_UNSUPPORTED, "no CUDA driver is installed");
  // Minor versions of the driver may be older than the library's.
  if (versions.driver / 1000 < versions.runtime / 1000)
    return Status::fail(LS_UNSUPPORTED, "the CUDA driver is too old: it serves CUDA " + version_text(versions.driver) + ", this library needs " + std::to_string(versions.runtime / 1000) + ".0 or later");
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice) {
    cudaGetLastError();
    return Status::good();
  }
  return check(error, "cudaGetDeviceCount");
}

Status device_properties(int device, DeviceProperties &out) {
  cudaDeviceProp properties;
  if (Status status = check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties"); !status.ok()) return status;
  out.name = properties.name;
  out.major = properties.major;
  out.minor = properties.minor;
  out.total_bytes = out.free_bytes = properties.totalGlobalMem;
  out.multiprocessors = properties.multiProcessorCount;
  out.uuid = uuid_text(properties.uuid);
  return Status::good();
}

Status device_has_code(int device) {
  if (Status status = use_device(device); !status.ok()) return status;
  cudaFuncAttributes attributes;
  return check(cudaFuncGetAttributes(&attributes, probe_kernel()), "cudaFuncGetAttributes");
}

Status use_device(int device) { return check(cudaSetDevice(device), "cudaSetDevice"); }

Status memory_info(uint64_t &free_bytes, uint64_t &total_bytes) {
  size_t free = 0, total = 0;
  Status status = check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  free_bytes = free;
  total_bytes = total;
  return status;
}

Status device_alloc(size_t bytes, void **out) {
  *out = nullptr;
  Status status = check(cudaMalloc(out, bytes), "cudaMalloc");
  if (!status.ok()) status.text += " for " + std::to_string(bytes) + " bytes";
  return status;
}
void device_free(void *memory) {
  if (memory != nullptr) cudaFree(memory);
}

Status host_alloc(size_t bytes, void **out) {
  *out = nullptr;
  Status status = check(cudaHostAlloc(out, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
  if (!status.ok()) status.text += " for " + std::to_string(bytes) + " bytes";
  return status;
}
void host_free(void *memory) {
  if (memory != nullptr) cudaFreeHost(memory);
}

Status peer_possible(int device, int peer, bool &possible) {
  int can = 0;
  Status status = check(cudaDeviceCanAccessPeer(&can, device, peer), "cudaDeviceCanAccessPeer");
  possible = can != 0;
  return status;
}

Status enable_peer(int device, int peer) {
  if (Status status = use_device(device); !status.ok()) return status;
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error != cudaErrorPeerAccessAlreadyEnabled) return check(error, "cudaDeviceEnablePeerAccess");
  cudaGetLastError();
  return Status::good();
}

Status stream_create(Stream *out) { return check(cudaStreamCreateWithFlags(out, cudaStreamNonBlocking), "cudaStreamCreate"); }
void stream_destroy(Stream stream) {
  if (stream != nullptr) cudaStreamDestroy(stream);
}
Status stream_sync(Stream stream) { return check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }

// Whoever waits sleeps: the waiting threads share their cores with the server.
Status event_create(Event *out) { return check(cudaEventCreateWithFlags(out, cudaEventDisableTiming | cudaEventBlockingSync), "cudaEventCreate"); }
void event_destroy(Event event) {
  if (event != nullptr) cudaEventDestroy(event);
}
Status event_record(Event event, Stream stream) { return check(cudaEventRecord(event, stream), "cudaEventRecord"); }
Status event_sync(Event event) { return check(cudaEventSynchronize(event), "cudaEventSynchronize"); }
Status stream_wait(Stream stream, Event event) { return check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent"); }

Status copy_async(void *to, const void *from, size_t bytes, Stream stream) { return check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync"); }
Status fill_async(void *to, int byte, size_t bytes, Stream stream) { return check(cudaMemsetAsync(to, byte, bytes, stream), "cudaMemsetAsync"); }
// cudaMemcpy from pageable memory returns when the bytes are staged; streams that do not wait for the legacy one could run before they arrive.
Status copy_now(void *to, const void *from, size_t bytes) {
  Status status = check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
  return status.ok() ? check(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize") : status;
}

Status capture_begin(Stream stream) { return check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture"); }

Status capture_end(Stream stream, GraphExec *out) {
  *out = nullptr;
  cudaGraph_t graph = nullptr;
  Status status = check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  if (status.ok()) status = check(cudaGraphInstantiate(out, graph, 0), "cudaGraphInstantiate");
  // Else its memory would be taken by the first launch, after the rest has become pages.
  if (status.ok()) status = check(cudaGraphUpload(*out, stream), "cudaGraphUpload");
  if (graph != nullptr) cudaGraphDestroy(graph);
  return status;
}
Status graph_launch(GraphExec graph, Stream stream) { return check(cudaGraphLaunch(graph, stream), "cudaGraphLaunch"); }
void graph_destroy(GraphExec graph) {
  if (graph != nullptr) cudaGraphExecDestroy(graph);
}

Status launch_status() { return check(cudaGetLastError(), "kernel launch"); }

}  // namespace ls::cuda
