// Any driver, with calls that fail on request. A call that is made to fail does not reach the driver, apart from a copy, which then
// stops half way: the worst that a real one can do.
#pragma once

#include <memory>
#include <mutex>

#include "driver.h"

namespace torpor {

class FaultDriver final : public Driver {
 public:
  explicit FaultDriver(std::unique_ptr<Driver> real) : real_(std::move(real)) {}

  void arm(tp_op op, uint64_t nth, uint64_t count);
  void clear();
  uint64_t calls(tp_op op);

  uint64_t granularity() const override { return real_->granularity(); }
  Address reserve(uint64_t bytes) override;
  void free_address(Range range) override;
  void admit(uint64_t bytes) override { real_->admit(bytes); }
  uint64_t free_bytes() override { return real_->free_bytes(); }
  uint32_t concurrency(uint64_t bytes) const override { return real_->concurrency(bytes); }
  Physical create(uint64_t bytes, bool exportable, Vacancy vacancy) override;
  void release(const Physical &physical) override;
  void map(Address address, const Physical &physical, bool writable) override;
  void set_access(Range range, bool writable) override;
  void unmap(Range range, Vacancy vacancy) override;
  int export_fd(const Physical &physical) override;
  Physical import_fd(int fd, uint64_t bytes) override;
  void quiesce() override { real_->quiesce(); }
  bool chunk_by_chunk() const override { return real_->chunk_by_chunk(); }
  uint64_t copy_hashed(tp_copy_kind kind, const tp_span &span) override;
  void copy(tp_copy_kind kind, const std::vector<tp_span> &spans, uint32_t threads) override;
  std::unique_ptr<Flight> begin_blocks(const tp_blocks &blocks, uint32_t threads) override;
  void save(const std::vector<CheckedCopy> &chunks, uint32_t threads, const std::function<bool(uint64_t)> &wanted) override;
  void restore(const std::vector<CheckedCopy> &chunks, uint32_t threads, const Beside &beside) override;
  void hash(const std::vector<HashItem> &chunks, uint32_t threads) override;
  std::string hash_path() override { return real_->hash_path(); }
  void commit(Range range, uint32_t threads) override;
  void adopt(Range range, const FilePart &file, uint32_t threads) override;
  void decommit(Range range) override { real_->decommit(range); }

 private:
  struct Point {
    uint64_t calls = 0;
    uint64_t first = 0, last = 0;  // the calls that fail, counted from 1; 0: none
  };
  bool fires(tp_op op);
  void check(tp_op op, uint64_t bytes = 0);
  void check_arrivals(const std::function<void()> &forget);  // of what was copied: its hashes

  std::unique_ptr<Driver> real_;
  std::mutex mutex_;
  Point points_[TP_OP_COUNT];
};

}  // namespace torpor
