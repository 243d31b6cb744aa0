// Owned driver resources. A handle that exists is valid, its destructor undoes it, and a call of many steps unwinds because its
// locals die. Destructors cannot throw: what the driver then refuses to take back goes to a graveyard and is tried again.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <vector>

#include "driver.h"
#include "parallel.h"

namespace torpor {

// What a device counts; read without a lock.
struct Counters {
  std::atomic<uint64_t> regions{0}, extents{0}, imports{0}, arenas{0}, block_copies{0};
  std::atomic<uint64_t> reserved_bytes{0}, mapped_bytes{0}, condemned_bytes{0}, imported_bytes{0}, committed_bytes{0}, spare_bytes{0};
};

class Graveyard {
 public:
  explicit Graveyard(Counters &counters) : counters_(counters) {}
  Graveyard(const Graveyard &) = delete;
  Graveyard &operator=(const Graveyard &) = delete;
  ~Graveyard() { counters_.condemned_bytes -= bytes_; }

  // Burying must not allocate: room is made while a failure is still harmless.
  void make_room(size_t extents);
  void bury_mapping(Range range, Vacancy vacancy) noexcept { mappings_.push_back({range, vacancy}); }
  void bury_extent(const Physical &physical) noexcept;
  void bury_addresses(Range range) noexcept { addresses_.push_back(range); }
  // Takes over everything of `other`, whose owner goes away.
  void adopt(Graveyard &other);

  // Tries everything once more in the only order that works: unmap, release, free addresses. Throws the first failure.
  void retry(Driver &driver);
  // Maps that could not be undone: the range must not be mapped again before they are gone.
  bool has_mappings() const { return !mappings_.empty(); }
  uint64_t bytes() const { return bytes_; }

 private:
  struct Stuck {
    Range range;
    Vacancy vacancy;
  };
  Counters &counters_;
  std::vector<Stuck> mappings_;
  std::vector<Physical> extents_;
  std::vector<Range> addresses_;
  std::atomic<uint64_t> bytes_{0};
};

class Reservation {
 public:
  Reservation(Driver &driver, Counters &counters, Graveyard &graveyard, uint64_t bytes);
  Reservation(const Reservation &) = delete;
  Reservation &operator=(const Reservation &) = delete;
  ~Reservation();
  void free();  // throws, and is valid as before, when the driver refuses
  Range range() const { return range_; }

 private:
  Driver &driver_;
  Counters &counters_;
  Graveyard &graveyard_;
  Range range_;
  bool freed_ = false;
};

// The physical memory of one range, and its mapping there. Built in two steps, so that everything can be created before anything
// is mapped; dies unmapped and released.
class Residence {
 public:
  Residence(Driver &driver, Graveyard &graveyard, Range range, Vacancy vacancy)
      : driver_(driver), graveyard_(graveyard), range_(range), vacancy_(vacancy) {}
  Residence(const Residence &) = delete;
  Residence &operator=(const Residence &) = delete;
  ~Residence();

  // Extents of these sizes; make(i) gives the i-th, on as many threads as the driver likes.
  template <typename Make>
  void create(const std::vector<uint64_t> &sizes, const Make &make);
  void map(bool writable);
  // Instead of both: every extent is mapped before the next is created; usable(range) is called for each.
  template <typename Make, typename Usable>
  void create_mapped(const std::vector<uint64_t> &sizes, const Make &make, const Usable &usable);
  void unmap();  // throws, and is mapped as before, when the driver refuses
  // Releases what is unmapped; what fails is buried, and the first failure returned.
  std::exception_ptr release() noexcept;
  const std::vector<Physical> &extents() const { return extents_; }

 private:
  Driver &driver_;
  Graveyard &graveyard_;
  Range range_;
  Vacancy vacancy_;
  std::vector<Physical> extents_;
  std::vector<std::exception_ptr> failures_;  // one per extent, of its release; allocated before it is needed
  uint64_t mapped_ = 0;                       // bytes from the start of the range
};

template <typename Make>
void Residence::create(const std::vector<uint64_t> &sizes, const Make &make) {
  graveyard_.make_room(sizes.size());
  failures_.resize(sizes.size());
  extents_.resize(sizes.size());  // bytes == 0: not there
  const uint32_t threads = driver_.concurrency(range_.bytes);
  try {
    parallel_for(sizes.size(), threads, [&](uint64_t i) { extents_[i] = make(i); });
  } catch (...) {
    const auto absent = [](const Physical &physical) { return physical.bytes == 0; };
    extents_.erase(std::remove_if(extents_.begin(), extents_.end(), absent), extents_.end());
    throw;
  }
}

template <typename Make, typename Usable>
void Residence::create_mapped(const std::vector<uint64_t> &sizes, const Make &make, const Usable &usable) {
  graveyard_.make_room(sizes.size());
  failures_.resize(sizes.size());
  extents_.reserve(sizes.size());
  for (uint64_t i = 0; i < sizes.size(); ++i) {
    extents_.push_back(make(i));
    const Range range{range_.address + mapped_, sizes[i]};
    driver_.map(range.address, extents_.back(), true);
    mapped_ += sizes[i];
    driver_.set_access(range, true);
    usable(range);
  }
}

}  // namespace torpor
