// One device: its driver and everything that is shared by what lives on it.
//
// Locks, in the order in which they may be taken; nothing else in the core locks while it holds one of them:
//   1. Device::structure  held through every structural call: regions and imports are made, mapped, unmapped and destroyed under it
//   2. Arena::mutex       held through commit and decommit of one arena; never together with structure
//   3. AccessTable        short; copies and hashes take only this, and hold pins, not the lock, while they run. A structural
//                         call that takes memory away waits for the pins with structure held, which no copy needs to end.
//   4. FaultDriver        short, innermost
// Counters are atomic and read without a lock, so that stats answer while a large map runs.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "access.h"
#include "chunks.h"
#include "driver.h"
#include "fault_driver.h"
#include "handles.h"

namespace torpor {

class Region;

// Blocks that are being copied. What they lie in stays as it is until this dies, and so does the device.
class BlockCopy {
 public:
  BlockCopy(AccessTable &access, std::atomic<uint64_t> &counter) : counted_{counter}, pins(access) { ++counter; }
  BlockCopy(const BlockCopy &) = delete;
  BlockCopy &operator=(const BlockCopy &) = delete;
  void wait() {
    if (flight) flight->wait();
  }

 private:
  struct Counted {
    std::atomic<uint64_t> &counter;
    ~Counted() { --counter; }
  };
  Counted counted_;  // the last to go: a device that counts no copies may be closed

 public:
  AccessTable::Pins pins;
  std::unique_ptr<Flight> flight;  // null: all is copied
};

class Device {
 public:
  Device(std::unique_ptr<Driver> driver, FaultDriver *faults)
      : orphans(counters), driver_(std::move(driver)), faults_(faults) {}
  // driver: "host" or "cuda".
  static std::unique_ptr<Device> open(const std::string &driver, int32_t ordinal, bool faults);

  Driver &driver() { return *driver_; }
  FaultDriver &faults();  // TP_UNSUPPORTED without
  tp_device_stats stats() const;
  // TP_STATE while something lives on it; otherwise only the destructor may follow.
  void close();
  // Tries once more what no owner is left for. Failures stay, and are seen in condemned_bytes. Needs the structure lock.
  void retry_orphans() noexcept;

  void copy(tp_copy_kind kind, const std::vector<tp_span> &spans, uint32_t threads);
  std::unique_ptr<BlockCopy> begin_blocks(const tp_blocks &blocks, uint32_t threads);
  void hash(Range range, uint64_t chunk_bytes, bool on_host, uint64_t *out, uint32_t threads);
  void save(const Images &images, uint32_t threads);
  void restore(const Images &images, uint32_t threads);
  // Maps the regions and restores the images, most of which lie in them.
  // mapped: may be empty; called when all regions are, before the copies have ended.
  void wake(const std::vector<Region *> &regions, const Images &images, uint32_t threads, const std::function<void()> &mapped);

  std::mutex structure;
  AccessTable access;
  Counters counters;
  Graveyard orphans;

 private:

  std::unique_ptr<Driver> driver_;
  FaultDriver *faults_;
};

}  // namespace torpor
