// tp_wake where memory is short, on the stand-in for the CUDA driver: it has a size.
#include "fake_cuda.h"
#include "fixture.h"

namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;  // nothing touches it

tp_region *large(const fixture::Device &device, uint64_t bytes) {
  tp_region *out = nullptr;
  OK(tp_region_create(device.handle, bytes, kGiB, 0, "large", &out, &err));
  return out;
}

uint64_t free_bytes(const fixture::Device &device) {
  uint64_t out = 0;
  OK(tp_device_free_bytes(device.handle, &out, &err));
  return out;
}

}  // namespace

// What a neighbour took meanwhile is missing; what the wake itself had created before it failed is not.
TEST(m5_a_wake_that_finds_too_little_says_what_was_free) {
  if (fake_cuda::created() < 0) throw check::Skip("needs the stand-in for the CUDA driver");
  fixture::Device device;
  tp_region *sleeper = large(device, 4 * kGiB);
  fixture::unmap({sleeper});
  tp_region *neighbour = large(device, 6 * kGiB);
  const uint64_t free = free_bytes(device);
  tp_error error{};
  CHECK_EQ(tp_wake(device.handle, &sleeper, 1, nullptr, 0, 4096, 1, nullptr, nullptr, &error), TP_DEVICE_MEMORY);
  CHECK_EQ(error.bytes_needed, 4 * kGiB);
  CHECK_EQ(error.bytes_free, free);
  CHECK_EQ(free_bytes(device), free);
  CHECK_EQ(tp_regions_map(&sleeper, 1, &error), TP_DEVICE_MEMORY);
  CHECK_EQ(error.bytes_free, free);
  fixture::destroy(neighbour);
  fixture::destroy(sleeper);
  device.close();
}

// A device takes memory of its own for the tables that lead to what is mapped.
TEST(m5_a_wake_that_finds_no_memory_for_its_maps_says_what_was_free) {
  if (fake_cuda::created() < 0) throw check::Skip("needs the stand-in for the CUDA driver");
  fixture::Device device;
  tp_region *sleeper = large(device, 4 * kGiB);
  fixture::unmap({sleeper});
  const uint64_t free = free_bytes(device);
  for (const bool at_once : {true, false}) {
    fake_cuda::refuse("cuMemSetAccess", 1, fake_cuda::kNoMemory);
    tp_error error{};
    const tp_status status = at_once ? tp_regions_map(&sleeper, 1, &error)
                                     : tp_wake(device.handle, &sleeper, 1, nullptr, 0, 4096, 1, nullptr, nullptr, &error);
    CHECK(fake_cuda::refused());
    CHECK_EQ(status, TP_DEVICE_MEMORY);
    CHECK_EQ(error.bytes_needed, 4 * kGiB);
    CHECK_EQ(error.bytes_free, free);
    CHECK_EQ(free_bytes(device), free);
  }
  fixture::map({sleeper});
  fixture::destroy(sleeper);
  device.close();
}

// -1 without its sign is a number of threads too.
TEST(a_save_is_a_save_with_any_number_of_threads) {
  fixture::Device device;
  tp_region *region = device.region(1);
  const fixture::Arena arena(device, device.granule);
  OK(tp_arena_commit(arena.handle, 0, device.granule, 1, &err));
  device.write(fixture::stats(region).address, fixture::pattern(device.granule, 4));
  uint8_t wanted = 1, valid = 0;
  uint64_t known = 0, source = 0, checked = 0;
  const tp_image image{fixture::stats(region).address, arena.address, device.granule, &wanted, &valid, &known, &source, &checked};
  OK(tp_save(device.handle, &image, 1, device.granule, UINT32_MAX, &err));
  CHECK(source != 0);
  CHECK_EQ(checked, source);
  OK(tp_arena_destroy(arena.handle, &err));
  fixture::destroy(region);
  device.close();
}
