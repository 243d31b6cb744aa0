// Extents of a huge page and more that nobody else may have: anonymous memory on the host, whatever it is on the device.
#include <sys/mman.h>

#include "fixture.h"

using fixture::Bytes;
using fixture::pattern;

namespace {

constexpr uint64_t kHuge = uint64_t{2} << 20;
constexpr uint64_t kBytes = 2 * kHuge + (uint64_t{1} << 20);  // the last extent is smaller than a huge page: a file on the host

tp_region *large(const fixture::Device &device, uint32_t flags = 0) {
  tp_region *out = nullptr;
  OK(tp_region_create(device.handle, kBytes, kHuge, flags, "large", &out, &err));
  return out;
}

uint64_t files(tp_region *region) { return fixture::file_bytes(fixture::stats(region).address, kBytes); }

}  // namespace

TEST(huge_extents_come_and_go_at_one_address) {
  fixture::Device device;
  tp_region *region = large(device);
  const uint64_t address = fixture::stats(region).address;
  const int descriptors = fixture::open_descriptors();
  for (uint64_t round = 0; round < 3; ++round) {
    const Bytes wanted = pattern(kBytes, round);
    device.write(address, wanted);
    CHECK(device.read(address, kBytes) == wanted);
    fixture::unmap({region});
    CHECK_EQ(device.stats().mapped_bytes, 0u);
    fixture::map({region});
    CHECK_EQ(fixture::stats(region).address, address);
    CHECK_EQ(device.stats().mapped_bytes, fixture::stats(region).bytes);
  }
  CHECK_EQ(fixture::open_descriptors(), descriptors);
  fixture::destroy(region);
  device.close();
}

TEST(huge_extents_are_files_only_where_somebody_may_need_them) {
  if (check::driver() != "host") throw check::Skip("looks at this process's maps");
  fixture::Device device;
  tp_region *plain = large(device), *exported = large(device, TP_REGION_EXPORTABLE), *guarded = large(device, TP_REGION_GUARDED);
  CHECK_EQ(files(plain), kBytes - 2 * kHuge);
  CHECK_EQ(files(exported), kBytes);
  CHECK_EQ(files(guarded), kBytes);
  tp_extent extents[3];
  uint64_t n = 0;
  OK(tp_region_extents(plain, extents, 3, &n, &err));
  CHECK_EQ(n, 3u);
  CHECK(extents[0].inode == 0 && extents[1].inode == 0 && extents[2].inode != 0);
  for (tp_region *region : {plain, exported, guarded}) fixture::destroy(region);
  device.close();
}

TEST(huge_extents_asleep_leave_a_hole_that_nobody_gets) {
  if (check::driver() != "host") throw check::Skip("looks at this process's maps");
  fixture::Device device;
  tp_region *region = large(device);
  const uint64_t address = fixture::stats(region).address;
  fixture::unmap({region});
  for (uint64_t at = address; at < address + kBytes; at += kHuge / 2) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    CHECK(mmap(reinterpret_cast<void *>(at), 4096, PROT_READ, flags, -1, 0) == MAP_FAILED);
  }
  unsigned char resident = 0;
  CHECK(mincore(reinterpret_cast<void *>(address), 4096, &resident) == 0);
  CHECK_EQ(int{resident} & 1, 0);
  fixture::destroy(region);
  device.close();
}

// The n-th call of each kind fails, for every n: a named state, the same call goes on, and nothing is left.
TEST(huge_extents_survive_every_failure) {
  for (const tp_op op : {TP_OP_CREATE, TP_OP_MAP, TP_OP_SET_ACCESS, TP_OP_UNMAP, TP_OP_RELEASE}) {
    for (uint64_t nth = 1;; ++nth) {
      fixture::Device device;
      tp_region *region = large(device);
      const uint64_t address = fixture::stats(region).address;
      uint64_t done = 0;
      device.arm(op, nth);
      const tp_status down = tp_regions_unmap(&region, 1, &done, nullptr);
      const tp_status up = tp_regions_map(&region, 1, nullptr);
      device.clear();
      OK(tp_regions_map(&region, 1, &err));
      const Bytes wanted = pattern(kBytes, nth);
      device.write(address, wanted);
      CHECK(device.read(address, kBytes) == wanted);
      CHECK_EQ(device.stats().mapped_bytes, fixture::stats(region).bytes);
      fixture::unmap({region});
      CHECK_EQ(device.stats().condemned_bytes, 0u);
      fixture::destroy(region);
      device.close();
      if (down == TP_OK && up == TP_OK) break;
    }
  }
}
