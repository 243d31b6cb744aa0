#include "arena.h"

#include <algorithm>

#include "host_memory.h"
#include "host_pages.h"

namespace torpor {
namespace {

// Where the cuda driver has the borders of its page-locks (HostLocks): parts of images then have one each.
constexpr uint64_t kAlignment = uint64_t{256} << 20;

}  // namespace

void RangeSet::add(Range range) {
  Address start = range.address, end = range.end();
  auto next = ranges_.upper_bound(start);
  if (next != ranges_.begin() && std::prev(next)->second >= start) --next;
  while (next != ranges_.end() && next->first <= end) {
    start = std::min(start, next->first);
    end = std::max(end, next->second);
    next = ranges_.erase(next);
  }
  ranges_[start] = end;
}

void RangeSet::remove(Range range) {
  for (const Range &part : present(range)) {
    const auto found = std::prev(ranges_.upper_bound(part.address));
    const Address start = found->first, end = found->second;
    ranges_.erase(found);
    if (start < part.address) ranges_[start] = part.address;
    if (part.end() < end) ranges_[part.end()] = end;
  }
}

std::vector<Range> RangeSet::present(Range range) const {
  std::vector<Range> parts;
  auto next = ranges_.upper_bound(range.address);
  if (next != ranges_.begin()) --next;
  for (; next != ranges_.end() && next->first < range.end(); ++next) {
    const Address from = std::max(next->first, range.address), to = std::min(next->second, range.end());
    if (from < to) parts.push_back({from, to - from});
  }
  return parts;
}

std::vector<Range> RangeSet::missing(Range range) const {
  std::vector<Range> gaps;
  Address from = range.address;
  for (const Range &part : present(range)) {
    if (part.address > from) gaps.push_back({from, part.address - from});
    from = part.end();
  }
  if (from < range.end()) gaps.push_back({from, range.end() - from});
  return gaps;
}

Arena::Arena(Device &device, uint64_t bytes) : device_(device) {
  const uint64_t page = host::page_size();
  if (bytes == 0 || bytes > UINT64_MAX / 2) throw Error::invalid("an arena of " + std::to_string(bytes) + " bytes");
  range_ = host::reserve((bytes + page - 1) / page * page, bytes < kAlignment ? page : kAlignment, TP_OP_COMMIT);
  device.access.add(entry_, range_);
  device.access.open(entry_);
  ++device.counters.arenas;
}

Arena::~Arena() {
  stop_lanes();
  device_.access.remove(entry_);
  --device_.counters.arenas;
}

Range Arena::inside(uint64_t offset, uint64_t bytes) const {
  if (offset > range_.bytes || bytes > range_.bytes - offset) {
    throw Error::invalid("[" + std::to_string(offset) + ", +" + std::to_string(bytes) + ") is not inside an arena of " +
                         std::to_string(range_.bytes) + " bytes");
  }
  return {range_.address + offset, bytes};
}

Range Arena::pages_around(uint64_t offset, uint64_t bytes) const {
  const Range asked = inside(offset, bytes);
  const uint64_t page = host::page_size();
  const Address start = asked.address / page * page, end = (asked.end() + page - 1) / page * page;
  return {start, end - start};
}

void Arena::commit(uint64_t offset, uint64_t bytes, uint32_t threads) {
  const Range pages = pages_around(offset, bytes);
  std::unique_lock<std::mutex> lock(mutex_);
  wait_for_lanes(lock, pages);
  std::vector<Range> spare, fresh;
  for (const Range &gap : entry_.committed.missing(pages)) {
    for (const Range &part : ahead_.spare.present(gap)) spare.push_back(part);
    for (const Range &part : ahead_.spare.missing(gap)) fresh.push_back(part);
  }
  take_all(fresh, std::max(threads, 1u));
  for (const Range &part : fresh) {
    device_.access.change([&] { entry_.committed.add(part); });
    device_.counters.committed_bytes += part.bytes;
  }
  for (const Range &part : spare) {
    device_.access.change([&] { entry_.committed.add(part); });
    ahead_.spare.remove(part);
    device_.counters.committed_bytes += part.bytes;
    device_.counters.spare_bytes -= part.bytes;
  }
}

// A part of `all` bytes, which the driver may only say that there is no memory for.
void Arena::take(Range gap, uint32_t threads, uint64_t all) {
  try {
    device_.driver().commit(gap, threads);
  } catch (Error &error) {
    if (error.status == TP_HOST_MEMORY && error.bytes_needed == 0) error.bytes_needed = all, error.bytes_free = free_host_memory();
    throw;
  }
}

// All of it or nothing.
void Arena::take_all(const std::vector<Range> &gaps, uint32_t threads) {
  uint64_t bytes = 0;
  for (const Range &gap : gaps) bytes += gap.bytes;
  if (bytes > 0) require_host_memory(TP_OP_COMMIT, bytes);
  size_t done = 0;
  try {
    for (; done < gaps.size(); ++done) take(gaps[done], threads, bytes);
  } catch (...) {
    // Nobody has seen these pages yet. What cannot be given back is kept as committed, so that it is counted and tried again.
    for (size_t i = 0; i < done; ++i) {
      try {
        device_.driver().decommit(gaps[i]);
      } catch (const Error &) {
        device_.access.change([&] { entry_.committed.add(gaps[i]); });
        device_.counters.committed_bytes += gaps[i].bytes;
      }
    }
    throw;
  }
}

void Arena::decommit_locked(Range range) {
  if (range.bytes == 0) return;
  // Copies may use other parts meanwhile, but telling them apart is not worth its price: wait for all.
  const Closing closing(device_.access, entry_);
  for (const Range &part : entry_.committed.present(range)) {
    device_.driver().decommit(part);
    device_.access.change([&] { entry_.committed.remove(part); });
    device_.counters.committed_bytes -= part.bytes;
  }
}

void Arena::decommit(uint64_t offset, uint64_t bytes) {
  const Range asked = inside(offset, bytes);
  const uint64_t page = host::page_size();
  // Only whole pages: a page at the edge may hold a neighbour's bytes.
  const Address start = (asked.address + page - 1) / page * page, end = asked.end() / page * page;
  std::lock_guard<std::mutex> lock(mutex_);
  if (start < end) decommit_locked({start, end - start});
}

void Arena::adopt(uint64_t offset, uint64_t bytes, const FilePart &file, uint32_t threads) {
  const Range asked = inside(offset, bytes);
  const uint64_t page = host::page_size();
  if (bytes == 0 || asked.address % page != 0 || bytes % page != 0 || file.offset % page != 0) {
    throw Error::invalid("only whole pages of a memory file can be adopted");
  }
  host::require_sealed(file, bytes);
  std::unique_lock<std::mutex> lock(mutex_);
  wait_for_lanes(lock, asked);
  give_back_spare(asked);
  decommit_locked(asked);
  device_.driver().adopt(asked, file, std::max(threads, 1u));
  device_.access.change([&] { entry_.committed.add(asked); });
  device_.counters.committed_bytes += asked.bytes;
}

void Arena::clear() {
  end_ahead();
  std::lock_guard<std::mutex> lock(mutex_);
  decommit_locked(range_);
  device_.access.remove(entry_);
  try {
    host::free_address(range_);
  } catch (...) {
    device_.access.add(entry_, range_);
    device_.access.open(entry_);
    throw;
  }
}

}  // namespace torpor
