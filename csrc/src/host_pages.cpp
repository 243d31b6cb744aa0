#include "host_pages.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "parallel.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4  // Linux 5.7
#endif

namespace torpor::host {
namespace {

constexpr uint64_t kPopulatePiece = uint64_t{16} << 20;
// A millisecond's work. Many kernels undo a call that any signal meets: under a profiler's timer a large one would never end.
constexpr uint64_t kAllocatePiece = uint64_t{1} << 20;
constexpr uint64_t kCopyPiece = uint64_t{4} << 20;
constexpr uint64_t kThreadWorth = uint64_t{1} << 20;
constexpr int kMostThreads = 8;

void *pointer(Address address) noexcept { return reinterpret_cast<void *>(address); }

uint64_t align_up(uint64_t value, uint64_t to) noexcept { return (value + to - 1) / to * to; }

// One write per page, for kernels without MADV_POPULATE_WRITE. Only for fresh memory: it writes zeros.
void touch(Range range) noexcept {
  for (Address at = range.address; at < range.end(); at += page_size()) *static_cast<volatile char *>(pointer(at)) = 0;
}

void populate_piece(Range range, tp_op op) {
  for (;;) {
    if (madvise(pointer(range.address), range.bytes, MADV_POPULATE_WRITE) == 0) return;
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno == EINVAL) return touch(range);
    // EFAULT is what a fault that would have raised SIGBUS gives: the file system had no page.
    throw Error::system(op, errno == EFAULT ? ENOMEM : errno, "populating " + human_bytes(range.bytes));
  }
}

// A window on a file for as long as it is filled.
class Window {
 public:
  Window(int fd, uint64_t bytes) : range_(reserve(bytes)) {
    void *at = mmap(pointer(range_.address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (at != MAP_FAILED) {
      madvise(at, bytes, MADV_HUGEPAGE);
      return;
    }
    const int failed = errno;
    munmap(pointer(range_.address), range_.bytes);
    throw Error::system(TP_OP_CREATE, failed, "mapping a window of " + human_bytes(bytes));
  }
  Window(const Window &) = delete;
  Window &operator=(const Window &) = delete;
  ~Window() { munmap(pointer(range_.address), range_.bytes); }
  Range range() const { return range_; }

 private:
  Range range_;
};

}  // namespace

uint64_t page_size() noexcept {
  static const auto size = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return size;
}

uint32_t useful_threads(uint64_t bytes) noexcept {
  cpu_set_t set;
  const int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  return static_cast<uint32_t>(std::clamp<uint64_t>(bytes / kPopulatePiece, 1, std::clamp(cores, 1, kMostThreads)));
}

Range reserve(uint64_t bytes, uint64_t alignment, tp_op op) {
  alignment = std::max(alignment, bytes >= kHugePage ? kHugePage : page_size());
  const uint64_t slack = alignment - page_size();
  if (bytes > UINT64_MAX / 2) throw Error::invalid("cannot reserve " + human_bytes(bytes) + " of address space");
  void *at = mmap(nullptr, bytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw Error::system(op, errno, "reserving " + human_bytes(bytes) + " of address space");
  const auto start = reinterpret_cast<Address>(at);
  const Range range{align_up(start, alignment), bytes};
  if (range.address > start) munmap(at, range.address - start);
  if (const uint64_t tail = start + bytes + slack - range.end()) munmap(pointer(range.end()), tail);
  return range;
}

void free_address(Range range) {
  if (munmap(pointer(range.address), range.bytes) != 0) {
    throw Error::system(TP_OP_FREE_ADDRESS, errno, "freeing " + human_bytes(range.bytes) + " of address space");
  }
}

void vacate(Range range, Vacancy vacancy) {
  const int access = vacancy == Vacancy::guard ? PROT_READ | PROT_WRITE : PROT_NONE;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  void *at = mmap(pointer(range.address), range.bytes, access, flags, -1, 0);
  if (at == MAP_FAILED) throw Error::system(TP_OP_UNMAP, errno, "unmapping " + human_bytes(range.bytes));
  madvise(at, range.bytes, MADV_DONTFORK);
}

void populate(Range range, uint32_t threads, tp_op op) {
  const uint64_t pieces = (range.bytes + kPopulatePiece - 1) / kPopulatePiece;
  parallel_for(pieces, threads, [&](uint64_t i) {
    const uint64_t offset = i * kPopulatePiece;
    populate_piece({range.address + offset, std::min(kPopulatePiece, range.bytes - offset)}, op);
  });
}

Range allocate(uint64_t bytes) {
  const Range range = reserve(bytes);
  try {
    if (mprotect(pointer(range.address), bytes, PROT_READ | PROT_WRITE) != 0) {
      throw Error::system(TP_OP_CREATE, errno, "opening " + human_bytes(bytes));
    }
    madvise(pointer(range.address), bytes, MADV_HUGEPAGE);
    madvise(pointer(range.address), bytes, MADV_DONTFORK);
    populate(range, 1, TP_OP_CREATE);
  } catch (...) {
    munmap(pointer(range.address), bytes);
    throw;
  }
  return range;
}

void move_pages(Range from, Address address) {
  constexpr int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
  if (mremap(pointer(from.address), from.bytes, from.bytes, flags, pointer(address)) == MAP_FAILED) {
    const int failed = errno;
    // The kernel may have cleared the target before it gave up: reserved again, unless somebody has come in between.
    mmap(pointer(address), from.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    throw Error::system(TP_OP_MAP, failed, "mapping " + human_bytes(from.bytes));
  }
  // Only an address from now on: nobody's by accident, and not charged where the kernel counts what could be written.
  mprotect(pointer(from.address), from.bytes, PROT_NONE);
}

bool can_move_pages() noexcept {
  static const bool can = [] {
    const uint64_t bytes = page_size();
    void *from = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (from == MAP_FAILED) return false;
    void *to = mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, nullptr);
    if (to != MAP_FAILED) munmap(to, bytes);
    munmap(from, bytes);
    return to != MAP_FAILED;
  }();
  return can;
}

void release(Range range) {
  if (munmap(pointer(range.address), range.bytes) != 0) {
    throw Error::system(TP_OP_RELEASE, errno, "releasing " + human_bytes(range.bytes));
  }
}

bool huge_files() {
  static const bool given = [] {
    std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    std::string modes;
    std::getline(file, modes);
    return !modes.empty() && modes.find("[never]") == std::string::npos && modes.find("[deny]") == std::string::npos;
  }();
  return given;
}

void populate_file(int fd, uint64_t bytes, bool huge) {
  if (huge) {
    const Window window(fd, bytes);
    return populate(window.range(), 1, TP_OP_CREATE);
  }
  for (uint64_t offset = 0; offset < bytes;) {
    const uint64_t piece = std::min(kAllocatePiece, bytes - offset);
    if (fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(piece)) == 0) {
      offset += piece;
    } else if (errno != EINTR) {
      throw Error::system(TP_OP_CREATE, errno, "allocating " + human_bytes(bytes));
    }
  }
}

void prefault(Range range) noexcept {
  const uint64_t pieces = (range.bytes + kPopulatePiece - 1) / kPopulatePiece;
  parallel_for(pieces, useful_threads(range.bytes), [&](uint64_t i) {
    const uint64_t offset = i * kPopulatePiece;
    madvise(pointer(range.address + offset), std::min(kPopulatePiece, range.bytes - offset), MADV_POPULATE_WRITE);
  });
}

void copy(const std::vector<tp_span> &spans, uint32_t threads) {
  std::vector<tp_span> pieces;
  pieces.reserve(spans.size());
  uint64_t bytes = 0;
  for (tp_span span : spans) {
    bytes += span.bytes;
    for (; span.bytes > kCopyPiece; span.dst += kCopyPiece, span.src += kCopyPiece, span.bytes -= kCopyPiece) {
      pieces.push_back({span.dst, span.src, kCopyPiece});
    }
    if (span.bytes > 0) pieces.push_back(span);
  }
  // A thread that has less than this to copy costs more than it saves.
  const uint64_t worth = std::max<uint64_t>(bytes / kThreadWorth, 1);
  parallel_for(pieces.size(), static_cast<uint32_t>(std::min<uint64_t>(threads, worth)), [&](uint64_t i) {
    std::memcpy(pointer(pieces[i].dst), pointer(pieces[i].src), pieces[i].bytes);
  });
}

void commit(Range range, uint32_t threads) {
  if (mprotect(pointer(range.address), range.bytes, PROT_READ | PROT_WRITE) != 0) {
    throw Error::system(TP_OP_COMMIT, errno, "opening " + human_bytes(range.bytes) + " of an arena");
  }
  madvise(pointer(range.address), range.bytes, MADV_HUGEPAGE);
  madvise(pointer(range.address), range.bytes, MADV_DONTFORK);
  try {
    populate(range, threads, TP_OP_COMMIT);
  } catch (...) {
    vacate(range, Vacancy::hole);
    throw;
  }
}

void require_sealed(const FilePart &file, uint64_t bytes) {
  constexpr int needed = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = fcntl(file.fd, F_GET_SEALS);
  struct stat status {};
  if (seals < 0 || fstat(file.fd, &status) != 0) throw Error::invalid("descriptor " + std::to_string(file.fd) + " is no memory file");
  if ((seals & needed) != needed) throw Error::invalid("a memory file that can be adopted is sealed, content and size");
  const auto size = static_cast<uint64_t>(status.st_size);
  if (file.offset > size || bytes > size - file.offset) {
    throw Error::invalid("a memory file of " + std::to_string(size) + " bytes does not have " + std::to_string(bytes) + " at " +
                         std::to_string(file.offset));
  }
}

void adopt(Range range, const FilePart &file, uint32_t threads) {
  constexpr int flags = MAP_SHARED | MAP_FIXED;
  void *at = mmap(pointer(range.address), range.bytes, PROT_READ, flags, file.fd, static_cast<off_t>(file.offset));
  if (at == MAP_FAILED) {
    const int failed = errno;
    vacate(range, Vacancy::hole);  // the kernel may have cleared the range before it gave up
    throw Error::system(TP_OP_COMMIT, failed, "mapping " + human_bytes(range.bytes) + " of a shared image");
  }
  madvise(at, range.bytes, MADV_DONTFORK);
  // Page tables, on several threads. Only a matter of speed: the pages exist.
  const uint64_t pieces = (range.bytes + kPopulatePiece - 1) / kPopulatePiece;
  parallel_for(pieces, threads, [&](uint64_t i) {
    const uint64_t offset = i * kPopulatePiece;
    madvise(pointer(range.address + offset), std::min(kPopulatePiece, range.bytes - offset), MADV_POPULATE_READ);
  });
}

// A fresh PROT_NONE mapping: a stray access faults instead of taking memory that nobody counts.
void decommit(Range range) { vacate(range, Vacancy::hole); }

}  // namespace torpor::host
