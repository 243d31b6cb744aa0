// The driver functions of cuda_table.h over host memory, as strict as the real ones where torpor relies on it: exact ranges, no
// overlapping maps, nothing freed twice, copies only from memory that is mapped and accessible, and a context where one is needed.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "fake_cuda_state.h"

using namespace fake;

FAKE CUresult cuInit(unsigned) { return kSuccess; }
FAKE CUresult cuGetErrorName(CUresult, const char **name) {
  *name = "CUDA_ERROR_FAKE";
  return kSuccess;
}
FAKE CUresult cuDeviceGetCount(int *count) {
  *count = 1;
  return kSuccess;
}
FAKE CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}
FAKE CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice) {
  *value = attribute == kAttributeVmm || attribute == kAttributePosixFd || attribute == kAttributeRdmaVmm;
  if (attribute == kAttributeComputeMajor) *value = 9;  // one of those that clear released memory with their copy engines
  return kSuccess;
}
FAKE CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice) {
  Lock lock(mutex);
  ++primary_retains;
  *context = reinterpret_cast<CUcontext>(0x1234);
  return kSuccess;
}
FAKE CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  Lock lock(mutex);
  --primary_retains;
  return kSuccess;
}
FAKE CUresult cuCtxPushCurrent_v2(CUcontext) {
  MAY_REFUSE;
  ++pushed;
  return kSuccess;
}
FAKE CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  *context = reinterpret_cast<CUcontext>(0x1234);
  return --pushed < 0 ? bad(kInvalidContext) : kSuccess;
}
FAKE CUresult cuCtxSynchronize() {
  MAY_REFUSE;
  return check_context();
}
FAKE CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
  Lock lock(mutex);
  *free = kTotal - used();
  *total = kTotal;
  return check_context();
}
FAKE CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *, int) {
  *granularity = kGranule;
  return kSuccess;
}
namespace {

constexpr int kReserve = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// Addresses that are the fake's for good. As the driver does, it places one range next to the other: what copies in long stretches
// meets the borders.
struct Window {
  static constexpr size_t kBytes = size_t{64} << 30;
  CUdeviceptr start = 0, next = 0;

  bool holds(CUdeviceptr at) const { return start != 0 && at >= start && at < start + kBytes; }
  // 0: there is no room.
  CUdeviceptr place(size_t bytes, size_t align) {
    if (start == 0) {
      void *got = mmap(nullptr, kBytes, PROT_NONE, kReserve, -1, 0);
      if (got == MAP_FAILED) return 0;
      start = next = reinterpret_cast<CUdeviceptr>(got);
    }
    for (int round = 0; round < 2; ++round, next = start) {
      CUdeviceptr at = (next + align - 1) / align * align;
      for (auto other = reservations.upper_bound(at); at + bytes <= start + kBytes; other = reservations.upper_bound(at)) {
        const bool over_before = other != reservations.begin() && std::prev(other)->first + std::prev(other)->second > at;
        if (!over_before && (other == reservations.end() || other->first >= at + bytes)) return next = at + bytes, at;
        const auto &in_the_way = over_before ? *std::prev(other) : *other;
        at = (in_the_way.first + in_the_way.second + align - 1) / align * align;
      }
    }
    return 0;
  }
} window;

}  // namespace

FAKE CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t align, CUdeviceptr, unsigned long long) {
  if (bytes % kGranule != 0) return bad(kInvalid);
  Lock lock(mutex);
  *at = bytes < Window::kBytes ? window.place(bytes, align) : 0;
  if (*at == 0) {
    void *got = mmap(nullptr, bytes + align, PROT_NONE, kReserve, -1, 0);
    if (got == MAP_FAILED) return kOutOfMemory;
    const auto start = reinterpret_cast<CUdeviceptr>(got);
    *at = (start + align - 1) / align * align;
    if (*at > start) munmap(got, *at - start);
    if (start + align > *at) munmap(pointer(*at + bytes), start + align - *at);
  }
  reservations[*at] = bytes;
  return kSuccess;
}
FAKE CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
  Lock lock(mutex);
  const auto found = reservations.find(at);
  if (found == reservations.end() || found->second != bytes) return bad(kInvalid);
  const auto next = maps.lower_bound(at);
  if (next != maps.end() && next->first < at + bytes) return bad(kInvalid);
  reservations.erase(found);
  if (!window.holds(at)) munmap(pointer(at), bytes);  // nothing is mapped in it, so nothing has to be done to the window's
  return kSuccess;
}
FAKE CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long) {
  MAY_REFUSE;
  if (bytes == 0 || bytes % kGranule != 0) return bad(kInvalid);
  if (prop->type != kAllocationPinned || prop->location.type != kLocationDevice) return bad(kInvalid);
  Lock lock(mutex);
  if (bytes > kTotal - used()) return kOutOfMemory;
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  *handle = ++next_handle;
  allocations[*handle] = {fd, bytes, false, 0};
  return kSuccess;
}
FAKE CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  MAY_REFUSE;
  Lock lock(mutex);
  const auto found = allocations.find(handle);
  if (found == allocations.end() || found->second.released) return bad(kInvalidHandle);
  found->second.released = true;
  collect(handle);
  return kSuccess;
}
FAKE CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
  Lock lock(mutex);
  *prop = {};
  prop->allocFlags.gpuDirectRDMACapable = 1;
  return allocations.count(handle) ? kSuccess : bad(kInvalidHandle);
}
FAKE CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  MAY_REFUSE;
  Lock lock(mutex);
  const auto found = allocations.find(handle);
  if (found == allocations.end() || found->second.bytes != bytes || offset != 0 || !reserved(at, bytes)) return bad(kInvalid);
  auto next = maps.upper_bound(at);
  if (next != maps.end() && next->first < at + bytes) return bad(kAlreadyMapped);
  if (next != maps.begin() && std::prev(next)->first + std::prev(next)->second.bytes > at) return bad(kAlreadyMapped);
  if (mmap(pointer(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.fd, 0) == MAP_FAILED) return kOutOfMemory;
  ++found->second.maps;
  maps[at] = {bytes, handle, 0};
  return kSuccess;
}
FAKE CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  MAY_REFUSE;
  Lock lock(mutex);
  const auto found = exact(at, bytes);
  if (found.empty()) return bad(kNotMapped);
  mmap(pointer(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  for (CUdeviceptr each : found) {
    const CUmemGenericAllocationHandle handle = maps[each].handle;
    maps.erase(each);
    --allocations.at(handle).maps;
    collect(handle);
  }
  return kSuccess;
}
FAKE CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count) {
  MAY_REFUSE;
  Lock lock(mutex);
  const auto found = exact(at, bytes);
  if (found.empty() || count != 1) return bad(kNotMapped);
  for (CUdeviceptr each : found) maps[each].access = access->flags;
  const int protection = access->flags == kAccessReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  return mprotect(pointer(at), bytes, protection) == 0 ? kSuccess : kInvalid;
}
FAKE CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long) {
  Lock lock(mutex);
  const auto found = allocations.find(handle);
  if (found == allocations.end() || type != kHandlePosixFd) return bad(kInvalid);
  *static_cast<int *>(shareable) = dup(found->second.fd);
  return kSuccess;
}
FAKE CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int) {
  struct stat status {};
  const int fd = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
  if (fstat(fd, &status) != 0) return kInvalid;  // what a peer gives may be anything
  Lock lock(mutex);
  *handle = ++next_handle;
  allocations[*handle] = {dup(fd), static_cast<size_t>(status.st_size), false, 0};
  return kSuccess;
}
namespace {

// Is a page of it mapped for reading only?
bool read_only(CUdeviceptr start, size_t bytes) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long long from = 0, to = 0;
    char permissions[8] = {};
    if (std::sscanf(line.c_str(), "%llx-%llx %7s", &from, &to, permissions) != 3) continue;
    if (from < start + bytes && to > start && permissions[1] != 'w') return true;
  }
  return false;
}

}  // namespace

FAKE CUresult cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) {
  MAY_REFUSE;
  Lock lock(mutex);
  const auto start = reinterpret_cast<CUdeviceptr>(at);
  // As an H200 with driver 580 does.
  if ((flags & kHostReadOnly) == 0 && read_only(start, bytes)) return bad(kInvalid);
  const auto next = registered.upper_bound(start);
  if (next != registered.end() && next->first < start + bytes) return bad(kInvalid);
  if (next != registered.begin() && std::prev(next)->first + std::prev(next)->second > start) return bad(kInvalid);
  registered[start] = bytes;
  return check_context();
}
FAKE CUresult cuMemHostUnregister(void *at) {
  Lock lock(mutex);
  return registered.erase(reinterpret_cast<CUdeviceptr>(at)) == 1 ? check_context() : bad(kInvalid);
}
FAKE CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes) {
  Lock lock(mutex);
  if (buffers_refused) return kOutOfMemory;
  *at = reinterpret_cast<CUdeviceptr>(operator new(bytes));
  device_buffers[*at] = bytes;
  return check_context();
}
FAKE CUresult cuMemFree_v2(CUdeviceptr at) {
  Lock lock(mutex);
  if (device_buffers.erase(at) != 1) return bad(kInvalid);
  operator delete(pointer(at));
  return check_context();
}
FAKE CUresult cuMemHostAlloc(void **at, size_t bytes, unsigned) {
  MAY_REFUSE;
  *at = operator new(bytes);
  Lock lock(mutex);
  host_buffers.insert(*at);
  return check_context();
}
FAKE CUresult cuMemFreeHost(void *at) {
  Lock lock(mutex);
  if (host_buffers.erase(at) != 1) return bad(kInvalid);
  operator delete(at);
  return check_context();
}

// Empty, or what is wrong.
FAKE const char *fake_cuda_left() {
  static thread_local std::string text;
  std::ostringstream out;
  Lock lock(mutex);
  const size_t left = allocations.size() + reservations.size() + maps.size() + registered.size() + host_buffers.size() + device_buffers.size() +
                      streams.size() + events.size() + modules.size();
  if (left > 0 || primary_retains != 0 || pushed != 0 || out_of_order != 0) {
    out << allocations.size() << " allocations, " << reservations.size() << " reservations, " << maps.size() << " maps, "
        << registered.size() << " page-locked, " << host_buffers.size() << " buffers, " << device_buffers.size() << " of the device, " << streams.size() << " streams, "
        << events.size() << " events, " << modules.size() << " modules, "
        << primary_retains << " contexts, " << pushed << " pushed, " << out_of_order << " calls out of order";
  }
  text = out.str();
  return text.c_str();
}

FAKE void fake_cuda_refuse(const char *call, int64_t nth, CUresult result) {
  Lock lock(mutex);
  refusal.result = result;
  refusal.call = call;
  refusal.left = nth;
}

FAKE int64_t fake_cuda_calls_to_refusal() {
  Lock lock(mutex);
  return refusal.left;
}

FAKE int64_t fake_cuda_pulls() {
  Lock lock(mutex);
  return pulls;
}

FAKE int64_t fake_cuda_created() {
  Lock lock(mutex);
  return static_cast<int64_t>(next_handle);
}

FAKE int64_t fake_cuda_page_locked() {
  Lock lock(mutex);
  int64_t sum = 0;
  for (const auto &[at, bytes] : registered) sum += static_cast<int64_t>(bytes);
  return sum;
}

FAKE void fake_cuda_refuse_buffers(bool refuse) {
  Lock lock(mutex);
  buffers_refused = refuse;
}
