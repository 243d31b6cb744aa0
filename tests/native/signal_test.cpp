// Signals that come all the time, as those of a profiler do.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "fixture.h"

namespace {

// What the kernel allocates of a file between two signals.
std::atomic<off_t> between_signals{0};  // 0: there are none
std::atomic<int> tries{0};

struct Signals {
  explicit Signals(off_t bytes) { between_signals = bytes, tries = 10000; }
  ~Signals() { between_signals = 0; }
};

}  // namespace

// Of a kernel that undoes what it has allocated of a memory file when any signal comes, as many do.
extern "C" int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  if (between_signals > 0 && bytes > between_signals) {
    errno = --tries > 0 ? EINTR : EDEADLK;
    return -1;
  }
  return static_cast<int>(syscall(SYS_fallocate, fd, mode, offset, bytes));
}

TEST(memory_files_get_their_pages_between_signals) {
  fixture::Device device;
  tp_region *region = nullptr;
  {
    const Signals signals(4 * fixture::kMiB);
    OK(tp_region_create(device.handle, 64 * fixture::kMiB, 64 * fixture::kMiB, TP_REGION_EXPORTABLE, "exported", &region, &err));
  }
  const fixture::Bytes data = fixture::pattern(fixture::stats(region).bytes, 5);
  device.write(fixture::stats(region).address, data);
  CHECK(device.read(fixture::stats(region).address, data.size()) == data);
  fixture::destroy(region);
  device.close();
}
