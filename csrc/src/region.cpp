#include "region.h"

#include <unistd.h>

#include <algorithm>

namespace torpor {
namespace {

using Lock = std::lock_guard<std::mutex>;

uint64_t round_up(const char *what, uint64_t bytes, uint64_t granularity) {
  if (bytes == 0) throw Error::invalid(std::string(what) + " is 0");
  if (bytes > UINT64_MAX - granularity) throw Error::invalid(std::string(what) + " is too large: " + std::to_string(bytes));
  return (bytes + granularity - 1) / granularity * granularity;
}

std::vector<uint64_t> extent_sizes(const Region &region) {
  std::vector<uint64_t> sizes(region.extent_count(), region.extent_bytes);
  sizes.back() = region.space.range().bytes - (sizes.size() - 1) * region.extent_bytes;
  return sizes;
}

std::vector<std::unique_ptr<Residence>> create_all(Driver &driver, const std::vector<Region *> &regions) {
  std::vector<std::unique_ptr<Residence>> staged;
  staged.reserve(regions.size());
  for (Region *region : regions) {
    const std::vector<uint64_t> sizes = extent_sizes(*region);
    staged.push_back(region->space.stage());
    staged.back()->create(sizes, [&](uint64_t i) { return driver.create(sizes[i], region->exportable, region->space.vacancy()); });
  }
  return staged;
}

// Condemned memory is tried again first. What remains is harmless unless it is still mapped where we are about to map.
void prepare(Region &region) {
  try {
    region.space.retry_condemned();
  } catch (...) {
    if (region.space.blocked()) throw;
  }
}

// Those without memory, and how much they need; more than the device has is refused here, where the driver can tell.
std::vector<Region *> asleep_among(Device &device, const std::vector<Region *> &regions, uint64_t &bytes) {
  std::vector<Region *> asleep;
  for (Region *region : regions) {
    prepare(*region);
    if (region->space.mapped()) continue;
    asleep.push_back(region);
    bytes += region->space.range().bytes;
  }
  if (!asleep.empty()) device.driver().admit(bytes);
  return asleep;
}

uint64_t held_by(const std::vector<std::unique_ptr<Residence>> &staged) {
  uint64_t bytes = 0;
  for (const auto &residence : staged) {
    for (const Physical &physical : residence->extents()) bytes += physical.bytes;
  }
  return bytes;
}

// Says what the whole batch needs and what there is without it, not what the extent that failed did. held: what was created for it and
// is not back yet.
[[noreturn]] void rethrow_of_batch(const Error &error, Device &device, uint64_t bytes, uint64_t held) {
  if (error.status != TP_DEVICE_MEMORY) throw error;
  uint64_t free = 0;
  try {
    free = device.driver().free_bytes();
  } catch (const Error &) {
    throw error;
  }
  Error whole = Error::memory(TP_OP_CREATE, bytes, free + held);
  whole.code = error.code;
  whole.message += " (" + error.message + ")";
  throw whole;
}

void map_locked(Device &device, const std::vector<Region *> &regions) {
  uint64_t bytes = 0;
  const std::vector<Region *> asleep = asleep_among(device, regions, bytes);
  std::vector<std::unique_ptr<Residence>> staged;
  try {
    staged = create_all(device.driver(), asleep);
    for (auto &residence : staged) residence->map(true);  // which takes memory of the device's too
  } catch (const Error &error) {
    rethrow_of_batch(error, device, bytes, held_by(staged));
  }
  for (size_t i = 0; i < asleep.size(); ++i) asleep[i]->space.commit(std::move(staged[i]));
}

}  // namespace

Region::Region(Device &device, const RegionOptions &options)
    : extent_bytes(round_up("extent_bytes", options.extent_bytes, device.driver().granularity())),
      exportable(options.exportable),
      space(device, round_up("bytes", options.bytes, device.driver().granularity()),
            options.guarded ? Vacancy::guard : Vacancy::hole, options.name.empty() ? "region" : options.name,
            {device.counters.mapped_bytes, &device.counters.extents}) {
  ++device.counters.regions;
}

Region::~Region() { --device().counters.regions; }

std::vector<Physical> Region::extents() {
  Lock lock(device().structure);
  return space.extents();
}

std::vector<int> Region::export_fds() {
  Lock lock(device().structure);
  if (!exportable) throw Error::state("'" + space.name() + "' was created without TP_REGION_EXPORTABLE");
  if (!space.mapped()) throw Error::state("'" + space.name() + "' is asleep: there is nothing to export");
  std::vector<int> fds;
  fds.reserve(space.extents().size());
  try {
    for (const Physical &physical : space.extents()) fds.push_back(device().driver().export_fd(physical));
  } catch (...) {
    for (int fd : fds) close(fd);
    throw;
  }
  return fds;
}

std::unique_ptr<Region> create_region(Device &device, const RegionOptions &options) {
  Lock lock(device.structure);
  device.retry_orphans();
  auto region = std::make_unique<Region>(device, options);
  map_locked(device, {region.get()});
  return region;
}

void map_regions(const std::vector<Region *> &regions) {
  if (regions.empty()) return;
  Device &device = regions.front()->device();
  Lock lock(device.structure);
  device.retry_orphans();
  map_locked(device, regions);
}

Rising::~Rising() {
  if (staged_.empty()) return;
  Lock lock(regions_.front()->device().structure);
  staged_.clear();
}

void Rising::run(const std::function<void(Range)> &usable, const std::function<void()> &begun, const std::function<void()> &done) {
  if (regions_.empty()) return begun(), done();
  Device &device = regions_.front()->device();
  Lock lock(device.structure);
  device.retry_orphans();
  begun();
  uint64_t bytes = 0;
  const std::vector<Region *> asleep = asleep_among(device, regions_, bytes);
  staged_.reserve(asleep.size());
  try {
    for (Region *region : asleep) {
      const std::vector<uint64_t> sizes = extent_sizes(*region);
      const auto make = [&](uint64_t i) { return device.driver().create(sizes[i], region->exportable, region->space.vacancy()); };
      staged_.push_back(region->space.stage());
      staged_.back()->create_mapped(sizes, make, usable);
    }
  } catch (const Error &error) {
    rethrow_of_batch(error, device, bytes, held_by(staged_));
  }
  for (size_t i = 0; i < asleep.size(); ++i) asleep[i]->space.commit(std::move(staged_[i]));
  staged_.clear();
  done();
}

std::exception_ptr unmap_regions(const std::vector<Region *> &regions, uint64_t &done) {
  done = 0;
  if (regions.empty()) return nullptr;
  Lock lock(regions.front()->device().structure);
  std::exception_ptr failure;
  try {
    regions.front()->device().driver().quiesce();  // what still computes with the memory would fault
    for (Region *region : regions) {
      std::exception_ptr unreleased;
      try {
        region->space.retry_condemned();
      } catch (...) {
        unreleased = std::current_exception();
      }
      // A region that sleeps goes on sleeping whatever is condemned, so the others get their turn.
      if (std::exception_ptr now = region->space.unmap()) unreleased = now;
      if (!failure) failure = unreleased;
    }
  } catch (...) {
    if (!failure) failure = std::current_exception();
  }
  for (const Region *region : regions) done += region->space.mapped() ? 0 : 1;
  return failure;
}

void destroy_region(std::unique_ptr<Region> &region) {
  Lock lock(region->device().structure);
  region->space.clear();
  region.reset();
}

Import::Import(Device &device, uint64_t bytes)
    : space(device, bytes, Vacancy::hole, "import", {device.counters.imported_bytes, nullptr}) {
  ++device.counters.imports;
}

Import::~Import() { --space.device().counters.imports; }

std::unique_ptr<Import> open_import(Device &device, const std::vector<int> &fds, const std::vector<uint64_t> &sizes,
                                    bool writable) {
  Lock lock(device.structure);
  device.retry_orphans();
  if (fds.empty()) throw Error::invalid("an import needs at least one descriptor");
  const uint64_t granularity = device.driver().granularity();
  uint64_t bytes = 0;
  for (uint64_t size : sizes) {
    if (size == 0 || size % granularity != 0 || size > UINT64_MAX / 2 - bytes) {
      throw Error::invalid("an extent of " + std::to_string(size) + " bytes cannot be imported: granularity is " +
                           std::to_string(granularity));
    }
    bytes += size;
  }
  auto import = std::make_unique<Import>(device, bytes);
  auto residence = import->space.stage();
  residence->create(sizes, [&](uint64_t i) { return device.driver().import_fd(fds[i], sizes[i]); });
  residence->map(writable);
  import->space.commit(std::move(residence));
  return import;
}

void close_import(std::unique_ptr<Import> &import) {
  Lock lock(import->space.device().structure);
  import->space.clear();
  import.reset();
}

}  // namespace torpor
