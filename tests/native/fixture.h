// A device with faults, and helpers that reach its memory only through tp_copy, so that every test runs on every driver.
#pragma once

#include <dirent.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "check.h"

namespace fixture {

inline int open_descriptors() {
  DIR *folder = opendir("/proc/self/fd");
  if (folder == nullptr) return -1;
  int count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

// How much of a range the kernel maps files in. Only the host driver's memory is files.
inline uint64_t file_bytes(uint64_t address, uint64_t bytes) {
  std::ifstream maps("/proc/self/maps");
  uint64_t total = 0;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long start = 0, end = 0, inode = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx %*s %*s %*s %llu", &start, &end, &inode) != 3 || inode == 0) continue;
    const uint64_t from = std::max<uint64_t>(start, address), to = std::min<uint64_t>(end, address + bytes);
    if (from < to) total += to - from;
  }
  return total;
}

using Bytes = std::vector<unsigned char>;

// More memory than a machine has, less than a process can address.
inline constexpr uint64_t kTooMuch = uint64_t{1} << 44;

inline Bytes pattern(uint64_t bytes, uint64_t seed) {
  Bytes out(bytes);
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (unsigned char &byte : out) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    byte = static_cast<unsigned char>(state);
  }
  return out;
}

class Device {
 public:
  Device() {
    tp_error err{};
    const tp_status got = tp_device_open(check::driver().c_str(), 0, TP_DEVICE_FAULTS, &handle, &err);
    if (got == TP_UNSUPPORTED) throw check::Skip(err.message);
    CHECK(got == TP_OK);
    granule = stats().granularity;
  }
  Device(const Device &) = delete;
  ~Device() {
    if (handle != nullptr) tp_device_close(handle, nullptr);
  }
  // A test ends here: nothing may be left.
  void close() {
    OK(tp_fault_clear(handle, &err));
    OK(tp_device_close(handle, &err));
    handle = nullptr;
  }

  tp_device_stats stats() const {
    tp_device_stats out{};
    OK(tp_device_get_stats(handle, &out, &err));
    return out;
  }
  void arm(tp_op op, uint64_t nth, uint64_t count = 1) const { OK(tp_fault_arm(handle, op, nth, count, &err)); }
  void clear() const { OK(tp_fault_clear(handle, &err)); }
  uint64_t calls(tp_op op) const {
    uint64_t out = 0;
    OK(tp_fault_calls(handle, op, &out, &err));
    return out;
  }

  tp_region *region(uint64_t extents, uint32_t flags = 0, const char *name = "r") const {
    tp_region *out = nullptr;
    OK(tp_region_create(handle, extents * granule, granule, flags, name, &out, &err));
    return out;
  }
  void write(uint64_t address, const Bytes &bytes) const {
    const tp_span span{address, reinterpret_cast<uint64_t>(bytes.data()), bytes.size()};
    OK(tp_copy(handle, TP_COPY_TO_DEVICE, &span, 1, 2, &err));
  }
  Bytes read(uint64_t address, uint64_t bytes) const {
    Bytes out(bytes);
    const tp_span span{reinterpret_cast<uint64_t>(out.data()), address, bytes};
    OK(tp_copy(handle, TP_COPY_TO_HOST, &span, 1, 2, &err));
    return out;
  }

  tp_device *handle = nullptr;
  uint64_t granule = 0;
};

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

struct Arena {
  Arena(const Device &device, uint64_t bytes) : device_(device) { OK(tp_arena_create(device.handle, bytes, &handle, &address, &err)); }
  unsigned char *at(uint64_t offset) const { return reinterpret_cast<unsigned char *>(address + offset); }
  uint64_t committed() const { return device_.stats().committed_bytes; }
  const Device &device_;
  tp_arena *handle = nullptr;
  uint64_t address = 0;
};

inline tp_region_stats stats(tp_region *region) {
  tp_region_stats out{};
  OK(tp_region_get_stats(region, &out, &err));
  return out;
}

inline void unmap(const std::vector<tp_region *> &regions) {
  uint64_t done = 0;
  OK(tp_regions_unmap(regions.data(), regions.size(), &done, &err));
  CHECK_EQ(done, regions.size());
}

inline void map(const std::vector<tp_region *> &regions) { OK(tp_regions_map(regions.data(), regions.size(), &err)); }

// All blocks of `blocks`, waited for.
inline tp_status copy_blocks(tp_device *device, const tp_blocks &blocks, tp_error *err = nullptr) {
  tp_block_copy *copy = nullptr;
  const tp_status begun = tp_block_copy_begin(device, &blocks, 2, &copy, err);
  return begun == TP_OK ? tp_block_copy_end(copy, err) : begun;
}
inline void destroy(tp_region *region) { OK(tp_region_destroy(region, &err)); }

}  // namespace fixture
