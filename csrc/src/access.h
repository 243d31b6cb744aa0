// Which known memory may be read and written right now. A copy or hash pins what it touches; whoever is about to take memory
// away closes it first, which refuses new pins and waits for the old. A copy from memory that is gone is thereby an error, never
// a fault.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"

namespace torpor {

class AccessTable {
 public:
  class Entry {
   public:
    explicit Entry(std::string name) : name_(std::move(name)) {}
    Entry(const Entry &) = delete;
    Entry &operator=(const Entry &) = delete;
    virtual ~Entry() = default;
    const std::string &name() const { return name_; }

   protected:
    // May the range be used, given that the entry is open? Called under the table's lock.
    virtual bool usable(Range) const { return true; }

   private:
    friend class AccessTable;
    std::string name_;
    Range range_;
    bool open_ = false;
    uint64_t pins_ = 0;
  };

  // Pins until it dies.
  class Pins {
   public:
    explicit Pins(AccessTable &table) : table_(table) {}
    Pins(const Pins &) = delete;
    Pins &operator=(const Pins &) = delete;
    ~Pins();
    // TP_STATE when a part of the range belongs to a closed entry. Memory of no entry is somebody else's and passes.
    void add(Range range);

   private:
    AccessTable &table_;
    std::vector<Entry *> pinned_;
  };

  void add(Entry &entry, Range range);  // closed
  void remove(Entry &entry);            // nothing if it is not there
  void open(Entry &entry);
  // TP_STATE, and open as before, when a copy is still running after kDrainSeconds.
  void close(Entry &entry);
  // For entries that change what is usable in them.
  template <typename Change>
  void change(const Change &change) {
    std::lock_guard<std::mutex> lock(mutex_);
    change();
  }

  static constexpr int kDrainSeconds = 60;

 private:
  std::mutex mutex_;
  std::condition_variable drained_;
  std::map<Address, Entry *> entries_;  // by start; they never overlap
};

// Closes an entry, and opens it again unless told that the memory is gone.
class Closing {
 public:
  Closing(AccessTable &table, AccessTable::Entry &entry) : table_(table), entry_(&entry) { table.close(entry); }
  Closing(const Closing &) = delete;
  Closing &operator=(const Closing &) = delete;
  ~Closing() {
    if (entry_ != nullptr) table_.open(*entry_);
  }
  void keep_closed() { entry_ = nullptr; }

 private:
  AccessTable &table_;
  AccessTable::Entry *entry_;
};

}  // namespace torpor
