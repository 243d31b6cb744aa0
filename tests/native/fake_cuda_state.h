// What the parts of the stand-in for the CUDA driver share: what exists, under one mutex, and how strict they are.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda_table.h"

namespace fake {

using namespace torpor::cuda;

constexpr CUresult kInvalid = 1, kNotMapped = 211, kNotFound = 500, kAlreadyMapped = 208, kInvalidContext = 201, kInvalidHandle = 400, kRefused = 719;
constexpr size_t kGranule = size_t{64} << 10;  // real ones have 2 MiB; small keeps the tests fast
constexpr size_t kTotal = size_t{8} << 30;

struct Allocation {
  int fd = -1;
  size_t bytes = 0;
  bool released = false;
  int maps = 0;
};
struct Map {
  size_t bytes = 0;
  CUmemGenericAllocationHandle handle = 0;
  int access = 0;
};

inline std::mutex mutex;
inline std::map<CUmemGenericAllocationHandle, Allocation> allocations;
inline std::map<CUdeviceptr, size_t> reservations;
inline std::map<CUdeviceptr, Map> maps;
inline std::map<CUdeviceptr, size_t> registered;
inline struct Refusal {
  std::string call;
  int64_t left = 0;  // calls until it is refused
  CUresult result = kRefused;
} refusal;
inline int64_t pulls = 0;
inline std::set<void *> host_buffers;
inline std::map<CUdeviceptr, size_t> device_buffers;
inline std::set<CUstream> streams;
inline std::set<CUevent> events;
inline std::set<CUmodule> modules;
inline CUmemGenericAllocationHandle next_handle = 1000;
inline int primary_retains = 0;
inline thread_local int pushed = 0;
inline int out_of_order = 0;
inline bool buffers_refused = false;

inline CUresult bad(CUresult result) {
  ++out_of_order;
  return result;
}

// How the test wants this call to fail; success where it does not.
inline CUresult refused(const char *call) {
  std::lock_guard<std::mutex> lock(mutex);
  return refusal.call == call && refusal.left > 0 && --refusal.left == 0 ? refusal.result : kSuccess;
}

inline size_t used() {
  size_t sum = 0;
  for (const auto &[handle, allocation] : allocations) sum += allocation.bytes;
  return sum;
}

inline void collect(CUmemGenericAllocationHandle handle) {
  Allocation &allocation = allocations.at(handle);
  if (!allocation.released || allocation.maps > 0) return;
  close(allocation.fd);
  allocations.erase(handle);
}

inline bool reserved(CUdeviceptr at, size_t bytes) {
  auto next = reservations.upper_bound(at);
  if (next == reservations.begin()) return false;
  --next;
  return at + bytes <= next->first + next->second;
}

// The maps that cover exactly [at, at + bytes); empty if there are none such.
inline std::vector<CUdeviceptr> exact(CUdeviceptr at, size_t bytes) {
  std::vector<CUdeviceptr> found;
  CUdeviceptr end = at;
  for (auto next = maps.find(at); next != maps.end() && next->first == end && end < at + bytes; ++next) {
    found.push_back(next->first);
    end += next->second.bytes;
  }
  if (end != at + bytes) found.clear();
  return found;
}

inline bool accessible(CUdeviceptr at, size_t bytes) {
  while (bytes > 0) {
    auto next = maps.upper_bound(at);
    if (next == maps.begin()) return false;
    --next;
    const CUdeviceptr end = next->first + next->second.bytes;
    if (at >= end || next->second.access == 0) return false;
    const size_t step = std::min<size_t>(bytes, end - at);
    at += step, bytes -= step;
  }
  return true;
}

// A copy may touch several maps of one reservation, not those of two, or one buffer.
inline bool in_one_range(CUdeviceptr at, size_t bytes) {
  for (const auto &[start, size] : device_buffers) {
    if (start <= at && at + bytes <= start + size) return true;
  }
  return reserved(at, bytes) && accessible(at, bytes);
}

inline CUresult check_context() { return pushed > 0 ? kSuccess : bad(kInvalidContext); }
inline void *pointer(CUdeviceptr at) { return reinterpret_cast<void *>(at); }
using Lock = std::lock_guard<std::mutex>;

}  // namespace fake

#define MAY_REFUSE \
  if (const CUresult result_ = refused(__func__)) return result_
#define FAKE extern "C" __attribute__((visibility("default")))
