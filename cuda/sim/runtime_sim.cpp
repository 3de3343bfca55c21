// runtime.h without a GPU. A stream is a thread that runs its work in order, so what the backend forgets to wait for is really not done yet.
// "Device" memory is host memory that ends at a page nobody may touch, filled with NaNs.
//
// For tests, from the environment: LAYERSCALE_SIM_DEVICES (1), LAYERSCALE_SIM_CAPABILITY ("9.0"), LAYERSCALE_SIM_MEMORY (bytes of each device,
// 8 GiB), LAYERSCALE_SIM_DRIVER (CUDA version that the driver serves, 13000; 0 = no driver), LAYERSCALE_SIM_PEERS (1; 0 = no device reaches another's
// memory), LAYERSCALE_SIM_LAZY (0; 1 = kernels must be loaded before they are launched).
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "record.h"
#include "simulator.h"
#include "stream.h"

namespace ls::cuda {
namespace {

constexpr size_t kAlign = 256;                // of device memory, as cudaMalloc gives it
constexpr size_t kPoison = size_t{64} << 20;  // larger memory stays zero and untouched
constexpr int kMaxDevices = 16;

struct Mapping {
  void *base = nullptr;
  size_t mapped = 0, bytes = 0;
  int device = -1;  // -1: host
};
std::mutex g_mutex;
std::map<void *, Mapping> g_mappings;
std::array<uint64_t, kMaxDevices> g_used{};
thread_local int t_device = 0;

uint64_t setting(const char *name, uint64_t otherwise) {
  const char *text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::strtoull(text, nullptr, 10);
}
int devices() { return static_cast<int>(std::min<uint64_t>(setting("LAYERSCALE_SIM_DEVICES", 1), kMaxDevices)); }
uint64_t total_memory() { return setting("LAYERSCALE_SIM_MEMORY", uint64_t{8} << 30); }
size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// `bytes` that end, up to alignment, at a page that faults.
Status guarded_alloc(size_t bytes, int device, void **out) {
  *out = nullptr;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), used = round_up(std::max<size_t>(bytes, 1), kAlign), body = round_up(used, page);
  const std::lock_guard lock(g_mutex);
  if (device >= 0 && (used > total_memory() || g_used[static_cast<size_t>(device)] > total_memory() - used))
    return Status::fail(LS_NO_MEMORY, "cudaMalloc of " + std::to_string(bytes) + " bytes on simulated device " + std::to_string(device) + ": out of memory");
  void *base = mmap(nullptr, body + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return Status::fail(LS_NO_MEMORY, "cannot map " + std::to_string(bytes) + " bytes of simulated memory");
  uint8_t *first = static_cast<uint8_t *>(base) + page;
  mprotect(base, page, PROT_NONE);
  mprotect(first + body, page, PROT_NONE);
  *out = first + (body - used);
  if (used <= kPoison) std::memset(*out, 0xff, used);
  g_mappings[*out] = {base, body + 2 * page, used, device};
  if (device >= 0) g_used[static_cast<size_t>(device)] += used;
  return Status::good();
}

void guarded_free(void *memory) {
  if (memory == nullptr) return;
  const std::lock_guard lock(g_mutex);
  const auto at = g_mappings.find(memory);
  if (at == g_mappings.end()) return;
  if (at->second.device >= 0) g_used[static_cast<size_t>(at->second.device)] -= at->second.bytes;
  munmap(at->second.base, at->second.mapped);
  g_mappings.erase(at);
}

Status check_device(int device) {
  return device >= 0 && device < devices() ? Status::good() : Status::fail(LS_INVALID, "simulated device " + std::to_string(device) + " of " + std::to_string(devices()));
}

}  // namespace

bool sim_record(Stream stream, Work work) {
  if (stream == nullptr) return false;
  stream->push(std::move(work));
  return true;
}

bool sim_only_load(const void *kernel) {
  static std::set<const void *> loaded;
  const std::lock_guard lock(g_mutex);
  if (OnlyLoad::active) loaded.insert(kernel);
  else if (setting("LAYERSCALE_SIM_LAZY", 0) != 0 && !loaded.contains(kernel)) throw sim::Fault("a kernel is launched that was not loaded before");
  return OnlyLoad::active;
}

DriverVersions driver_versions() { return {static_cast<int>(setting("LAYERSCALE_SIM_DRIVER", 13000)), 13000}; }

Status device_count(int &count) {
  count = 0;
  const DriverVersions versions = driver_versions();
  if (versions.driver == 0) return Status::fail(LS_UNSUPPORTED, "no CUDA driver is installed");
  if (versions.driver / 1000 < versions.runtime / 1000) return Status::fail(LS_UNSUPPORTED, "the CUDA driver is too old");
  count = devices();
  return Status::good();
}

Status device_properties(int device, DeviceProperties &out) {
  if (Status status = check_device(device); !status.ok()) return status;
  const char *capability = std::getenv("LAYERSCALE_SIM_CAPABILITY");
  int major = 9, minor = 0;
  if (capability != nullptr) {
    char *end = nullptr;
    major = static_cast<int>(std::strtol(capability, &end, 10));
    minor = *end == '.' ? static_cast<int>(std::strtol(end + 1, nullptr, 10)) : 0;
  }
  const std::lock_guard lock(g_mutex);
  out = {"simulated device", major, minor, total_memory(), total_memory() - g_used[static_cast<size_t>(device)], 2, "GPU-simulated-" + std::to_string(device)};
  return Status::good();
}

// As the library that is built for GPUs: machine code from 8.0 on.
Status device_has_code(int device) {
  DeviceProperties properties;
  if (Status status = device_properties(device, properties); !status.ok()) return status;
  return properties.major >= 8 ? Status::good() : Status::fail(LS_UNSUPPORTED, "no kernel image is available for execution on the device");
}

Status use_device(int device) {
  if (Status status = check_device(device); !status.ok()) return status;
  t_device = device;
  return Status::good();
}

Status memory_info(uint64_t &free_bytes, uint64_t &total_bytes) {
  const std::lock_guard lock(g_mutex);
  total_bytes = total_memory();
  free_bytes = total_bytes - g_used[static_cast<size_t>(t_device)];
  return Status::good();
}

Status device_alloc(size_t bytes, void **out) { return guarded_alloc(bytes, t_device, out); }
void device_free(void *memory) { guarded_free(memory); }
Status host_alloc(size_t bytes, void **out) { return guarded_alloc(bytes, -1, out); }
void host_free(void *memory) { guarded_free(memory); }
Status peer_possible(int device, int peer, bool &possible) {
  possible = setting("LAYERSCALE_SIM_PEERS", 1) != 0;
  Status status = check_device(device);
  return status.ok() ? check_device(peer) : status;
}
Status enable_peer(int device, int peer) {
  if (Status status = check_device(device); !status.ok()) return status;
  return check_device(peer);
}

Status stream_create(Stream *out) {
  *out = new CUstream_st;
  (*out)->thread = std::thread([stream = *out] { stream->run(); });
  pthread_setname_np((*out)->thread.native_handle(), "sim-stream");
  return Status::good();
}

void stream_destroy(Stream stream) {
  if (stream == nullptr) return;
  {
    const std::lock_guard lock(stream->mutex);
    stream->stop = true;
  }
  stream->changed.notify_all();
  stream->thread.join();
  delete stream;
}

Status stream_sync(Stream stream) {
  if (stream == nullptr) return Status::good();
  uint64_t ticket;
  {
    const std::lock_guard lock(stream->mutex);
    ticket = stream->submitted;
  }
  return stream->wait(ticket);
}

Status event_create(Event *out) {
  *out = new CUevent_st;
  return Status::good();
}
void event_destroy(Event event) { delete event; }

Status event_record(Event event, Stream stream) {
  const std::scoped_lock lock(event->mutex, stream->mutex);
  event->stream = stream;
  event->ticket = stream->submitted;
  return Status::good();
}

Status event_sync(Event event) {
  CUstream_st *stream;
  uint64_t ticket;
  {
    const std::lock_guard lock(event->mutex);
    stream = event->stream;
    ticket = event->ticket;
  }
  return stream != nullptr ? stream->wait(ticket) : Status::good();
}

Status stream_wait(Stream stream, Event event) {
  const std::lock_guard lock(event->mutex);
  if (event->stream == nullptr) return Status::good();
  stream->push([from = event->stream, ticket = event->ticket] { from->wait(ticket); });
  return Status::good();
}

Status copy_async(void *to, const void *from, size_t bytes, Stream stream) {
  if (!sim_record(stream, [=] { std::memcpy(to, from, bytes); })) std::memcpy(to, from, bytes);
  return Status::good();
}

Status fill_async(void *to, int byte, size_t bytes, Stream stream) {
  if (!sim_record(stream, [=] { std::memset(to, byte, bytes); })) std::memset(to, byte, bytes);
  return Status::good();
}

Status copy_now(void *to, const void *from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return Status::good();
}

Status capture_begin(Stream stream) {
  const std::lock_guard lock(stream->mutex);
  stream->capturing = true;
  stream->recorded.clear();
  return Status::good();
}

Status capture_end(Stream stream, GraphExec *out) {
  const std::lock_guard lock(stream->mutex);
  stream->capturing = false;
  *out = new CUgraphExec_st{std::move(stream->recorded)};
  stream->recorded.clear();
  return Status::good();
}

Status graph_launch(GraphExec graph, Stream stream) {
  for (const Work &work : graph->work) stream->push(work);
  return Status::good();
}
void graph_destroy(GraphExec graph) { delete graph; }

Status launch_status() { return Status::good(); }

}  // namespace ls::cuda
