#include "space.h"

#include <new>

namespace torpor {

Space::Space(Device &device, uint64_t bytes, Vacancy vacancy, std::string name, Tally tally)
    : device_(device), tally_(tally), vacancy_(vacancy), graveyard_(device.counters), entry_(std::move(name)) {
  reservation_.emplace(device.driver(), device.counters, graveyard_, bytes);
  device.access.add(entry_, range());
}

Space::~Space() {
  if (residence_) count(false);
  device_.access.remove(entry_);
  residence_.reset();
  reservation_.reset();
  try {
    // Only a construction that failed half way can leave something: the device goes on trying.
    device_.orphans.adopt(graveyard_);
  } catch (const std::bad_alloc &) {
    // No memory for a list entry: what the driver refused stays lost, and a destructor cannot say so.
  }
}

void Space::count(bool mapped) noexcept {
  const uint64_t bytes = range().bytes, extents = residence_->extents().size();
  if (mapped) {
    tally_.mapped_bytes += bytes;
    if (tally_.extents != nullptr) *tally_.extents += extents;
  } else {
    tally_.mapped_bytes -= bytes;
    if (tally_.extents != nullptr) *tally_.extents -= extents;
  }
}

const std::vector<Physical> &Space::extents() const {
  static const std::vector<Physical> none;
  return residence_ ? residence_->extents() : none;
}

std::unique_ptr<Residence> Space::stage() {
  return std::make_unique<Residence>(device_.driver(), graveyard_, range(), vacancy_);
}

void Space::commit(std::unique_ptr<Residence> residence) noexcept {
  residence_ = std::move(residence);
  mapped_ = true;
  count(true);
  device_.access.open(entry_);
}

std::exception_ptr Space::unmap() {
  if (!residence_) return nullptr;
  Closing closing(device_.access, entry_);
  residence_->unmap();
  closing.keep_closed();
  mapped_ = false;
  count(false);
  std::exception_ptr failure = residence_->release();
  residence_.reset();
  return failure;
}

void Space::clear() {
  if (std::exception_ptr failure = unmap()) std::rethrow_exception(failure);
  retry_condemned();
  // Out of the table first: once the addresses are free, another thread's memory may lie there.
  device_.access.remove(entry_);
  try {
    reservation_->free();
  } catch (...) {
    device_.access.add(entry_, range());
    throw;
  }
}

}  // namespace torpor
