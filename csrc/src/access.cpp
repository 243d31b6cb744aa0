#include "access.h"

#include <algorithm>
#include <chrono>

namespace torpor {

AccessTable::Pins::~Pins() {
  {
    std::lock_guard<std::mutex> lock(table_.mutex_);
    for (Entry *entry : pinned_) --entry->pins_;
  }
  table_.drained_.notify_all();
}

void AccessTable::Pins::add(Range range) {
  std::lock_guard<std::mutex> lock(table_.mutex_);
  auto next = table_.entries_.upper_bound(range.address);
  if (next != table_.entries_.begin()) --next;  // the last one that starts at or before the range
  for (; next != table_.entries_.end() && next->first < range.end(); ++next) {
    Entry &entry = *next->second;
    if (entry.range_.end() <= range.address) continue;
    const Address from = std::max(range.address, entry.range_.address);
    const Range shared{from, std::min(range.end(), entry.range_.end()) - from};
    if (!entry.open_ || !entry.usable(shared)) throw Error::state("'" + entry.name_ + "' has no memory there now");
    // A copy of many spans usually stays within one entry; counting it once is enough.
    if (!pinned_.empty() && pinned_.back() == &entry) continue;
    pinned_.push_back(&entry);
    ++entry.pins_;
  }
}

void AccessTable::add(Entry &entry, Range range) {
  std::lock_guard<std::mutex> lock(mutex_);
  entry.range_ = range;
  entries_.emplace(range.address, &entry);
}

void AccessTable::remove(Entry &entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(entry.range_.address);
  if (found != entries_.end() && found->second == &entry) entries_.erase(found);
}

void AccessTable::open(Entry &entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  entry.open_ = true;
}

void AccessTable::close(Entry &entry) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool was_open = entry.open_;
  entry.open_ = false;
  if (drained_.wait_for(lock, std::chrono::seconds(kDrainSeconds), [&] { return entry.pins_ == 0; })) return;
  entry.open_ = was_open;
  throw Error::state("a copy in '" + entry.name_ + "' has not ended within " + std::to_string(kDrainSeconds) + " s");
}

}  // namespace torpor
