// Regions and imports, and the batches over regions.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "space.h"

namespace torpor {

// Every function here takes the device's structure lock.

struct RegionOptions {
  uint64_t bytes = 0;
  uint64_t extent_bytes = 0;
  bool exportable = false;
  bool guarded = false;
  std::string name;
};

class Region {
 public:
  // Reserves only; needs the lock.
  Region(Device &device, const RegionOptions &options);
  Region(const Region &) = delete;
  Region &operator=(const Region &) = delete;
  ~Region();

  Device &device() const { return space.device(); }
  uint64_t extent_count() const { return (space.range().bytes + extent_bytes - 1) / extent_bytes; }
  std::vector<Physical> extents();
  std::vector<int> export_fds();

  const uint64_t extent_bytes;
  const bool exportable;
  Space space;
};

std::unique_ptr<Region> create_region(Device &device, const RegionOptions &options);
void map_regions(const std::vector<Region *> &regions);
// Regions that are mapped extent by extent, so that what has memory can be filled while the rest gets it. Dies with what was not
// committed unmapped; nobody may use that any more then.
class Rising {
 public:
  explicit Rising(const std::vector<Region *> &regions) : regions_(regions) {}
  Rising(const Rising &) = delete;
  Rising &operator=(const Rising &) = delete;
  ~Rising();
  // Maps them all and commits, once; usable(range) is called for each extent that can be written. begun and done are called at both
  // ends of it, with the structure locked where there is anything to map.
  void run(const std::function<void(Range)> &usable, const std::function<void()> &begun, const std::function<void()> &done);

 private:
  std::vector<Region *> regions_;
  std::vector<std::unique_ptr<Residence>> staged_;
};
// Returns the failure, if any; `done` is set in every case.
std::exception_ptr unmap_regions(const std::vector<Region *> &regions, uint64_t &done);
void destroy_region(std::unique_ptr<Region> &region);  // empties the pointer on success

class Import {
 public:
  Import(Device &device, uint64_t bytes);
  Import(const Import &) = delete;
  Import &operator=(const Import &) = delete;
  ~Import();

  Space space;
};

std::unique_ptr<Import> open_import(Device &device, const std::vector<int> &fds, const std::vector<uint64_t> &sizes, bool writable);
void close_import(std::unique_ptr<Import> &import);

}  // namespace torpor
