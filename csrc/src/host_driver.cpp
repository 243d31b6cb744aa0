#include "host_driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "hash.h"
#include "host_memory.h"
#include "host_pages.h"

namespace torpor {
namespace {

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  Fd(const Fd &) = delete;
  Fd &operator=(const Fd &) = delete;
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int take() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Anonymous memory waits at an address of its own to be mapped; unmapping frees it, and the address is what is left to release.
bool is_anonymous(const Physical &physical) { return physical.inode == 0; }
Range range_of(const Physical &physical) { return {physical.handle, physical.bytes}; }

int descriptor(const Physical &physical) { return static_cast<int>(physical.handle); }

struct stat status_of(int fd, tp_op op) {
  struct stat status {};
  if (fstat(fd, &status) != 0) throw Error::system(op, errno, "fstat of a memory file");
  return status;
}

Physical describe(Fd &file, uint64_t bytes, tp_op op) {
  const struct stat status = status_of(file.get(), op);
  return {static_cast<uint64_t>(file.take()), bytes, status.st_dev, status.st_ino, true};
}

int duplicate(int fd, tp_op op) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (copy < 0) throw Error::system(op, errno, "duplicating descriptor " + std::to_string(fd));
  return copy;
}

class HostDriver final : public Driver {
 public:
  uint64_t granularity() const override { return host::page_size(); }

  Address reserve(uint64_t bytes) override { return host::reserve(bytes).address; }
  void free_address(Range range) override { host::free_address(range); }

  void admit(uint64_t bytes) override { require_host_memory(TP_OP_CREATE, bytes); }

  uint64_t free_bytes() override { return free_host_memory(); }

  uint32_t concurrency(uint64_t bytes) const override { return host::useful_threads(bytes); }

  // What no other process may have is anonymous memory, for which kernels give huge pages where they give none to files. A guarded range
  // has files too: /proc could not tell anonymous memory from a guard.
  Physical create(uint64_t bytes, bool exportable, Vacancy vacancy) override {
    const bool anonymous = !exportable && vacancy == Vacancy::hole && bytes >= host::kHugePage && host::can_move_pages();
    return anonymous ? Physical{host::allocate(bytes).address, bytes} : create_file(bytes);
  }

  // The size is sealed: a peer that maps an exported file can then rely on it, as no one can make an access raise SIGBUS.
  Physical create_file(uint64_t bytes) {
    Fd file(memfd_create("torpor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (file.get() < 0) throw Error::system(TP_OP_CREATE, errno, "memfd_create");
    if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) throw Error::system(TP_OP_CREATE, errno, "sizing a memory file");
    if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      throw Error::system(TP_OP_CREATE, errno, "sealing a memory file");
    }
    host::populate_file(file.get(), bytes, bytes >= host::kHugePage && host::huge_files());
    return describe(file, bytes, TP_OP_CREATE);
  }

  // EINTR included, Linux has closed the descriptor when close returns.
  void release(const Physical &physical) override {
    if (is_anonymous(physical)) return host::release(range_of(physical));
    if (close(descriptor(physical)) != 0 && errno == EBADF) throw Error::system(TP_OP_RELEASE, EBADF, "closing a memory file");
  }

  // Readable and writable at once rather than in set_access: a guarded range must have no moment in which an access faults.
  void map(Address address, const Physical &physical, bool writable) override {
    if (is_anonymous(physical)) return host::move_pages(range_of(physical), address);
    const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void *at = mmap(reinterpret_cast<void *>(address), physical.bytes, access, MAP_SHARED | MAP_FIXED, descriptor(physical), 0);
    if (at == MAP_FAILED) throw Error::system(TP_OP_MAP, errno, "mapping " + human_bytes(physical.bytes));
    // A forked child must not keep the pages. Both are advice: a kernel that refuses changes no meaning.
    madvise(at, physical.bytes, MADV_DONTFORK);
    madvise(at, physical.bytes, MADV_HUGEPAGE);
  }

  // Fills the page tables now, on several threads, rather than fault by fault under a copy or a request.
  void set_access(Range range, bool writable) override {
    if (writable) host::prefault(range);
  }

  void unmap(Range range, Vacancy vacancy) override { host::vacate(range, vacancy); }

  int export_fd(const Physical &physical) override { return duplicate(descriptor(physical), TP_OP_EXPORT); }

  Physical import_fd(int fd, uint64_t bytes) override {
    const uint64_t size = static_cast<uint64_t>(status_of(fd, TP_OP_IMPORT).st_size);
    if (size < bytes) {
      throw Error::invalid("descriptor " + std::to_string(fd) + " has " + std::to_string(size) + " bytes, not " +
                           std::to_string(bytes));
    }
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
      throw Error::invalid("descriptor " + std::to_string(fd) + " is not an exported extent: its size is not sealed");
    }
    Fd file(duplicate(fd, TP_OP_IMPORT));
    return describe(file, bytes, TP_OP_IMPORT);
  }

  void quiesce() override {}
  bool chunk_by_chunk() const override { return true; }
  uint64_t copy_hashed(tp_copy_kind, const tp_span &span) override {
    return copy_and_hash(reinterpret_cast<void *>(span.dst), reinterpret_cast<const void *>(span.src), span.bytes);
  }
  void copy(tp_copy_kind, const std::vector<tp_span> &spans, uint32_t threads) override { host::copy(spans, threads); }
  void hash(const std::vector<HashItem> &chunks, uint32_t threads) override { hash_chunks(chunks, threads); }
  std::string hash_path() override { return "processor"; }

  void commit(Range range, uint32_t threads) override { host::commit(range, threads); }
  void decommit(Range range) override { host::decommit(range); }
  void adopt(Range range, const FilePart &file, uint32_t threads) override { host::adopt(range, file, threads); }
};

}  // namespace

std::unique_ptr<Driver> make_host_driver() { return std::make_unique<HostDriver>(); }

}  // namespace torpor
