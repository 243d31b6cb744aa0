// What the core asks of a place where memory lives. One implementation per kind of device, and one wrapper that injects faults.
//
// Every function either does its whole work or throws Error and has changed nothing: the state machine above relies on it.
// Every function may be called from any thread; structural calls (all but copy and hash) of one device come one at a time,
// apart from commit and decommit, which come one at a time per arena, and from what `concurrency` allows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "error.h"
#include "torpor/torpor.h"

namespace torpor {

using Address = uint64_t;

struct Range {
  Address address = 0;
  uint64_t bytes = 0;
  Address end() const { return address + bytes; }
};

// One piece of physical memory, as the driver knows it.
struct Physical {
  uint64_t handle = 0;  // on `host` a file descriptor or, without an inode, an address; on `cuda` a CUmemGenericAllocationHandle
  uint64_t bytes = 0;
  uint64_t device_id = 0;
  uint64_t inode = 0;
  bool rdma = false;  // a network card can be given access
};

// A part of a memory file, from an offset on.
struct FilePart {
  int fd = -1;
  uint64_t offset = 0;
};

// What a range is while nothing is mapped in it.
enum class Vacancy {
  hole,   // reserved, any access faults
  guard,  // zero pages where the driver can give them (P4)
};

// One chunk, and where its hash goes.
struct HashItem {
  Address address = 0;
  uint64_t bytes = 0;
  uint64_t *out = nullptr;
};

// A chunk to copy, and where the hash of what then lies at its destination goes.
struct CheckedCopy {
  tp_span span;
  uint64_t *hash = nullptr;
  bool follows = false;    // the one before it, in the same image: the two may be one copy. Neighbouring addresses alone do not say so
  uint64_t *was = nullptr;  // of a save: where the hash of what it is copied from goes
};

// Runs of neighbours on both sides become one span.
std::vector<tp_span> spans_of(const tp_blocks &blocks);

// Copies that a driver has begun. It waits for them when it dies, whatever came of them.
class Flight {
 public:
  Flight() = default;
  Flight(const Flight &) = delete;
  Flight &operator=(const Flight &) = delete;
  virtual ~Flight() = default;
  // Returns when everything is copied. From any thread.
  virtual void wait() = 0;
};

// What goes on beside copies to the device. Each may be empty.
struct Beside {
  // Called once, on the caller's thread; it may make the memory that is copied to, and calls `more` when there is more of it.
  std::function<void(const std::function<void()> &more)> work;
  // Can the range be written now? Asked inside `more` only; once the work has ended all can.
  std::function<bool(Range)> ready;
  // Called once, on the caller's thread, when the work has ended and every copy has been started.
  std::function<void()> meanwhile;
};

class Driver {
 public:
  Driver() = default;
  Driver(const Driver &) = delete;
  Driver &operator=(const Driver &) = delete;
  virtual ~Driver() = default;

  virtual uint64_t granularity() const = 0;

  virtual Address reserve(uint64_t bytes) = 0;
  virtual void free_address(Range range) = 0;

  // Throws a memory error when `bytes` more physical memory cannot be had; asked once for a whole batch, before any create.
  virtual void admit(uint64_t bytes) = 0;
  virtual uint64_t free_bytes() = 0;
  // How many creates and releases of extents, `bytes` in all, are worth doing at once; those two may run beside each other.
  virtual uint32_t concurrency(uint64_t bytes) const = 0;
  // exportable: descriptors of it can be given away. vacancy: what its range is without it.
  virtual Physical create(uint64_t bytes, bool exportable, Vacancy vacancy) = 0;
  virtual void release(const Physical &physical) = 0;

  virtual void map(Address address, const Physical &physical, bool writable) = 0;
  // Makes a whole range of maps usable by this device.
  virtual void set_access(Range range, bool writable) = 0;
  // One call over any number of whole maps.
  virtual void unmap(Range range, Vacancy vacancy) = 0;

  // A new descriptor, close-on-exec, the caller's.
  virtual int export_fd(const Physical &physical) = 0;
  // The descriptor stays the caller's; the result is released like a created one.
  virtual Physical import_fd(int fd, uint64_t bytes) = 0;

  // Waits for everything that this process has in flight on the device, whoever started it.
  virtual void quiesce() = 0;

  // Returns when everything is copied.
  virtual void copy(tp_copy_kind kind, const std::vector<tp_span> &spans, uint32_t threads) = 0;
  // Only begins, where that is possible: null when all is copied already. The lists are the caller's again.
  virtual std::unique_ptr<Flight> begin_blocks(const tp_blocks &blocks, uint32_t threads) {
    copy(TP_COPY_DEVICE, spans_of(blocks), threads);
    return nullptr;
  }
  // Has it copy_hashed, so that a chunk is best hashed, copied and checked before the next? Else it has save and restore.
  virtual bool chunk_by_chunk() const = 0;
  // Copies on the caller's thread and gives the hash of the bytes that it read.
  virtual uint64_t copy_hashed(tp_copy_kind, const tp_span &) { throw Error::unsupported("this driver copies in batches"); }
  // To the host: hashes every chunk where it is, copies those that are `wanted` then, and hashes them where they arrived, one step
  // beside the other. wanted(i) is asked once for each, in order, by one thread at a time, before anything of it is copied.
  virtual void save(const std::vector<CheckedCopy> &, uint32_t, const std::function<bool(uint64_t i)> &) {
    throw Error::unsupported("this driver copies chunk by chunk");
  }
  // To the device: copies every chunk and hashes it where it arrived. What the work beside throws leaves here once nothing is in
  // flight.
  virtual void restore(const std::vector<CheckedCopy> &, uint32_t, const Beside &) {
    throw Error::unsupported("this driver copies chunk by chunk");
  }
  // Chunk hashes of device memory; hash.h has the definition.
  virtual void hash(const std::vector<HashItem> &chunks, uint32_t threads) = 0;
  // How `hash` does it, for people.
  virtual std::string hash_path() = 0;

  // Backs page-aligned, reserved, uncommitted host address space with memory, ready for fast copies.
  virtual void commit(Range range, uint32_t threads) = 0;
  virtual void decommit(Range range) = 0;
  // Like commit, but with the pages of a sealed memory file, shared and read-only; ended by decommit too.
  virtual void adopt(Range range, const FilePart &file, uint32_t threads) = 0;
};

}  // namespace torpor
