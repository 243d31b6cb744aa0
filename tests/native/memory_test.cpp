// How much host memory may be taken: the machine's, and every enclosing cgroup's. Arenas that respect it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "arena.h"
#include "fake_cuda.h"
#include "fixture.h"
#include "host_memory.h"
#include "host_pages.h"

using namespace torpor;

namespace {

class Root {
 public:
  Root() {
    char path[] = "/tmp/torpor-root-XXXXXX";
    CHECK(mkdtemp(path) != nullptr);
    path_ = path;
    file("/proc/meminfo", "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 800 kB\n");
  }
  ~Root() { CHECK_EQ(system(("rm -r " + path_).c_str()), 0); }
  void file(const std::string &path, const std::string &text) const {
    const std::string full = path_ + path;
    for (size_t at = path_.size() + 1; (at = full.find('/', at)) != std::string::npos; ++at) {
      mkdir(full.substr(0, at).c_str(), 0700);
    }
    std::ofstream(full) << text;
  }
  HostMemory read() const { return read_host_memory(path_); }

 private:
  std::string path_;
};

}  // namespace

TEST(host_memory_without_cgroups) {
  const Root root;
  CHECK_EQ(root.read().total, 1000u * 1024);
  CHECK_EQ(root.read().available, 800u * 1024);
}

TEST(host_memory_cgroup_v2_takes_the_tightest_level) {
  const Root root;
  root.file("/proc/self/cgroup", "0::/a/b\n");
  root.file("/proc/self/mountinfo", "31 23 0:28 / /cg rw - cgroup2 cgroup2 rw\n");
  root.file("/cg/a/b/memory.max", "max\n");
  root.file("/cg/a/memory.max", "409600\n");
  root.file("/cg/a/memory.current", "300000\n");
  root.file("/cg/a/memory.stat", "anon 1\ninactive_file 100000\n");
  CHECK_EQ(root.read().total, 409600u);
  CHECK_EQ(root.read().available, 409600u - 200000u);
}

TEST(host_memory_cgroup_v1_inside_a_container) {
  const Root root;
  root.file("/proc/self/cgroup", "4:memory:/docker/x\n0::/\n");
  root.file("/proc/self/mountinfo", "35 31 0:32 /docker/x /cg/memory rw - cgroup cgroup rw,memory\n");
  root.file("/cg/memory/memory.limit_in_bytes", "204800\n");
  root.file("/cg/memory/memory.usage_in_bytes", "204800\n");
  root.file("/cg/memory/memory.stat", "cache 5\ntotal_inactive_file 4096\n");
  CHECK_EQ(root.read().total, 204800u);
  CHECK_EQ(root.read().available, 4096u);
}

// What is mounted is all that can be seen of the limits of a cgroup beside it, whose name begins alike.
TEST(host_memory_cgroup_beside_what_is_mounted) {
  const Root root;
  root.file("/proc/self/cgroup", "4:memory:/docker/xy\n");
  root.file("/proc/self/mountinfo", "35 31 0:32 /docker/x /cg/memory rw - cgroup cgroup rw,memory\n");
  root.file("/cg/memory/memory.limit_in_bytes", "204800\n");
  CHECK_EQ(root.read().total, 204800u);
}

TEST(host_memory_unlimited_cgroup_v1) {
  const Root root;
  root.file("/proc/self/cgroup", "4:memory:/\n");
  root.file("/proc/self/mountinfo", "35 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n");
  root.file("/cg/memory/memory.limit_in_bytes", "9223372036854771712\n");
  CHECK_EQ(root.read().available, 800u * 1024);
}

TEST(range_set_merges_and_splits) {
  RangeSet set;
  set.add({100, 50});
  set.add({200, 50});
  CHECK_EQ(set.missing({100, 150}).size(), 1u);
  set.add({150, 50});
  CHECK(set.contains({100, 150}));
  set.remove({120, 60});
  CHECK(set.contains({100, 20}) && set.contains({180, 70}) && !set.contains({119, 2}));
  CHECK_EQ(set.present({0, 1000}).size(), 2u);
  const auto gaps = set.missing({90, 200});
  CHECK_EQ(gaps.size(), 3u);
  CHECK_EQ(gaps[1].address, 120u);
  CHECK_EQ(gaps[1].bytes, 60u);
  set.remove({0, 1000});
  CHECK(set.present({0, 1000}).empty());
}

// Both ways, whichever this kernel would choose: afterwards every page is there.
TEST(memory_file_gets_all_its_pages) {
  for (const bool huge : {false, true}) {
    const int fd = memfd_create("test", MFD_CLOEXEC);
    const uint64_t bytes = (uint64_t{5} << 20) + 4096;
    CHECK_EQ(ftruncate(fd, static_cast<off_t>(bytes)), 0);
    host::populate_file(fd, bytes, huge);
    struct stat status {};
    CHECK_EQ(fstat(fd, &status), 0);
    CHECK(static_cast<uint64_t>(status.st_blocks) * 512 >= bytes);
    close(fd);
  }
}

using TestArena = fixture::Arena;
using fixture::kMiB;

TEST(arena_commits_pages_and_gives_them_back) {
  fixture::Device device;
  const TestArena arena(device, 64 * kMiB);
  CHECK_EQ(arena.committed(), 0u);
  OK(tp_arena_commit(arena.handle, 100, kMiB, 2, &err));  // pages around it
  CHECK_EQ(arena.committed(), kMiB + 4096);
  std::memset(arena.at(0), 7, kMiB + 4096);
  OK(tp_arena_commit(arena.handle, 0, 2 * kMiB, 2, &err));
  CHECK_EQ(arena.committed(), 2 * kMiB);
  CHECK_EQ(*arena.at(100), 7);
  OK(tp_arena_decommit(arena.handle, 100, kMiB, &err));  // pages inside it
  CHECK_EQ(arena.committed(), kMiB + 4096);
  CHECK_EQ(*arena.at(99), 7);
  OK(tp_arena_commit(arena.handle, 0, 2 * kMiB, 1, &err));
  CHECK_EQ(*arena.at(8192), 0);
  CHECK_EQ(*arena.at(99), 7);
  OK(tp_arena_destroy(arena.handle, &err));
  CHECK_EQ(device.stats().committed_bytes, 0u);
  device.close();
}

TEST(arena_refuses_what_the_machine_has_not) {
  fixture::Device device;
  const TestArena arena(device, fixture::kTooMuch);
  tp_error error{};
  CHECK_EQ(tp_arena_commit(arena.handle, 0, fixture::kTooMuch, 2, &error), TP_HOST_MEMORY);
  CHECK_EQ(error.bytes_needed, fixture::kTooMuch);
  CHECK(error.bytes_free > 0 && error.bytes_free < error.bytes_needed);
  CHECK_EQ(arena.committed(), 0u);
  CHECK_STATUS(tp_arena_commit(arena.handle, kMiB, fixture::kTooMuch, 2, &err), TP_INVALID);
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
}

// Address space is refused by the kernel: for the memory of the host that it is, not of the device.
TEST(arena_addresses_that_cannot_be_had_are_of_the_host) {
  fixture::Device device;
  tp_arena *arena = nullptr;
  uint64_t address = 0;
  CHECK_STATUS(tp_arena_create(device.handle, uint64_t{1} << 62, &arena, &address, &err), TP_HOST_MEMORY);
  CHECK_EQ(device.stats().live_arenas, 0u);
  device.close();
}

// Page-locks take memory that nobody can ask for beforehand.
TEST(arena_whose_pages_cannot_be_locked_says_what_it_needed) {
  if (fake_cuda::created() < 0) throw check::Skip("needs the stand-in for the CUDA driver");
  fixture::Device device;
  const TestArena arena(device, 64 * kMiB);
  fake_cuda::refuse("cuMemHostRegister_v2", 1, fake_cuda::kNoMemory);
  tp_error error{};
  CHECK_EQ(tp_arena_commit(arena.handle, 0, 2 * kMiB, 1, &error), TP_HOST_MEMORY);
  CHECK(fake_cuda::refused());
  CHECK_EQ(error.bytes_needed, 2 * kMiB);
  CHECK(error.bytes_free > 0);
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
}

TEST(arena_commit_that_fails_changes_nothing) {
  fixture::Device device;
  const TestArena arena(device, 64 * kMiB);
  OK(tp_arena_commit(arena.handle, 4 * kMiB, kMiB, 1, &err));
  device.arm(TP_OP_COMMIT, 2);  // the gap behind what is committed
  CHECK_STATUS(tp_arena_commit(arena.handle, 0, 8 * kMiB, 1, &err), TP_HOST_MEMORY);
  CHECK_EQ(arena.committed(), kMiB);
  OK(tp_arena_commit(arena.handle, 0, 8 * kMiB, 1, &err));
  CHECK_EQ(arena.committed(), 8 * kMiB);
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
}

namespace {

// A memfd of `bytes`, each page filled with its number from `first` on.
int memory_file(uint64_t bytes, unsigned char first, int seals) {
  const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  std::vector<unsigned char> page(4096);
  for (uint64_t at = 0; at < bytes; at += page.size()) {
    std::fill(page.begin(), page.end(), static_cast<unsigned char>(first + at / page.size()));
    CHECK_EQ(pwrite(fd, page.data(), page.size(), static_cast<off_t>(at)), static_cast<ssize_t>(page.size()));
  }
  CHECK_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
  const int reader = open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC);
  close(fd);
  return reader;
}

constexpr int kSealed = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;

}  // namespace

TEST(arena_adopts_a_sealed_file_and_lets_go) {
  fixture::Device device;
  const TestArena arena(device, 64 * kMiB);
  const int fd = memory_file(3 * kMiB, 1, kSealed);
  OK(tp_arena_commit(arena.handle, 0, 4 * kMiB, 1, &err));
  std::memset(arena.at(0), 200, 4 * kMiB);
  OK(tp_arena_adopt(arena.handle, kMiB, 2 * kMiB, fd, 4096, 2, &err));
  close(fd);
  CHECK_EQ(arena.committed(), 4 * kMiB);
  CHECK_EQ(fixture::file_bytes(arena.address, 64 * kMiB), 2 * kMiB);
  CHECK_EQ(*arena.at(kMiB - 1), 200);
  CHECK_EQ(*arena.at(kMiB), 2);
  CHECK_EQ(*arena.at(kMiB + 4096), 3);
  CHECK_EQ(*arena.at(3 * kMiB), 200);
  OK(tp_arena_decommit(arena.handle, kMiB, kMiB, &err));  // half of it, then all
  CHECK_EQ(arena.committed(), 3 * kMiB);
  CHECK_EQ(fixture::file_bytes(arena.address, 64 * kMiB), kMiB);
  CHECK_EQ(*arena.at(2 * kMiB), static_cast<unsigned char>(2 + 256));
  OK(tp_arena_commit(arena.handle, kMiB, kMiB, 1, &err));
  *arena.at(kMiB) = 9;  // memory of its own again
  OK(tp_arena_destroy(arena.handle, &err));
  CHECK_EQ(device.stats().committed_bytes, 0u);
  device.close();
}

TEST(arena_adopts_only_what_nobody_can_change) {
  fixture::Device device;
  const TestArena arena(device, 64 * kMiB);
  OK(tp_arena_commit(arena.handle, 0, kMiB, 1, &err));
  *arena.at(0) = 5;
  const int sealed = memory_file(kMiB, 1, kSealed), open_to_all = memory_file(kMiB, 1, F_SEAL_SHRINK | F_SEAL_GROW);
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  CHECK_STATUS(tp_arena_adopt(arena.handle, 0, kMiB, open_to_all, 0, 1, &err), TP_INVALID);
  CHECK_STATUS(tp_arena_adopt(arena.handle, 0, kMiB, ends[0], 0, 1, &err), TP_INVALID);
  CHECK_STATUS(tp_arena_adopt(arena.handle, 0, kMiB, -1, 0, 1, &err), TP_INVALID);
  CHECK_STATUS(tp_arena_adopt(arena.handle, 0, kMiB, sealed, 4096, 1, &err), TP_INVALID);  // too short
  CHECK_STATUS(tp_arena_adopt(arena.handle, 0, 4096, sealed, 100, 1, &err), TP_INVALID);   // no whole page
  CHECK_STATUS(tp_arena_adopt(arena.handle, 100, 4096, sealed, 0, 1, &err), TP_INVALID);
  CHECK_STATUS(tp_arena_adopt(arena.handle, 64 * kMiB, 4096, sealed, 0, 1, &err), TP_INVALID);
  CHECK_EQ(*arena.at(0), 5);
  for (const int fd : {sealed, open_to_all, ends[0], ends[1]}) close(fd);
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
}

TEST(arena_adopt_that_fails_leaves_the_range_without_memory) {
  fixture::Device device;
  const TestArena arena(device, 64 * kMiB);
  const int fd = memory_file(kMiB, 1, kSealed);
  OK(tp_arena_commit(arena.handle, 0, 2 * kMiB, 1, &err));
  device.arm(TP_OP_COMMIT, 1);
  CHECK_STATUS(tp_arena_adopt(arena.handle, 0, kMiB, fd, 0, 1, &err), TP_HOST_MEMORY);
  CHECK_EQ(arena.committed(), kMiB);
  OK(tp_arena_adopt(arena.handle, 0, kMiB, fd, 0, 1, &err));
  CHECK_EQ(arena.committed(), 2 * kMiB);
  close(fd);
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
}

TEST(host_memory_that_is_free_is_told) {
  uint64_t bytes = 0;
  OK(tp_host_free_bytes(&bytes, &err));
  CHECK(bytes > 0 && bytes < fixture::kTooMuch);
}

TEST(arena_is_page_locked_exactly_where_it_is_committed) {
  fixture::Device device;
  if (fake_cuda::page_locked() < 0) throw check::Skip("needs the stand-in for the CUDA driver");
  const TestArena arena(device, 64 * kMiB);
  OK(tp_arena_commit(arena.handle, 0, 8 * kMiB, 2, &err));
  CHECK_EQ(static_cast<uint64_t>(fake_cuda::page_locked()), arena.committed());
  OK(tp_arena_decommit(arena.handle, 2 * kMiB, kMiB, &err));
  CHECK_EQ(static_cast<uint64_t>(fake_cuda::page_locked()), arena.committed());
  OK(tp_arena_commit(arena.handle, kMiB, 4 * kMiB, 2, &err));
  CHECK_EQ(static_cast<uint64_t>(fake_cuda::page_locked()), 8 * kMiB);
  OK(tp_arena_destroy(arena.handle, &err));
  CHECK_EQ(fake_cuda::page_locked(), int64_t{0});
  device.close();
}

TEST(copy_into_an_uncommitted_arena_is_an_error) {
  fixture::Device device;
  const TestArena arena(device, 64 * kMiB);
  tp_region *region = device.region(2);
  OK(tp_arena_commit(arena.handle, 0, kMiB, 1, &err));
  const tp_span span{arena.address + kMiB - 100, fixture::stats(region).address, 200};
  CHECK_STATUS(tp_copy(device.handle, TP_COPY_TO_HOST, &span, 1, 1, &err), TP_STATE);
  const tp_span inside{arena.address + kMiB - 200, fixture::stats(region).address, 200};
  OK(tp_copy(device.handle, TP_COPY_TO_HOST, &inside, 1, 1, &err));
  fixture::destroy(region);
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
}
