// Host memory that an arena takes before anybody asks for it: only a matter of time, whatever fails.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "child.h"
#include "fake_cuda.h"
#include "fixture.h"

using fixture::Arena;
using fixture::kMiB;

namespace {

tp_ahead progress(const Arena &arena) {
  tp_ahead out{};
  OK(tp_arena_get_ahead(arena.handle, &out, &err));
  return out;
}

// All of it is there, or it failed.
tp_ahead finished(const Arena &arena) {
  tp_ahead out = progress(arena);
  for (; out.active; out = progress(arena)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return out;
}

uint64_t end(const Arena &arena) {
  uint64_t unused = 0;
  OK(tp_arena_end_ahead(arena.handle, &unused, &err));
  return unused;
}

}  // namespace

TEST(ahead_memory_is_spare_until_it_is_committed) {
  fixture::Device device;
  const Arena arena(device, 64 * kMiB);
  OK(tp_arena_commit_ahead(arena.handle, 0, 5 * kMiB, 2 * kMiB, 2, &err));
  const tp_ahead taken = finished(arena);
  CHECK_EQ(taken.asked_bytes, 5 * kMiB);
  CHECK_EQ(taken.taken_bytes, 5 * kMiB);
  CHECK(taken.seconds > 0 && !taken.failed);
  CHECK_EQ(device.stats().spare_bytes, 5 * kMiB);
  CHECK_EQ(arena.committed(), 0u);
  const uint64_t calls = device.calls(TP_OP_COMMIT);
  OK(tp_arena_commit(arena.handle, kMiB, 2 * kMiB, 2, &err));  // across the border of two parts
  CHECK_EQ(device.calls(TP_OP_COMMIT), calls);
  CHECK_EQ(arena.committed(), 2 * kMiB);
  CHECK_EQ(device.stats().spare_bytes, 3 * kMiB);
  std::memset(arena.at(kMiB), 7, 2 * kMiB);
  CHECK_EQ(end(arena), 3 * kMiB);
  CHECK_EQ(device.stats().spare_bytes, 0u);
  CHECK_EQ(arena.committed(), 2 * kMiB);
  CHECK_EQ(*arena.at(3 * kMiB - 1), 7);
  CHECK_EQ(end(arena), 0u);
  OK(tp_arena_destroy(arena.handle, &err));
  CHECK_EQ(device.stats().committed_bytes, 0u);
  device.close();
}

TEST(ahead_memory_that_nobody_committed_cannot_be_copied_to) {
  fixture::Device device;
  const Arena arena(device, 64 * kMiB);
  tp_region *region = device.region(1);
  OK(tp_arena_commit_ahead(arena.handle, 0, kMiB, kMiB, 1, &err));
  finished(arena);
  const tp_span span{arena.address, fixture::stats(region).address, 4096};
  CHECK_STATUS(tp_copy(device.handle, TP_COPY_TO_HOST, &span, 1, 1, &err), TP_STATE);
  OK(tp_arena_commit(arena.handle, 0, 4096, 1, &err));
  OK(tp_copy(device.handle, TP_COPY_TO_HOST, &span, 1, 1, &err));
  fixture::destroy(region);
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
}

TEST(ahead_a_commit_waits_for_its_own_and_takes_what_lies_beyond) {
  fixture::Device device;
  const Arena arena(device, 256 * kMiB);
  OK(tp_arena_commit_ahead(arena.handle, 4 * kMiB, 60 * kMiB, kMiB, 1, &err));
  OK(tp_arena_commit(arena.handle, 0, 80 * kMiB, 1, &err));  // on both sides too
  std::memset(arena.at(0), 1, 80 * kMiB);
  CHECK_EQ(arena.committed(), 80 * kMiB);
  CHECK_EQ(progress(arena).taken_bytes, 60 * kMiB);
  CHECK_EQ(end(arena), 0u);
  CHECK_EQ(*arena.at(80 * kMiB - 1), 1);
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
}

TEST(ahead_that_fails_is_no_failure_of_who_commits) {
  fixture::Device device;
  const Arena arena(device, 64 * kMiB);
  const uint64_t before = device.calls(TP_OP_COMMIT);
  device.arm(TP_OP_COMMIT, 3, 1000);
  OK(tp_arena_commit_ahead(arena.handle, 0, 8 * kMiB, kMiB, 1, &err));
  const tp_ahead taken = finished(arena);
  CHECK(taken.failed);
  CHECK_EQ(taken.failure.status, TP_HOST_MEMORY);
  CHECK_EQ(taken.taken_bytes, 2 * kMiB);
  CHECK(device.calls(TP_OP_COMMIT) <= before + 4);  // each lane hears of it at its own failure at the latest
  CHECK_EQ(device.stats().spare_bytes, taken.taken_bytes);
  device.clear();
  OK(tp_arena_commit(arena.handle, 0, 8 * kMiB, 1, &err));
  std::memset(arena.at(0), 1, 8 * kMiB);
  CHECK_EQ(arena.committed(), 8 * kMiB);
  CHECK_EQ(end(arena), 0u);
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
}

TEST(ahead_a_commit_that_fails_leaves_what_was_taken) {
  fixture::Device device;
  const Arena arena(device, 64 * kMiB);
  OK(tp_arena_commit_ahead(arena.handle, 0, 2 * kMiB, kMiB, 1, &err));
  finished(arena);
  device.arm(TP_OP_COMMIT, 1);
  CHECK_STATUS(tp_arena_commit(arena.handle, 0, 4 * kMiB, 1, &err), TP_HOST_MEMORY);
  CHECK_EQ(arena.committed(), 0u);
  CHECK_EQ(device.stats().spare_bytes, 2 * kMiB);
  CHECK_EQ(end(arena), 2 * kMiB);
  OK(tp_arena_commit(arena.handle, 0, 4 * kMiB, 1, &err));
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
}

TEST(ahead_refuses_what_cannot_be) {
  fixture::Device device;
  const Arena arena(device, fixture::kTooMuch);
  tp_error error{};
  CHECK_EQ(tp_arena_commit_ahead(arena.handle, 0, fixture::kTooMuch, kMiB, 1, &error), TP_HOST_MEMORY);
  CHECK_EQ(error.bytes_needed, fixture::kTooMuch);
  CHECK(!progress(arena).active);  // and not a part of it was begun
  CHECK_EQ(device.calls(TP_OP_COMMIT), 0u);
  CHECK_STATUS(tp_arena_commit_ahead(arena.handle, kMiB, fixture::kTooMuch, kMiB, 1, &err), TP_INVALID);
  CHECK_STATUS(tp_arena_commit_ahead(arena.handle, 0, kMiB, 0, 1, &err), TP_INVALID);
  CHECK_STATUS(tp_arena_commit_ahead(arena.handle, 0, kMiB, 5000, 1, &err), TP_INVALID);
  OK(tp_arena_commit_ahead(arena.handle, 0, kMiB, kMiB, 1, &err));
  CHECK_STATUS(tp_arena_commit_ahead(arena.handle, 0, kMiB, kMiB, 1, &err), TP_STATE);
  end(arena);
  OK(tp_arena_commit_ahead(arena.handle, kMiB, kMiB, UINT64_MAX - 4095, 1, &err));  // in one part, however large
  CHECK_EQ(finished(arena).taken_bytes, kMiB);
  end(arena);
  OK(tp_arena_commit_ahead(arena.handle, 0, kMiB, kMiB, 1, &err));  // once more
  CHECK_EQ(finished(arena).taken_bytes, kMiB);
  OK(tp_arena_destroy(arena.handle, &err));
  CHECK_EQ(device.stats().spare_bytes, 0u);
  device.close();
}

TEST(ahead_passes_over_what_is_committed) {
  fixture::Device device;
  const Arena arena(device, 64 * kMiB);
  OK(tp_arena_commit(arena.handle, kMiB, kMiB, 1, &err));
  *arena.at(kMiB) = 3;
  OK(tp_arena_commit_ahead(arena.handle, 0, 3 * kMiB, 3 * kMiB, 1, &err));
  CHECK_EQ(finished(arena).taken_bytes, 2 * kMiB);
  CHECK_EQ(*arena.at(kMiB), 3);
  CHECK_EQ(end(arena), 2 * kMiB);
  CHECK_EQ(*arena.at(kMiB), 3);
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
}

TEST(ahead_a_file_takes_the_place_of_spare_memory) {
  fixture::Device device;
  const Arena arena(device, 64 * kMiB);
  const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK_EQ(ftruncate(fd, kMiB), 0);
  CHECK_EQ(pwrite(fd, "x", 1, 0), 1);
  CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW), 0);
  const int reader = open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC);
  close(fd);
  OK(tp_arena_commit_ahead(arena.handle, 0, 2 * kMiB, kMiB, 1, &err));
  OK(tp_arena_adopt(arena.handle, 0, kMiB, reader, 0, 1, &err));  // waits for its part
  close(reader);
  finished(arena);
  CHECK_EQ(*arena.at(0), 'x');
  CHECK_EQ(arena.committed(), kMiB);
  CHECK_EQ(device.stats().spare_bytes, kMiB);
  CHECK_EQ(end(arena), kMiB);
  CHECK_EQ(*arena.at(0), 'x');
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
}

TEST(ahead_ends_with_its_arena) {
  fixture::Device device;
  const Arena arena(device, 256 * kMiB);
  OK(tp_arena_commit_ahead(arena.handle, 0, 200 * kMiB, kMiB, 1, &err));
  while (progress(arena).taken_bytes == 0) std::this_thread::yield();
  OK(tp_arena_destroy(arena.handle, &err));  // in the middle of it
  CHECK_EQ(device.stats().spare_bytes, 0u);
  device.close();
}

// Spare memory and committed memory are page-locked together: one of them cannot go while the other is copied.
TEST(threads_ending_it_waits_for_copies_in_what_was_committed) {
  fixture::Device device;
  char path[64] = {};
  OK(tp_hash_path(device.handle, path, sizeof path, &err));
  if (path[0] == 's') throw check::Skip("needs kernels, to begin a copy to host memory");
  const Arena arena(device, 64 * kMiB);
  tp_region *region = device.region(1);
  OK(tp_arena_commit_ahead(arena.handle, 0, 2 * kMiB, 2 * kMiB, 1, &err));
  finished(arena);
  OK(tp_arena_commit(arena.handle, 0, kMiB, 1, &err));
  const uint64_t from = fixture::stats(region).address, id = 0;
  const tp_blocks blocks{&arena.address, &from, 1, 4096, &id, &id, 1, 1, 1};
  tp_block_copy *copy = nullptr;
  OK(tp_block_copy_begin(device.handle, &blocks, 1, &copy, &err));
  std::atomic<bool> ended{false};
  std::thread ender([&] {
    uint64_t unused = 0;
    tp_arena_end_ahead(arena.handle, &unused, nullptr);
    ended = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const bool early = ended;
  OK(tp_block_copy_end(copy, &err));
  ender.join();
  CHECK(!early);
  CHECK_EQ(device.stats().spare_bytes, 0u);
  fixture::destroy(region);
  OK(tp_arena_destroy(arena.handle, &err));
  device.close();
}

// A process that ends in the middle of it, as one that is interrupted while it starts: nobody page-locks any more by the time that the
// driver is taken down.
TEST(ahead_leaves_the_driver_before_the_process_ends) {
  if (fake_cuda::page_locked() < 0) throw check::Skip("needs the stand-in for the CUDA driver");
  if (!child::here()) {
    CHECK(child::ends("ahead_leaves_the_driver_before_the_process_ends"));
    return;
  }
  std::atexit([] {
    const int64_t locked = fake_cuda::page_locked();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    _exit(fake_cuda::page_locked() == locked ? 0 : 1);
  });
  auto *device = new fixture::Device;
  const Arena arena(*device, 512 * kMiB);
  OK(tp_arena_commit_ahead(arena.handle, 0, 512 * kMiB, 64 << 10, 1, &err));
  while (progress(arena).taken_bytes == 0) std::this_thread::yield();
  std::exit(0);
}

// While the lanes are at work, others commit, give back, copy, look, and end it.
TEST(threads_use_an_arena_that_takes_memory_ahead) {
  fixture::Device device;
  tp_region *region = device.region(1);
  const uint64_t from = fixture::stats(region).address;
  for (int round = 0; round < 8; ++round) {
    const Arena arena(device, 64 * kMiB);
    OK(tp_arena_commit_ahead(arena.handle, 0, 32 * kMiB, kMiB / 4, 2, &err));
    std::atomic<int> wrong{0};
    std::vector<std::thread> users;
    for (uint64_t i = 0; i < 4; ++i) {
      users.emplace_back([&, i] {
        for (uint64_t offset = i * 8 * kMiB; offset < (i + 1) * 8 * kMiB; offset += kMiB) {
          wrong += tp_arena_commit(arena.handle, offset, kMiB, 2, nullptr) != TP_OK;
          const tp_span span{arena.address + offset, from, 4096};
          const tp_status copied = tp_copy(device.handle, TP_COPY_TO_HOST, &span, 1, 1, nullptr);
          wrong += copied != TP_OK && copied != TP_STATE;  // others give back meanwhile, which refuses copies
          tp_ahead seen{};
          wrong += tp_arena_get_ahead(arena.handle, &seen, nullptr) != TP_OK;
          if (i % 2 != 0) wrong += tp_arena_decommit(arena.handle, offset, kMiB, nullptr) != TP_OK;
        }
      });
    }
    uint64_t unused = 0;
    if (round % 2 != 0) wrong += tp_arena_end_ahead(arena.handle, &unused, nullptr) != TP_OK;
    for (std::thread &user : users) user.join();
    CHECK_EQ(wrong.load(), 0);
    CHECK_EQ(device.stats().committed_bytes, 16 * kMiB);
    OK(tp_arena_destroy(arena.handle, &err));
    CHECK_EQ(device.stats().committed_bytes + device.stats().spare_bytes, 0u);
  }
  fixture::destroy(region);
  device.close();
}
