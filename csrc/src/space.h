// A reserved range and what is mapped in it: the one state machine of regions and imports.
//
//     asleep (no Residence)  --map-->  mapped (a Residence)  --unmap-->  asleep
//
// There is no flag: a space is asleep when its Residence is gone. What the driver would not take back waits in the graveyard.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "access.h"
#include "device.h"
#include "handles.h"

namespace torpor {

class Space {
 public:
  // What is mapped is counted in `mapped_bytes` and, where given, `extents`.
  struct Tally {
    std::atomic<uint64_t> &mapped_bytes;
    std::atomic<uint64_t> *extents;
  };

  Space(Device &device, uint64_t bytes, Vacancy vacancy, std::string name, Tally tally);
  Space(const Space &) = delete;
  Space &operator=(const Space &) = delete;
  ~Space();

  Device &device() const { return device_; }
  Range range() const { return reservation_->range(); }
  const std::string &name() const { return entry_.name(); }
  Vacancy vacancy() const { return vacancy_; }
  // Safe without the structure lock; everything below needs it.
  bool mapped() const { return mapped_.load(); }
  uint64_t condemned_bytes() const { return graveyard_.bytes(); }

  const std::vector<Physical> &extents() const;  // none while asleep

  // A Residence to fill and map; it changes nothing until it is committed.
  std::unique_ptr<Residence> stage();
  void commit(std::unique_ptr<Residence> residence) noexcept;
  // Throws, and is mapped as before, when the driver refuses to unmap. A release that fails is returned: the space sleeps,
  // and what was not released is condemned.
  std::exception_ptr unmap();
  // Tries condemned memory once more.
  void retry_condemned() { graveyard_.retry(device_.driver()); }
  bool blocked() const { return graveyard_.has_mappings(); }
  // Unmaps, releases, frees the addresses: afterwards only the destructor may follow. Throws, and can be called again.
  void clear();

 private:
  void count(bool mapped) noexcept;

  Device &device_;
  Tally tally_;
  Vacancy vacancy_;
  Graveyard graveyard_;
  std::optional<Reservation> reservation_;  // after the graveyard, which its destructor uses
  std::unique_ptr<Residence> residence_;
  std::atomic<bool> mapped_{false};
  AccessTable::Entry entry_;
};

}  // namespace torpor
