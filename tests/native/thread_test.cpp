// Structural calls wait for copies, copies refuse what is gone, and nothing races. Most telling under the thread sanitizer.
#include <atomic>
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
