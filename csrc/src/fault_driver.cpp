#include "fault_driver.h"

namespace torpor {

void FaultDriver::arm(tp_op op, uint64_t nth, uint64_t count) {
  if (op < 0 || op >= TP_OP_COUNT) throw Error::invalid("unknown operation " + std::to_string(op));
  if (nth == 0 || count == 0) throw Error::invalid("a fault's nth and count start at 1");
  std::lock_guard<std::mutex> lock(mutex_);
  Point &point = points_[op];
  point.first = point.calls + nth;
  point.last = count > UINT64_MAX - point.first ? UINT64_MAX : point.first + count - 1;
}

void FaultDriver::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Point &point : points_) point.first = point.last = 0;
}

uint64_t FaultDriver::calls(tp_op op) {
  if (op < 0 || op >= TP_OP_COUNT) throw Error::invalid("unknown operation " + std::to_string(op));
  std::lock_guard<std::mutex> lock(mutex_);
  return points_[op].calls;
}

bool FaultDriver::fires(tp_op op) {
  std::lock_guard<std::mutex> lock(mutex_);
  Point &point = points_[op];
  ++point.calls;
  return point.first != 0 && point.calls >= point.first && point.calls <= point.last;
}

void FaultDriver::check(tp_op op, uint64_t bytes) {
  if (!fires(op)) return;
  if (op == TP_OP_CREATE || op == TP_OP_COMMIT) {
    Error error = Error::memory(op, bytes, 0);
    error.message += " (injected fault)";
    throw error;
  }
  throw Error::driver(op, 0, std::string("injected fault in ") + op_name(op));
}

Address FaultDriver::reserve(uint64_t bytes) {
  check(TP_OP_RESERVE);
  return real_->reserve(bytes);
}

void FaultDriver::free_address(Range range) {
  check(TP_OP_FREE_ADDRESS);
  real_->free_address(range);
}

Physical FaultDriver::create(uint64_t bytes, bool exportable, Vacancy vacancy) {
  check(TP_OP_CREATE, bytes);
  return real_->create(bytes, exportable, vacancy);
}

void FaultDriver::release(const Physical &physical) {
  check(TP_OP_RELEASE);
  real_->release(physical);
}

void FaultDriver::map(Address address, const Physical &physical, bool writable) {
  check(TP_OP_MAP);
  real_->map(address, physical, writable);
}

void FaultDriver::set_access(Range range, bool writable) {
  check(TP_OP_SET_ACCESS);
  real_->set_access(range, writable);
}

void FaultDriver::unmap(Range range, Vacancy vacancy) {
  check(TP_OP_UNMAP);
  real_->unmap(range, vacancy);
}

int FaultDriver::export_fd(const Physical &physical) {
  check(TP_OP_EXPORT);
  return real_->export_fd(physical);
}

Physical FaultDriver::import_fd(int fd, uint64_t bytes) {
  check(TP_OP_IMPORT);
  return real_->import_fd(fd, bytes);
}

void FaultDriver::copy(tp_copy_kind kind, const std::vector<tp_span> &spans, uint32_t threads) {
  try {
    check(TP_OP_COPY);
  } catch (const Error &) {
    if (!spans.empty()) {
      std::vector<tp_span> half(spans.begin(), spans.begin() + static_cast<std::ptrdiff_t>((spans.size() + 1) / 2));
      half.back().bytes /= 2;
      real_->copy(kind, half, threads);
    }
    throw;
  }
  real_->copy(kind, spans, threads);
}

uint64_t FaultDriver::copy_hashed(tp_copy_kind kind, const tp_span &span) {
  try {
    check(TP_OP_COPY);
  } catch (const Error &) {
    real_->copy_hashed(kind, {span.dst, span.src, span.bytes / 2});
    throw;
  }
  return real_->copy_hashed(kind, span);
}

std::unique_ptr<Flight> FaultDriver::begin_blocks(const tp_blocks &blocks, uint32_t threads) {
  try {
    check(TP_OP_COPY);
  } catch (const Error &) {
    tp_blocks half = blocks;
    half.count /= 2;
    if (const auto begun = real_->begin_blocks(half, threads)) begun->wait();
    throw;
  }
  return real_->begin_blocks(blocks, threads);
}

// One hash, and where something is wanted one copy and one hash of it.
void FaultDriver::save(const std::vector<CheckedCopy> &chunks, uint32_t threads, const std::function<bool(uint64_t)> &wanted) {
  check(TP_OP_HASH);
  std::vector<uint64_t> copied;
  std::exception_ptr failure;
  real_->save(chunks, threads, [&](uint64_t i) {
    if (!wanted(i)) return false;
    try {
      if (copied.empty() && !failure) check(TP_OP_COPY);
    } catch (const Error &) {
      failure = std::current_exception();
    }
    if (failure && i % 2 == 0) return false;
    copied.push_back(i);
    return true;
  });
  if (failure) std::rethrow_exception(failure);
  if (!copied.empty()) check_arrivals([&] {
    for (const uint64_t i : copied) *chunks[i].hash = 0;
  });
}

// One copy, and one hash of it.
void FaultDriver::restore(const std::vector<CheckedCopy> &chunks, uint32_t threads, const Beside &beside) {
  try {
    check(TP_OP_COPY);
  } catch (const Error &) {
    real_->restore({chunks.begin(), chunks.begin() + static_cast<std::ptrdiff_t>(chunks.size() / 2)}, threads, beside);
    throw;
  }
  real_->restore(chunks, threads, beside);
  check_arrivals([&] {
    for (const CheckedCopy &chunk : chunks) *chunk.hash = 0;
  });
}

void FaultDriver::check_arrivals(const std::function<void()> &forget) {
  try {
    check(TP_OP_HASH);
  } catch (const Error &) {
    forget();
    throw;
  }
}

void FaultDriver::hash(const std::vector<HashItem> &chunks, uint32_t threads) {
  check(TP_OP_HASH);
  real_->hash(chunks, threads);
}

void FaultDriver::adopt(Range range, const FilePart &file, uint32_t threads) {
  check(TP_OP_COMMIT, range.bytes);
  real_->adopt(range, file, threads);
}

void FaultDriver::commit(Range range, uint32_t threads) {
  check(TP_OP_COMMIT, range.bytes);
  real_->commit(range, threads);
}

}  // namespace torpor
