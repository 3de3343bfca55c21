// The little of the CUDA runtime that the backend uses, with two implementations: runtime_cuda.cpp over cudart, and sim/runtime_sim.cpp, which
// runs everything in order on the host, so that the whole backend works on a machine without a GPU.
//
// Handles are the pointers of cudart (cudaStream_t is CUstream_st *), so kernel launchers take either. Every failure is a Status that names the
// call and what the driver said. Unless said otherwise calls concern the device that use_device() chose for this thread.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "backend.h"

struct CUstream_st;
struct CUevent_st;
struct CUgraphExec_st;

namespace ls::cuda {

using Stream = CUstream_st *;
using Event = CUevent_st *;
using GraphExec = CUgraphExec_st *;

struct DeviceProperties {
  std::string name;
  int major = 0, minor = 0;   // compute capability
  uint64_t total_bytes = 0;   // device memory
  uint64_t free_bytes = 0;    // of it, now
  int multiprocessors = 0;
  std::string uuid;           // GPU-…, to tell equal ones apart in logs
};

// What is installed; 0 = no driver. Versions as 1000 * major + 10 * minor.
struct DriverVersions {
  int driver = 0;   // CUDA version that the driver serves
  int runtime = 0;  // that this library is built with
};
DriverVersions driver_versions();
// Devices that this process may see. LS_UNSUPPORTED with the reason where the driver is missing, too old or refuses; count is 0 then.
Status device_count(int &count);
Status device_properties(int device, DeviceProperties &out);
// Whether the library has machine code (or portable code that the driver can compile) for a device.
Status device_has_code(int device);

Status use_device(int device);
Status memory_info(uint64_t &free_bytes, uint64_t &total_bytes);
Status device_alloc(size_t bytes, void **out);
void device_free(void *memory);
// Page-locked host memory, reachable by every device at the same address.
Status host_alloc(size_t bytes, void **out);
void host_free(void *memory);
// Whether kernels on `device` can be let reach memory of `peer`.
Status peer_possible(int device, int peer, bool &possible);
// Lets them. Fine when it is so already.
Status enable_peer(int device, int peer);

// Streams wait for no other stream, the legacy default one included.
Status stream_create(Stream *out);
void stream_destroy(Stream stream);
Status stream_sync(Stream stream);
Status event_create(Event *out);
void event_destroy(Event event);
Status event_record(Event event, Stream stream);
Status event_sync(Event event);
Status stream_wait(Stream stream, Event event);

// Copies within the device, to it, and from it; host memory is page-locked.
Status copy_async(void *to, const void *from, size_t bytes, Stream stream);
Status fill_async(void *to, int byte, size_t bytes, Stream stream);
// From any host memory, done on return.
Status copy_now(void *to, const void *from, size_t bytes);

// What runs on the stream between the two becomes a graph that can be launched again and again, with the same arguments. Its device memory is
// taken here, not at the first launch.
Status capture_begin(Stream stream);
Status capture_end(Stream stream, GraphExec *out);
Status graph_launch(GraphExec graph, Stream stream);
void graph_destroy(GraphExec graph);

// A launch that was refused since the last call on this thread.
Status launch_status();

// While one lives, launches of this thread run nothing: they only bring their kernels to the device in use. The driver does so at a kernel's first
// launch else, and may wait for the device then, which may be waiting for another rank.
class OnlyLoad {
 public:
  OnlyLoad() { active = true; }
  ~OnlyLoad() { active = false; }
  OnlyLoad(const OnlyLoad &) = delete;
  OnlyLoad &operator=(const OnlyLoad &) = delete;
  static inline thread_local bool active = false;
};

}  // namespace ls::cuda
