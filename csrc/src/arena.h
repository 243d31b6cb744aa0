// Host memory for images: much address space, and memory only where it was committed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "device.h"

namespace torpor {

// Disjoint ranges, neighbours merged.
class RangeSet {
 public:
  void add(Range range);
  void remove(Range range);
  std::vector<Range> missing(Range range) const;  // the parts of it that are not in the set
  std::vector<Range> present(Range range) const;  // the parts that are
  bool contains(Range range) const { return missing(range).empty(); }

 private:
  std::map<Address, uint64_t> ranges_;  // start to end
};

// How far an arena has got with what it takes ahead.
struct AheadProgress {
  uint64_t asked_bytes = 0, taken_bytes = 0;  // of the last commit_ahead
  double seconds = 0;                         // from its begin to the last part it took
  bool active = false;
  std::optional<Error> failure;
};

class Arena {
 public:
  Arena(Device &device, uint64_t bytes);
  Arena(const Arena &) = delete;
  Arena &operator=(const Arena &) = delete;
  ~Arena();

  Device &device() const { return device_; }
  Range range() const { return range_; }
  void commit(uint64_t offset, uint64_t bytes, uint32_t threads);
  void decommit(uint64_t offset, uint64_t bytes);
  // Takes the memory of a range, part by part in the order of addresses, on threads of its own, and returns at once. It is spare, no
  // copy may use it, until somebody commits it; who does waits for what is still to come, and takes himself what this could not.
  void commit_ahead(uint64_t offset, uint64_t bytes, uint64_t part_bytes, uint32_t threads);
  // Ends that, and gives back what is spare; the bytes. After a failure the call can be repeated.
  uint64_t end_ahead();
  AheadProgress ahead_progress();
  // Whole pages; what was committed there is given back first.
  void adopt(uint64_t offset, uint64_t bytes, const FilePart &file, uint32_t threads);
  // Decommits everything and frees the addresses; afterwards only the destructor may follow.
  void clear();

 private:
  class Entry final : public AccessTable::Entry {
   public:
    Entry() : AccessTable::Entry("host arena") {}
    RangeSet committed;  // changed under the table's lock

   protected:
    bool usable(Range range) const override { return committed.contains(range); }
  };
  // Two: while one page-locks its part, the other fills the next.
  static constexpr int kLanes = 2;
  using Clock = std::chrono::steady_clock;
  struct Ahead {
    Address next = 0, end = 0;  // what no lane has begun
    uint64_t part_bytes = 0;
    RangeSet taking;            // what one has
    RangeSet spare;             // what is there, and committed by nobody
    AheadProgress progress;
    Clock::time_point began;
    bool brings(Range range) const;
  };

  Range inside(uint64_t offset, uint64_t bytes) const;
  Range pages_around(uint64_t offset, uint64_t bytes) const;
  void decommit_locked(Range range);
  void wait_for_lanes(std::unique_lock<std::mutex> &lock, Range range);
  void take(Range gap, uint32_t threads, uint64_t all);
  void take_all(const std::vector<Range> &gaps, uint32_t threads);
  void run_lane(uint32_t threads) noexcept;
  void take_part(std::unique_lock<std::mutex> &lock, Range part, uint32_t threads);
  void stop_lanes() noexcept;
  uint64_t give_back_spare(Range range);

  Device &device_;
  std::mutex mutex_;
  Range range_;
  Entry entry_;
  std::mutex lanes_mutex_;  // whoever starts and ends lanes; taken before mutex_
  std::vector<std::thread> lanes_;
  Ahead ahead_;
  std::condition_variable lanes_moved_;
};

}  // namespace torpor
