// M5 and M12: every driver call of a sleep, a wake and their neighbours fails once, twice, often, at every point. After each
// failure the regions are in a defined state, the same call can be repeated, mapped bytes are intact, and at the end nothing is left.
#include <unistd.h>

#include <functional>

#include "fake_cuda.h"
#include "fixture.h"

using fixture::Bytes;
using fixture::pattern;

namespace {

struct Held {
  tp_region *region;
  uint64_t address, bytes;
  Bytes content;
};

// Two regions and what happens to them, one driver call after the other.
class Scenario {
 public:
  explicit Scenario(uint64_t faults) : faults_(faults) {
    hold(device.region(3, TP_REGION_EXPORTABLE, "a"));
    hold(device.region(2, TP_REGION_GUARDED, "b"));
  }

  void run() {
    step([&] { return unmap(); });
    check_mapped(0);
    step([&] { return tp_regions_map(regions_.data(), 2, nullptr); });
    check_mapped(2);
    for (Held &held : held_) {
      held.content = pattern(held.bytes, ++seed_);
      const tp_span span{held.address, reinterpret_cast<uint64_t>(held.content.data()), held.bytes};
      const Bytes wanted = std::move(held.content);
      held.content.clear();  // what a copy that failed half way leaves is nobody's content
      step([&] { return tp_copy(device.handle, TP_COPY_TO_DEVICE, &span, 1, 2, nullptr); });
      held.content = wanted;
    }
    step([&] { return hash(); });
    step([&] { return create(); });
    step([&] { return import(); });
    step([&] { return tp_import_close(import_, nullptr); });
    step([&] { return tp_region_destroy(extra_, nullptr); });
    step([&] { return arena(); });
    step([&] { return arena_ahead(); });
  }

  void finish() {
    for (Held &held : held_) {
      step([&] {
        const tp_status status = tp_region_destroy(held.region, nullptr);
        if (status == TP_OK) held.region = nullptr;
        return status;
      });
    }
    device.clear();
    // What a failed create could not give back is tried again by whatever comes next.
    tp_region *last = device.region(1);
    fixture::destroy(last);
    const tp_device_stats stats = device.stats();
    CHECK_EQ(stats.live_regions + stats.live_extents + stats.live_imports + stats.live_arenas, 0u);
    CHECK_EQ(stats.reserved_bytes + stats.mapped_bytes + stats.condemned_bytes + stats.imported_bytes + stats.committed_bytes + stats.spare_bytes, 0u);
  }

  fixture::Device device;

 private:
  void hold(tp_region *region) {
    const tp_region_stats stats = fixture::stats(region);
    held_.push_back({region, stats.address, stats.bytes, pattern(stats.bytes, ++seed_)});
    device.write(stats.address, held_.back().content);
    regions_.push_back(region);
  }

  void step(const std::function<tp_status()> &call) {
    for (uint64_t tries = 0; call() != TP_OK; ++tries) {
      check_state();
      CHECK(tries <= faults_);
    }
    check_state();
  }

  tp_status unmap() {
    uint64_t done = 0;
    const tp_status status = tp_regions_unmap(regions_.data(), 2, &done, nullptr);
    uint64_t asleep = 0;
    for (const Held &held : held_) asleep += fixture::stats(held.region).mapped == 0;
    CHECK_EQ(done, asleep);
    return status;
  }

  tp_status hash() {
    uint64_t out = 0;
    return tp_hash(device.handle, held_[0].address, 4096, 4096, 0, &out, 1, nullptr);
  }

  tp_status create() {
    const uint64_t live = device.stats().live_regions;
    const tp_status status = tp_region_create(device.handle, 2 * device.granule, device.granule, 0, "extra", &extra_, nullptr);
    if (status != TP_OK) CHECK_EQ(device.stats().live_regions, live);
    return status;
  }

  tp_status import() {
    int32_t fds[3];
    uint64_t n = 0, address = 0;
    if (const tp_status status = tp_region_export(held_[0].region, fds, 3, &n, nullptr)) return status;
    const std::vector<uint64_t> sizes(3, device.granule);
    const tp_status status = tp_import_open(device.handle, fds, sizes.data(), 3, 1, &import_, &address, nullptr);
    for (int fd : fds) close(fd);
    return status;
  }

  tp_status arena() {
    tp_arena *arena = nullptr;
    uint64_t address = 0;
    tp_status status = tp_arena_create(device.handle, 1 << 20, &arena, &address, nullptr);
    if (status != TP_OK) return status;
    status = tp_arena_commit(arena, 0, 1 << 20, 1, nullptr);
    if (status != TP_OK) CHECK_EQ(device.stats().committed_bytes, 0u);
    OK(tp_arena_destroy(arena, &err));
    return status;
  }

  // What fails beside the caller is no failure of his.
  tp_status arena_ahead() {
    tp_arena *arena = nullptr;
    uint64_t address = 0, unused = 0;
    OK(tp_arena_create(device.handle, 4 << 20, &arena, &address, &err));
    OK(tp_arena_commit_ahead(arena, 0, 3 << 20, 1 << 20, 1, &err));
    const tp_status status = tp_arena_commit(arena, 0, 2 << 20, 1, nullptr);
    CHECK_EQ(device.stats().committed_bytes, status == TP_OK ? uint64_t{2} << 20 : 0u);
    OK(tp_arena_end_ahead(arena, &unused, &err));
    CHECK_EQ(device.stats().spare_bytes, 0u);
    OK(tp_arena_destroy(arena, &err));
    return status;
  }

  void check_mapped(int wanted) {
    int mapped = 0;
    for (const Held &held : held_) mapped += fixture::stats(held.region).mapped;
    CHECK_EQ(mapped, wanted);
    if (wanted == 0) {
      for (Held &held : held_) held.content.clear();
    }
  }

  // No third state, ever; addresses stay; what is mapped is whole, what is not cannot be read.
  void check_state() {
    uint64_t mapped = 0;
    for (Held &held : held_) {
      if (held.region == nullptr) continue;
      const tp_region_stats stats = fixture::stats(held.region);
      CHECK_EQ(stats.address, held.address);
      mapped += stats.mapped ? stats.bytes : 0;
      Bytes seen(held.bytes);
      const tp_span span{reinterpret_cast<uint64_t>(seen.data()), held.address, held.bytes};
      tp_status status = TP_DRIVER;
      for (uint64_t tries = 0; status == TP_DRIVER && tries <= faults_; ++tries) {
        status = tp_copy(device.handle, TP_COPY_TO_HOST, &span, 1, 1, nullptr);
      }
      CHECK_EQ(status, stats.mapped ? TP_OK : TP_STATE);
      if (stats.mapped && !held.content.empty()) CHECK(seen == held.content);
      if (!stats.mapped) held.content.clear();
      if (check::driver() == "host") check_kernel(stats);
    }
    const uint64_t extra = device.stats().mapped_bytes - mapped;
    CHECK(extra == 0 || extra == 2 * device.granule);
  }

  // The kernel says the same: a region that sleeps has nothing mapped but what the driver refused to take away.
  static void check_kernel(const tp_region_stats &stats) {
    const uint64_t there = fixture::file_bytes(stats.address, stats.bytes);
    if (stats.mapped) {
      CHECK_EQ(there, stats.bytes);
    } else {
      CHECK(there <= stats.condemned_bytes);
    }
  }

  uint64_t faults_;
  uint64_t seed_ = 0;
  std::vector<Held> held_;
  std::vector<tp_region *> regions_;
  tp_region *extra_ = nullptr;
  tp_import *import_ = nullptr;
};

void fail_everywhere(tp_op op, uint64_t count) {
  uint64_t points = 1;
  for (uint64_t nth = 1; nth <= points; ++nth) {
    const int descriptors = fixture::open_descriptors();
    Scenario scenario(count);
    const uint64_t before = scenario.device.calls(op);
    scenario.device.arm(op, nth, count);
    scenario.run();
    if (nth == 1) points = scenario.device.calls(op) - before;
    scenario.finish();
    scenario.device.close();
    if (check::driver() == "host") CHECK_EQ(fixture::open_descriptors(), descriptors);
    fake_cuda::check_nothing_left();
  }
  CHECK(points > 1 || op == TP_OP_COMMIT);
}

}  // namespace

#define FAULTS(op)                                   \
  TEST(fault_##op) {                                 \
    for (const uint64_t count : {1, 2, 3, 7}) fail_everywhere(op, count); \
  }
FAULTS(TP_OP_RESERVE)
FAULTS(TP_OP_FREE_ADDRESS)
FAULTS(TP_OP_CREATE)
FAULTS(TP_OP_RELEASE)
FAULTS(TP_OP_MAP)
FAULTS(TP_OP_SET_ACCESS)
FAULTS(TP_OP_UNMAP)
FAULTS(TP_OP_EXPORT)
FAULTS(TP_OP_IMPORT)
FAULTS(TP_OP_COPY)
FAULTS(TP_OP_HASH)
FAULTS(TP_OP_COMMIT)

// M5: the last extent of the second region cannot be had: nothing was mapped for the first.
TEST(fault_map_creates_everything_before_it_maps_anything) {
  fixture::Device device;
  tp_region *regions[] = {device.region(3), device.region(3)};
  fixture::unmap({regions[0], regions[1]});
  const uint64_t maps = device.calls(TP_OP_MAP), released = device.calls(TP_OP_RELEASE);
  device.arm(TP_OP_CREATE, 6);
  tp_error error{};
  CHECK_EQ(tp_regions_map(regions, 2, &error), TP_DEVICE_MEMORY);
  CHECK_EQ(error.bytes_needed, 6 * device.granule);
  CHECK(error.bytes_free > 0);
  CHECK_EQ(device.calls(TP_OP_MAP), maps);
  CHECK_EQ(device.calls(TP_OP_RELEASE), released + 5);
  CHECK_EQ(device.stats().mapped_bytes, 0u);
  fixture::map({regions[0], regions[1]});
  for (tp_region *region : regions) fixture::destroy(region);
  device.close();
}

// A release that fails leaves the region asleep and its memory condemned; the next call of any kind tries again.
TEST(fault_release_condemns) {
  fixture::Device device;
  tp_region *region = device.region(3);
  device.arm(TP_OP_RELEASE, 1, 2);
  uint64_t done = 0;
  CHECK_STATUS(tp_regions_unmap(&region, 1, &done, &err), TP_DRIVER);
  CHECK_EQ(done, 1u);
  CHECK_EQ(fixture::stats(region).mapped, 0);
  CHECK_EQ(fixture::stats(region).condemned_bytes, 2 * device.granule);
  CHECK_EQ(device.stats().condemned_bytes, 2 * device.granule);
  device.arm(TP_OP_RELEASE, 1);
  fixture::map({region});  // wakes although one release fails again
  CHECK_EQ(fixture::stats(region).condemned_bytes, device.granule);
  fixture::unmap({region});
  CHECK_EQ(device.stats().condemned_bytes, 0u);
  fixture::destroy(region);
  device.close();
}

// A creation that cannot be undone: the caller gets nothing, and the device itself goes on trying.
TEST(fault_creation_that_cannot_be_undone_is_tried_again) {
  fixture::Device device;
  tp_region *region = nullptr;
  device.arm(TP_OP_SET_ACCESS, 1);
  device.arm(TP_OP_UNMAP, 1, 2);
  CHECK_STATUS(tp_region_create(device.handle, 3 * device.granule, device.granule, 0, "r", &region, &err), TP_DRIVER);
  CHECK(region == nullptr);
  CHECK_EQ(device.stats().condemned_bytes, 3 * device.granule);
  CHECK_EQ(device.stats().reserved_bytes, 3 * device.granule);
  region = device.region(1);  // the second try to unmap fails too, and that is not this call's trouble
  CHECK_EQ(device.stats().condemned_bytes, 3 * device.granule);
  fixture::destroy(region);
  region = device.region(1);
  CHECK_EQ(device.stats().condemned_bytes, 0u);
  CHECK_EQ(device.stats().reserved_bytes, device.granule);
  fixture::destroy(region);
  device.close();
  fake_cuda::check_nothing_left();
}

// The worst: a wake fails, and so does its undoing. The region sleeps, its pages are condemned, and a later call clears it up.
TEST(fault_undo_that_fails_condemns) {
  fixture::Device device;
  tp_region *region = device.region(3);
  fixture::unmap({region});
  device.arm(TP_OP_SET_ACCESS, 1);
  device.arm(TP_OP_UNMAP, 1);
  CHECK_STATUS(tp_regions_map(&region, 1, &err), TP_DRIVER);
  CHECK_EQ(fixture::stats(region).mapped, 0);
  CHECK_EQ(fixture::stats(region).condemned_bytes, 3 * device.granule);
  device.arm(TP_OP_UNMAP, 1);
  CHECK_STATUS(tp_regions_map(&region, 1, &err), TP_DRIVER);  // still in the way
  CHECK_EQ(fixture::stats(region).mapped, 0);
  fixture::map({region});
  CHECK_EQ(device.stats().condemned_bytes, 0u);
  fixture::destroy(region);
  device.close();
}
