// What an arena takes on threads of its own, before anybody commits it.
#include <algorithm>

#include "arena.h"
#include "host_memory.h"
#include "host_pages.h"
#include "process_end.h"

namespace torpor {

bool Arena::Ahead::brings(Range range) const {
  return std::max(range.address, next) < std::min(range.end(), end) || !taking.present(range).empty();
}

void Arena::wait_for_lanes(std::unique_lock<std::mutex> &lock, Range range) {
  lanes_moved_.wait(lock, [&] { return !ahead_.brings(range); });
}

void Arena::commit_ahead(uint64_t offset, uint64_t bytes, uint64_t part_bytes, uint32_t threads) {
  const Range pages = pages_around(offset, bytes);
  if (part_bytes == 0 || part_bytes % host::page_size() != 0) throw Error::invalid("parts are whole pages");
  std::lock_guard<std::mutex> ours(lanes_mutex_);
  if (!lanes_.empty()) throw Error::state("this arena takes memory ahead already: end that first");
  require_host_memory(TP_OP_COMMIT, pages.bytes);  // for all of it: a machine that is filled up half way helps nobody
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ahead_.next = pages.address, ahead_.end = pages.end(), ahead_.part_bytes = std::min(part_bytes, range_.bytes);
    ahead_.progress = {pages.bytes, 0, 0, false, {}};
    ahead_.began = Clock::now();
  }
  say_goodbye_at_exit();
  try {
    for (int lane = 0; lane < kLanes; ++lane) lanes_.emplace_back([this, threads] { run_lane(std::max(threads, 1u)); });
  } catch (const std::exception &) {
    // No more threads to be had. One lane does it all; without any, whoever commits does.
    std::lock_guard<std::mutex> lock(mutex_);
    if (lanes_.empty()) ahead_.end = ahead_.next;
    lanes_moved_.notify_all();
  }
}

void Arena::run_lane(uint32_t threads) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  while (ahead_.next < ahead_.end) {
    const uint64_t begun = (ahead_.next - range_.address) / ahead_.part_bytes;
    const Range part{ahead_.next, std::min(ahead_.end, range_.address + (begun + 1) * ahead_.part_bytes) - ahead_.next};
    ahead_.next = part.end();
    std::optional<Error> failure;
    try {
      take_part(lock, part, threads);
    } catch (const Error &error) {
      failure = error;
    } catch (const std::exception &error) {
      failure = Error(TP_INTERNAL, error.what());
    }
    if (failure) {
      ahead_.end = ahead_.next;  // the other lane begins nothing new either
      ahead_.progress.failure = std::move(failure);
    }
    lanes_moved_.notify_all();
  }
}

// With mutex_ held, but while the driver is at work.
void Arena::take_part(std::unique_lock<std::mutex> &lock, Range part, uint32_t threads) {
  std::vector<Range> gaps;
  for (const Range &gap : entry_.committed.missing(part)) {
    for (const Range &fresh : ahead_.spare.missing(gap)) gaps.push_back(fresh);
  }
  ahead_.taking.add(part);
  for (const Range &gap : gaps) {
    lock.unlock();
    try {
      require_host_memory(TP_OP_COMMIT, gap.bytes);  // once more: others take memory too
      if (!work_before_goodbye(false, [&] { device_.driver().commit(gap, threads); })) throw Error::state("the process ends");
    } catch (...) {
      lock.lock();
      ahead_.taking.remove(part);
      throw;
    }
    lock.lock();
    ahead_.spare.add(gap);
    device_.counters.spare_bytes += gap.bytes;
    ahead_.progress.taken_bytes += gap.bytes;
    ahead_.progress.seconds = std::chrono::duration<double>(Clock::now() - ahead_.began).count();
  }
  ahead_.taking.remove(part);
}

void Arena::stop_lanes() noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ahead_.end = ahead_.next;
  }
  lanes_moved_.notify_all();
  for (std::thread &lane : lanes_) lane.join();
  lanes_.clear();
}

uint64_t Arena::end_ahead() {
  std::lock_guard<std::mutex> ours(lanes_mutex_);
  stop_lanes();
  std::lock_guard<std::mutex> lock(mutex_);
  return give_back_spare(range_);
}

uint64_t Arena::give_back_spare(Range range) {
  uint64_t bytes = 0;
  const std::vector<Range> parts = ahead_.spare.present(range);
  if (parts.empty()) return bytes;
  // A page-lock reaches over the border to what is committed: it is not taken away under a copy.
  const Closing closing(device_.access, entry_);
  for (const Range &part : parts) {
    device_.driver().decommit(part);
    ahead_.spare.remove(part);
    device_.counters.spare_bytes -= part.bytes;
    bytes += part.bytes;
  }
  return bytes;
}

AheadProgress Arena::ahead_progress() {
  std::lock_guard<std::mutex> lock(mutex_);
  AheadProgress progress = ahead_.progress;
  progress.active = ahead_.brings(range_);
  return progress;
}

}  // namespace torpor
