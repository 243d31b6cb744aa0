// What the cuda driver keeps on the host: its context, page-locked ranges, and the streams and buffers that copies borrow.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_table.h"
#include "driver.h"

namespace torpor::cuda {

// A device's primary context, the one that PyTorch uses, retained.
class Context {
 public:
  explicit Context(int32_t ordinal);
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;
  ~Context();
  CUdevice device() const { return device_; }
  int attribute(int which) const;

  // Makes the context current in this thread, and what was current before when it dies.
  class Scope {
   public:
    explicit Scope(const Context &context, int op = kNoOp);
    Scope(const Scope &) = delete;
    Scope &operator=(const Scope &) = delete;
    ~Scope();
  };

 private:
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

// Page-locks host memory. Pieces are bounded, so that giving a part back needs no new lock over all the rest. Different ranges may be
// locked at once, beside copies that ask for their borders: the driver takes milliseconds for a piece.
class HostLocks {
 public:
  void lock(Range range, unsigned flags = 0);  // all or nothing; flags beyond those of every lock
  void unlock(Range range);                    // what a piece has outside the range is locked again
  // One copy may not cross the border of two locks: where the lock that `at` lies in ends, or where the next one begins.
  Address border_after(Address at);
  bool locked(Range range);

 private:
  struct Piece {
    uint64_t bytes;
    unsigned flags;
  };
  void lock_again(Range range, unsigned flags);
  void drop(Address address);

  static constexpr uint64_t kPiece = uint64_t{256} << 20;
  std::mutex mutex_;
  std::map<Address, Piece> pieces_;
};

// A stream and a page-locked buffer that the device can use too, lent to one thread at a time.
struct Lane {
  CUstream stream = nullptr;
  void *buffer = nullptr;  // only where asked for
  uint64_t buffer_bytes = 0;
};

// Marks a point of a stream.
class Event {
 public:
  // Needs a current context. spin: waiting is exact to the microsecond and takes a processor; else it leaves that to others.
  explicit Event(bool spin);
  Event(const Event &) = delete;
  Event(Event &&other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event &operator=(const Event &) = delete;
  ~Event();
  void record(CUstream stream, int op);
  void wait(int op) const;
  void hold(CUstream stream, int op) const;  // the stream waits for it

 private:
  CUevent event_ = nullptr;
};

class Lanes {
 public:
  explicit Lanes(const Context &context) : context_(context) {}
  Lanes(const Lanes &) = delete;
  Lanes &operator=(const Lanes &) = delete;
  ~Lanes();

  // Gives its lane back, with nothing in flight on it, when it dies. Needs a current context.
  class Lease {
   public:
    Lease(Lanes &lanes, uint64_t buffer_bytes, int op);
    Lease(const Lease &) = delete;
    Lease &operator=(const Lease &) = delete;
    ~Lease();
    void wait(int op);
    Lane lane;

   private:
    void complete(uint64_t buffer_bytes, int op);
    Lanes &lanes_;
  };

 private:
  static constexpr uint64_t kLeastBuffer = uint64_t{4} << 20;
  Lane take(uint64_t buffer_bytes);

  const Context &context_;
  std::mutex mutex_;
  std::vector<Lane> idle_;
  size_t lent_ = 0;
};

}  // namespace torpor::cuda
