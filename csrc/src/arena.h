// Host memory for images: much address space, and memory only where it was committed.
#pragma once

#include <map>
#include <memory>
#include <mutex>

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
  Range inside(uint64_t offset, uint64_t bytes) const;
  void decommit_locked(Range range);

  Device &device_;
  std::mutex mutex_;
  Range range_;
  Entry entry_;
};

}  // namespace torpor
