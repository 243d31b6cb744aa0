#include "handles.h"

namespace torpor {

void Graveyard::make_room(size_t extents) {
  mappings_.reserve(mappings_.size() + 1);
  extents_.reserve(extents_.size() + extents);
  addresses_.reserve(addresses_.size() + 1);
}

void Graveyard::bury_extent(const Physical &physical) noexcept {
  extents_.push_back(physical);
  bytes_ += physical.bytes;
  counters_.condemned_bytes += physical.bytes;
}

void Graveyard::adopt(Graveyard &other) {
  mappings_.insert(mappings_.end(), other.mappings_.begin(), other.mappings_.end());
  extents_.insert(extents_.end(), other.extents_.begin(), other.extents_.end());
  addresses_.insert(addresses_.end(), other.addresses_.begin(), other.addresses_.end());
  bytes_ += other.bytes_.exchange(0);
  other.mappings_.clear();
  other.extents_.clear();
  other.addresses_.clear();
}

namespace {

// Drops the items that `attempt` succeeds on; remembers the first failure.
template <typename Item, typename Attempt>
void retry_each(std::vector<Item> &items, std::exception_ptr &failure, const Attempt &attempt) {
  size_t kept = 0;
  for (const Item &item : items) {
    try {
      attempt(item);
    } catch (...) {
      if (!failure) failure = std::current_exception();
      items[kept++] = item;
    }
  }
  items.resize(kept);
}

}  // namespace

void Graveyard::retry(Driver &driver) {
  std::exception_ptr failure;
  retry_each(mappings_, failure, [&](const Stuck &stuck) { driver.unmap(stuck.range, stuck.vacancy); });
  if (!failure) {
    retry_each(extents_, failure, [&](const Physical &physical) {
      driver.release(physical);
      bytes_ -= physical.bytes;
      counters_.condemned_bytes -= physical.bytes;
    });
  }
  if (mappings_.empty()) retry_each(addresses_, failure, [&](const Range &range) {
    driver.free_address(range);
    counters_.reserved_bytes -= range.bytes;
  });
  if (failure) std::rethrow_exception(failure);
}

Reservation::Reservation(Driver &driver, Counters &counters, Graveyard &graveyard, uint64_t bytes)
    : driver_(driver), counters_(counters), graveyard_(graveyard) {
  graveyard.make_room(0);
  range_ = {driver.reserve(bytes), bytes};
  counters_.reserved_bytes += bytes;
}

void Reservation::free() {
  driver_.free_address(range_);
  counters_.reserved_bytes -= range_.bytes;
  freed_ = true;
}

Reservation::~Reservation() {
  if (freed_) return;
  try {
    // Addresses with something still mapped in them cannot be given back; they follow it.
    if (graveyard_.has_mappings()) {
      graveyard_.bury_addresses(range_);
    } else {
      free();
    }
  } catch (...) {
    graveyard_.bury_addresses(range_);
  }
}

void Residence::map(bool writable) {
  for (const Physical &physical : extents_) {
    driver_.map(range_.address + mapped_, physical, writable);
    mapped_ += physical.bytes;
  }
  driver_.set_access(range_, writable);
}

void Residence::unmap() {
  driver_.unmap({range_.address, mapped_}, vacancy_);
  mapped_ = 0;
}

std::exception_ptr Residence::release() noexcept {
  parallel_for(extents_.size(), driver_.concurrency(range_.bytes), [&](uint64_t i) noexcept {
    try {
      driver_.release(extents_[i]);
    } catch (...) {
      failures_[i] = std::current_exception();
    }
  });
  std::exception_ptr failure;
  for (size_t i = 0; i < extents_.size(); ++i) {
    if (!failures_[i]) continue;
    if (!failure) failure = failures_[i];
    graveyard_.bury_extent(extents_[i]);
  }
  extents_.clear();
  return failure;
}

Residence::~Residence() {
  try {
    if (mapped_ > 0) unmap();
    release();
  } catch (...) {
    graveyard_.bury_mapping({range_.address, mapped_}, vacancy_);
    for (const Physical &physical : extents_) graveyard_.bury_extent(physical);
  }
}

}  // namespace torpor
