// Structural calls wait for copies, copies refuse what is gone, and nothing races. Most telling under the thread sanitizer.
#include <atomic>
#include <chrono>
#include <thread>

#include "fixture.h"

using fixture::Bytes;
using fixture::pattern;

TEST(threads_copy_while_regions_sleep_and_wake) {
  fixture::Device device;
  tp_region *moving = device.region(64, 0, "moving"), *still = device.region(64, 0, "still");
  const uint64_t from = fixture::stats(still).address, to = fixture::stats(moving).address, bytes = 64 * device.granule;
  const Bytes data = pattern(bytes, 1);
  device.write(from, data);
  std::atomic<bool> stop{false};
  std::atomic<int> copied{0}, refused{0}, wrong{0};
  std::vector<std::thread> copiers;
  for (uint64_t i = 0; i < 4; ++i) {
    copiers.emplace_back([&, i] {
      const tp_span span{to + i * bytes / 4, from, bytes / 4};  // each its own part
      uint64_t hash = 0;
      while (!stop) {
        const tp_status status = tp_copy(device.handle, TP_COPY_DEVICE, &span, 1, 2, nullptr);
        ++(status == TP_OK ? copied : status == TP_STATE ? refused : wrong);
        if (tp_hash(device.handle, from, 4096, 4096, 0, &hash, 1, nullptr) != TP_OK) ++wrong;
        tp_device_stats stats{};
        tp_region_stats region_stats{};
        tp_device_get_stats(device.handle, &stats, nullptr);
        tp_region_get_stats(moving, &region_stats, nullptr);
      }
    });
  }
  for (int round = 0; round < 40 || copied == 0 || refused == 0; ++round) {
    fixture::unmap({moving});
    fixture::map({moving});
    if (round % 4 == 0) std::this_thread::yield();
    CHECK(round < 100000);
  }
  stop = true;
  for (std::thread &copier : copiers) copier.join();
  CHECK_EQ(wrong.load(), 0);
  fixture::destroy(moving);
  fixture::destroy(still);
  device.close();
}

TEST(threads_create_and_destroy_beside_each_other) {
  fixture::Device device;
  std::vector<std::thread> workers;
  std::atomic<int> wrong{0};
  for (int i = 0; i < 4; ++i) {
    workers.emplace_back([&, i] {
      for (int round = 0; round < 25; ++round) {
        try {
          tp_region *region = device.region(static_cast<uint64_t>(i) + 1);
          tp_arena *arena = nullptr;
          uint64_t address = 0;
          OK(tp_arena_create(device.handle, 1 << 16, &arena, &address, &err));
          OK(tp_arena_commit(arena, 0, 1 << 16, 2, &err));
          fixture::unmap({region});
          fixture::map({region});
          device.write(fixture::stats(region).address, Bytes(100, 1));
          OK(tp_arena_destroy(arena, &err));
          fixture::destroy(region);
        } catch (const std::exception &) {
          ++wrong;
        }
      }
    });
  }
  for (std::thread &worker : workers) worker.join();
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(device.stats().reserved_bytes, 0u);
  device.close();
}

// Whoever unmaps waits for pins with the structure locked: a wake must not wait for that lock with pins.
TEST(threads_wake_beside_an_unmap_of_what_it_only_restores) {
  fixture::Device device;
  tp_region *stays = device.region(4), *wakes = device.region(4);
  const fixture::Arena arena(device, 4 * device.granule);
  OK(tp_arena_commit(arena.handle, 0, 4 * device.granule, 1, &err));
  const uint64_t chunk = 8192, count = 4 * device.granule / chunk;
  std::vector<uint8_t> wanted(count, 1), valid(count, 1);
  std::vector<uint64_t> known(count), source(count), checked(count);
  std::atomic<bool> stop{false};
  std::atomic<int> stuck{0};
  std::thread other([&] {
    while (!stop) {
      uint64_t done = 0;
      stuck += tp_regions_unmap(&stays, 1, &done, nullptr) != TP_OK;
      tp_regions_map(&stays, 1, nullptr);
    }
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1500);
  while (std::chrono::steady_clock::now() < end && stuck == 0) {
    uint64_t done = 0;
    tp_regions_unmap(&wakes, 1, &done, nullptr);
    const tp_image image{fixture::stats(stays).address, arena.address, 4 * device.granule, wanted.data(), valid.data(), known.data(),
                         source.data(), checked.data()};
    tp_wake(device.handle, &wakes, 1, &image, 1, chunk, 1, nullptr, nullptr, nullptr);
  }
  stop = true;
  other.join();
  fixture::destroy(stays);
  fixture::destroy(wakes);
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
  CHECK_EQ(stuck.load(), 0);
}
