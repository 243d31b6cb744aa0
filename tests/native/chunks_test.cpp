// tp_save and tp_restore: what is copied, what is passed over, and what the flags and hashes say, on every driver.
#include "fake_cuda.h"
#include "fixture.h"
#include "hash.h"

using namespace torpor;
using fixture::Bytes;
using fixture::pattern;

namespace {

constexpr uint64_t kChunk = 4096;

// A region, an image for it in an arena, and one flag and hash per chunk. The last chunk is shorter.
struct World {
  fixture::Device device;
  uint64_t bytes, count, address, image = 0;
  tp_region *region;
  tp_arena *arena = nullptr;
  Bytes content;
  std::vector<uint8_t> wanted, valid;
  std::vector<uint64_t> known, source, copied;

  explicit World(uint64_t chunks = 40) : bytes(chunks * kChunk - 96), count(chunks) {
    region = device.region((bytes + device.granule - 1) / device.granule);
    address = fixture::stats(region).address;
    OK(tp_arena_create(device.handle, bytes, &arena, &image, &err));
    OK(tp_arena_commit(arena, 0, bytes, 2, &err));
    wanted.assign(count, 1), valid.assign(count, 0);
    known.assign(count, 0), source.assign(count, 0), copied.assign(count, 0);
    fill(3);
  }
  void fill(uint64_t seed) {
    content = pattern(bytes, seed);
    device.write(address, content);
  }
  void change(uint64_t chunk) {
    content[chunk * kChunk + 5] ^= 0xFF;
    device.write(address, content);
  }
  uint64_t hash_of(uint64_t chunk) const {
    const uint64_t offset = chunk * kChunk;
    return hash_chunk(content.data() + offset, std::min(kChunk, bytes - offset));
  }
  tp_image as_image() {
    return {address, image, bytes, wanted.data(), valid.data(), known.data(), source.data(), copied.data()};
  }
  tp_status save(uint32_t threads = 2) {
    const tp_image one = as_image();
    return tp_save(device.handle, &one, 1, kChunk, threads, nullptr);
  }
  // The hashes of what arrived are in `copied`.
  tp_status restore(uint32_t threads = 2) {
    std::fill(copied.begin(), copied.end(), 0);
    const tp_image one = as_image();
    return tp_restore(device.handle, &one, 1, kChunk, threads, nullptr);
  }
  tp_status wake(const std::vector<tp_region *> &regions, uint32_t threads = 2) {
    std::fill(copied.begin(), copied.end(), 0);
    const tp_image one = as_image();
    return tp_wake(device.handle, regions.data(), regions.size(), &one, 1, kChunk, threads, &told, this, nullptr);
  }
  // The regions of a wake are mapped.
  static void told(void *world) { ++static_cast<World *>(world)->times_told; }
  int times_told = 0;
  // What the caller does with the answer.
  void believe() {
    for (uint64_t i = 0; i < count; ++i) {
      if (wanted[i] == 0 || valid[i] != 0) continue;
      CHECK_EQ(copied[i], source[i]);
      known[i] = source[i], valid[i] = 1;
    }
  }
  Bytes held() const {
    const auto *at = reinterpret_cast<const unsigned char *>(image);
    return {at, at + bytes};
  }
  uint64_t saved_now() {
    CHECK_EQ(save(), TP_OK);
    uint64_t copies = 0;
    for (uint64_t i = 0; i < count; ++i) copies += valid[i] == 0 ? 1 : 0;
    believe();
    return copies;
  }
  void close() {
    OK(tp_arena_destroy(arena, &err));
    fixture::destroy(region);
    device.close();
  }
};

bool kernels_run(const fixture::Device &device) {
  char text[64] = {};
  OK(tp_hash_path(device.handle, text, sizeof text, &err));
  return std::strncmp(text, "kernel", 6) == 0;
}

}  // namespace

TEST(chunks_of_a_first_save_are_all_copied_and_proved) {
  World world;
  CHECK_EQ(world.saved_now(), world.count);
  CHECK(world.held() == world.content);
  for (uint64_t i = 0; i < world.count; ++i) CHECK_EQ(world.known[i], world.hash_of(i));
  world.close();
}

TEST(chunks_that_did_not_change_are_not_copied) {
  World world;
  world.saved_now();
  CHECK_EQ(world.saved_now(), 0u);
  world.change(7);
  world.change(world.count - 1);
  CHECK_EQ(world.saved_now(), 2u);
  CHECK(world.held() == world.content);
  world.close();
}

// Many changes in a row are copied unasked; every chunk is right whatever was guessed, and the guessing ends.
TEST(chunks_after_a_run_of_changes_are_right) {
  World world(200);
  world.saved_now();
  for (uint64_t i = 0; i < 50; ++i) world.change(i);
  CHECK(world.saved_now() >= 50);
  CHECK(world.held() == world.content);
  for (uint64_t i = 0; i < world.count; ++i) CHECK_EQ(world.known[i], world.hash_of(i));
  CHECK_EQ(world.saved_now(), 0u);
  world.fill(9);
  CHECK_EQ(world.saved_now(), world.count);
  CHECK(world.held() == world.content);
  world.close();
}

// On a GPU, chunks are hashed in slices while those before are copied: wherever a change lies, it is found, and nothing else is.
TEST(chunks_of_many_slices_are_copied_where_they_changed) {
  World world(700);
  CHECK_EQ(world.saved_now(), world.count);
  for (const std::vector<uint64_t> &changed :
       {std::vector<uint64_t>{0, 255, 256, 257, 300, 511, 512, 699}, {256}, {600, 601}, {}, {1, 2, 3, 698}}) {
    for (const uint64_t chunk : changed) world.change(chunk);
    CHECK_EQ(world.saved_now(), changed.size());
    CHECK(world.held() == world.content);
    for (uint64_t i = 0; i < world.count; ++i) CHECK_EQ(world.known[i], world.hash_of(i));
  }
  world.close();
}

// Several processors share a large chunk's check.
TEST(chunks_of_more_than_one_part_are_checked_whole) {
  constexpr uint64_t kLarge = 160 * kChunk;
  World world(400);
  const tp_image one = world.as_image();
  OK(tp_save(world.device.handle, &one, 1, kLarge, 3, &err));
  CHECK(world.held() == world.content);
  for (uint64_t i = 0, offset = 0; offset < world.bytes; ++i, offset += kLarge) {
    const uint64_t hash = hash_chunk(world.content.data() + offset, std::min(kLarge, world.bytes - offset));
    CHECK_EQ(world.source[i], hash);
    CHECK_EQ(world.copied[i], hash);
  }
  world.close();
}

TEST(chunks_that_are_not_wanted_are_left_alone) {
  World world;
  world.saved_now();
  const Bytes before = world.held();
  world.fill(4);
  world.wanted.assign(world.count, 0);
  world.wanted[3] = 1;
  CHECK_EQ(world.save(), TP_OK);
  CHECK_EQ(int{world.valid[3]}, 0);
  CHECK_EQ(int{world.valid[4]}, 1);
  const Bytes after = world.held();
  CHECK(std::equal(after.begin(), after.begin() + 3 * kChunk, before.begin()));
  CHECK(std::equal(after.begin() + 4 * kChunk, after.end(), before.begin() + 4 * kChunk));
  CHECK(std::memcmp(after.data() + 3 * kChunk, world.content.data() + 3 * kChunk, kChunk) == 0);
  world.close();
}

// A chunk that may be half overwritten is not valid, whichever call failed; what was not touched still is.
TEST(chunks_of_a_failed_save_are_not_believed) {
  for (const tp_op op : {TP_OP_COPY, TP_OP_HASH}) {
    for (uint64_t nth = 1;; ++nth) {
      World world(12);
      world.saved_now();
      for (uint64_t i = 2; i < 5; ++i) world.change(i);
      const Bytes wanted = world.content;
      world.device.arm(op, nth);
      const tp_status status = world.save(1);
      world.device.clear();
      const Bytes held = world.held();
      for (uint64_t i = 0; i < world.count; ++i) {
        const uint64_t offset = i * kChunk;
        const uint64_t size = std::min(kChunk, world.bytes - offset);
        if (world.valid[i] != 0) CHECK_EQ(hash_chunk(held.data() + offset, size), world.known[i]);
      }
      CHECK(status == TP_OK || status == TP_DRIVER);
      CHECK_EQ(world.save(1), TP_OK);
      world.believe();
      CHECK(world.held() == wanted);
      world.close();
      if (status == TP_OK) break;
    }
  }
}

TEST(chunks_come_back_with_the_hash_of_what_arrived) {
  World world;
  world.saved_now();
  const Bytes wanted = world.content;
  fixture::unmap({world.region});
  CHECK_EQ(world.restore(), TP_STATE);
  fixture::map({world.region});
  CHECK_EQ(world.restore(), TP_OK);
  for (uint64_t i = 0; i < world.count; ++i) CHECK_EQ(world.copied[i], world.hash_of(i));
  CHECK(world.device.read(world.address, world.bytes) == wanted);
  world.device.arm(TP_OP_COPY, 1);
  CHECK_EQ(world.restore(), TP_DRIVER);
  world.device.clear();
  world.close();
}

TEST(chunks_come_back_while_memory_is_created) {
  World world;
  tp_region *other = world.device.region(3);
  world.saved_now();
  fixture::unmap({world.region, other});
  CHECK_EQ(world.wake({world.region, other}), TP_OK);
  CHECK_EQ(world.times_told, 1);
  CHECK_EQ(fixture::stats(world.region).mapped + fixture::stats(other).mapped, 2);
  CHECK(world.copied == world.known);
  CHECK(world.device.read(world.address, world.bytes) == world.content);
  CHECK_EQ(world.wake({world.region, other}), TP_OK);  // all is mapped already
  CHECK(world.copied == world.known);
  fixture::unmap({other});
  CHECK_EQ(world.wake({other}), TP_OK);  // the one that is restored is not
  CHECK(world.copied == world.known);
  fixture::destroy(other);
  world.close();
}

// Whatever the driver refuses, once or for good, an unmap leads back, and the next attempt succeeds.
TEST(chunks_come_back_after_a_wake_that_failed) {
  for (const tp_op op : {TP_OP_CREATE, TP_OP_MAP, TP_OP_SET_ACCESS, TP_OP_COPY, TP_OP_HASH}) {
    for (uint64_t nth = 1;; ++nth) {
      World world;
      tp_region *other = world.device.region(2);
      world.saved_now();
      fixture::unmap({world.region, other});
      world.device.arm(op, nth);
      const tp_status status = world.wake({world.region, other});
      world.device.clear();
      const int mapped = fixture::stats(world.region).mapped + fixture::stats(other).mapped;
      if (status != TP_OK && op != TP_OP_COPY && op != TP_OP_HASH) CHECK_EQ(mapped + world.times_told, 0);
      fixture::unmap({world.region, other});
      CHECK_EQ(world.wake({world.region, other}), TP_OK);
      CHECK(world.copied == world.known);
      CHECK(world.device.read(world.address, world.bytes) == world.content);
      fixture::destroy(other);
      world.close();
      if (status == TP_OK) break;
    }
  }
}

TEST(chunks_of_several_regions_go_in_one_call) {
  World world;
  tp_region *other = world.device.region(2);
  const uint64_t bytes = 2 * world.device.granule, count = bytes / kChunk;
  tp_arena *arena = nullptr;
  uint64_t image = 0;
  OK(tp_arena_create(world.device.handle, bytes, &arena, &image, &err));
  OK(tp_arena_commit(arena, 0, bytes, 2, &err));
  const Bytes content = pattern(bytes, 8);
  world.device.write(fixture::stats(other).address, content);
  std::vector<uint8_t> wanted(count, 1), valid(count, 0);
  std::vector<uint64_t> known(count, 0), source(count, 0), checked(count, 0);
  wanted[1] = 0;
  const tp_image both[] = {world.as_image(), {fixture::stats(other).address, image, bytes, wanted.data(), valid.data(), known.data(),
                                              source.data(), checked.data()}};
  OK(tp_save(world.device.handle, both, 2, kChunk, 3, &err));
  CHECK(world.held() == world.content);
  CHECK(std::memcmp(reinterpret_cast<void *>(image), content.data(), kChunk) == 0);
  CHECK_EQ(source[1], 0u);
  for (uint64_t i = 2; i < count; ++i) CHECK_EQ(checked[i], hash_chunk(content.data() + i * kChunk, kChunk));
  OK(tp_arena_destroy(arena, &err));
  fixture::destroy(other);
  world.close();
}

// Three regions and their images, each next to the other where the driver places them so: the stand-in does, and a GPU's.
struct Neighbours {
  fixture::Device device;
  const uint64_t each = 2 * device.granule, count = each / kChunk;
  tp_region *regions[3] = {device.region(2), device.region(2), device.region(2)};
  tp_arena *arena = nullptr;
  Bytes content = pattern(3 * each, 21);
  std::vector<uint8_t> wanted = std::vector<uint8_t>(count, 1), valid = std::vector<uint8_t>(count, 0);
  std::vector<std::vector<uint64_t>> numbers = std::vector<std::vector<uint64_t>>(9, std::vector<uint64_t>(count, 0));
  std::vector<tp_image> images;

  Neighbours() {
    uint64_t host = 0;
    OK(tp_arena_create(device.handle, 3 * each, &arena, &host, &err));
    OK(tp_arena_commit(arena, 0, 3 * each, 2, &err));
    for (uint64_t i = 0; i < 3; ++i) {
      const uint64_t at = fixture::stats(regions[i]).address;
      device.write(at, part(i));
      images.push_back({at, host + i * each, each, wanted.data(), valid.data(), numbers[3 * i].data(), numbers[3 * i + 1].data(),
                        numbers[3 * i + 2].data()});
    }
    if (fake_cuda::pulls() >= 0) CHECK_EQ(fixture::stats(regions[0]).address + 2 * each, fixture::stats(regions[2]).address);
    CHECK_EQ(save(), TP_OK);
    sleep();
  }
  tp_status save() {
    std::fill(valid.begin(), valid.end(), 0);
    return tp_save(device.handle, images.data(), 3, kChunk, 2, nullptr);
  }
  Bytes part(uint64_t i) const {
    const auto start = content.begin() + static_cast<int64_t>(i * each);
    return {start, start + static_cast<int64_t>(each)};
  }
  void sleep() const { fixture::unmap({regions[0], regions[1], regions[2]}); }
  tp_status wake(std::vector<uint64_t> order) const {
    std::vector<tp_region *> ordered;
    for (const uint64_t i : order) ordered.push_back(regions[i]);
    return tp_wake(device.handle, ordered.data(), 3, images.data(), 3, kChunk, 2, nullptr, nullptr, nullptr);
  }
  void check() const {
    for (uint64_t i = 0; i < 3; ++i) {
      CHECK(device.read(fixture::stats(regions[i]).address, each) == part(i));
      CHECK(numbers[3 * i + 1] == numbers[3 * i + 2]);
    }
  }
  void close() {
    OK(tp_arena_destroy(arena, &err));
    for (tp_region *region : regions) fixture::destroy(region);
    device.close();
  }
};

// What is copied in long stretches waits for each region's memory, and no copy crosses the border of two.
TEST(chunks_of_regions_that_touch_come_back_in_one_wake) {
  Neighbours row;
  for (const auto &order : {std::vector<uint64_t>{0, 1, 2}, {2, 1, 0}, {1, 2, 0}}) {
    CHECK_EQ(row.wake(order), TP_OK);
    row.check();
    row.sleep();
  }
  row.close();
}

// Whichever call fails, the wake ends, and leaves what the next one needs.
TEST(chunks_of_regions_that_touch_come_back_after_a_wake_that_failed) {
  for (const tp_op op : {TP_OP_CREATE, TP_OP_MAP, TP_OP_SET_ACCESS, TP_OP_COPY, TP_OP_HASH}) {
    Neighbours row;
    for (uint64_t nth = 1;; ++nth) {
      row.device.arm(op, nth);
      const tp_status status = row.wake({0, 1, 2});
      row.device.clear();
      if (status == TP_OK) break;
      CHECK(status == TP_DRIVER || status == TP_DEVICE_MEMORY);
      row.sleep();
    }
    row.sleep();
    CHECK_EQ(row.wake({0, 1, 2}), TP_OK);
    row.check();
    row.close();
  }
}

// Below the faults that tests inject is the driver itself: whichever of its calls fails, a wake and a save end and can be repeated.
TEST(chunks_are_waited_for_by_nobody_when_a_call_of_the_driver_fails) {
  if (fake_cuda::pulls() < 0) throw check::Skip("needs the stand-in for the CUDA driver");
  for (const char *call : {"cuCtxPushCurrent_v2", "cuStreamCreate", "cuStreamSynchronize", "cuStreamWaitEvent", "cuEventCreate",
                           "cuEventRecord", "cuEventSynchronize", "cuLaunchKernel", "cuMemHostAlloc", "cuMemcpyHtoDAsync_v2",
                           "cuMemcpyDtoHAsync_v2", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"}) {
    Neighbours row;
    bool reached = true;
    for (int64_t nth = 1; reached; ++nth) {
      fake_cuda::refuse(call, nth);
      row.wake({0, 1, 2});
      reached = fake_cuda::refused();
      row.sleep();
    }
    CHECK_EQ(row.wake({0, 1, 2}), TP_OK);
    row.check();
    reached = true;
    for (int64_t nth = 1; reached; ++nth) {
      fake_cuda::refuse(call, nth);
      row.save();
      reached = fake_cuda::refused();
    }
    CHECK_EQ(row.save(), TP_OK);
    row.check();
    row.close();
  }
}

// Milliseconds after much was released the copy engines are busy with clearing it: a kernel takes part, and the bytes are the same.
TEST(chunks_are_pulled_while_released_memory_is_cleared) {
  if (fake_cuda::pulls() < 0) throw check::Skip("needs the stand-in for the CUDA driver");
  World world;
  world.saved_now();
  fixture::unmap({world.region});
  CHECK_EQ(world.wake({world.region}), TP_OK);
  const int64_t before = fake_cuda::pulls();
  constexpr uint64_t kMuch = uint64_t{4} << 30;  // nothing touches it
  tp_region *much = nullptr;
  OK(tp_region_create(world.device.handle, kMuch, kMuch / 4, 0, "much", &much, &err));
  fixture::unmap({world.region});
  fixture::destroy(much);
  CHECK_EQ(world.wake({world.region}), TP_OK);
  if (kernels_run(world.device)) CHECK(fake_cuda::pulls() > before);
  CHECK(world.copied == world.known);
  CHECK(world.device.read(world.address, world.bytes) == world.content);
  world.close();
}

// The driver page-locks each commit for itself, and no copy may cross the border of two.
TEST(chunks_go_to_images_that_were_committed_in_parts) {
  World world;
  OK(tp_arena_decommit(world.arena, 0, (world.bytes + 4095) / 4096 * 4096, &err));
  for (uint64_t offset = 0; offset < world.bytes; offset += 3 * kChunk) {
    OK(tp_arena_commit(world.arena, offset, std::min(3 * kChunk, world.bytes - offset), 1, &err));
  }
  CHECK_EQ(world.saved_now(), world.count);
  CHECK(world.held() == world.content);
  fixture::unmap({world.region});
  fixture::map({world.region});
  CHECK_EQ(world.restore(), TP_OK);
  CHECK(world.copied == world.known);
  const Bytes other = pattern(world.bytes, 11);
  const tp_span span{world.image, world.address, world.bytes};
  world.device.write(world.address, other);
  OK(tp_copy(world.device.handle, TP_COPY_TO_HOST, &span, 1, 2, &err));
  CHECK(world.held() == other);
  world.close();
}

TEST(chunks_hash_path_is_said) {
  fixture::Device device;
  char text[64] = {};
  OK(tp_hash_path(device.handle, text, sizeof text, &err));
  CHECK(std::strlen(text) > 0);
  CHECK_STATUS(tp_hash_path(device.handle, text, 0, &err), TP_INVALID);
  OK(tp_hash_path(device.handle, text, 4, &err));
  CHECK_EQ(std::strlen(text), 3u);
  device.close();
}

TEST(chunks_where_there_is_no_memory_are_refused) {
  World world;
  OK(tp_arena_decommit(world.arena, 0, 8 * kChunk, &err));
  CHECK_EQ(world.save(), TP_STATE);
  fixture::unmap({world.region});
  world.wanted.assign(world.count, 0);
  CHECK_EQ(world.save(), TP_OK);  // nothing is touched
  tp_image one = world.as_image();
  CHECK_STATUS(tp_save(world.device.handle, &one, 1, 12, 1, &err), TP_INVALID);
  CHECK_STATUS(tp_save(world.device.handle, nullptr, 1, kChunk, 1, &err), TP_INVALID);
  one.source = nullptr;
  CHECK_STATUS(tp_save(world.device.handle, &one, 1, kChunk, 1, &err), TP_INVALID);
  one.checked = nullptr;
  CHECK_STATUS(tp_restore(world.device.handle, &one, 1, kChunk, 1, &err), TP_INVALID);
  world.close();
}

TEST(threads_save_and_restore_beside_each_other) {
  World world(64);
  for (uint64_t seed = 1; seed < 6; ++seed) {
    CHECK_EQ(world.save(8), TP_OK);
    world.believe();
    CHECK(world.held() == world.content);
    CHECK_EQ(world.restore(8), TP_OK);
    CHECK(world.copied == world.known);
    world.fill(seed);
  }
  world.close();
}
