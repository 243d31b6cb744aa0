// Block copies that were only begun: what they lie in stays, and each ends once, whatever became of it.
#include <atomic>
#include <chrono>
#include <thread>

#include "device.h"
#include "fake_cuda.h"
#include "fixture.h"

using fixture::Bytes;
using fixture::pattern;

namespace {

constexpr uint64_t kBlock = 4096, kBlocks = 16;

// Two regions, and the even blocks of one to be copied to the same places of the other.
struct Scene {
  fixture::Device device;
  tp_region *from = device.region(kBlock * kBlocks / device.granule + 1), *to = device.region(kBlock * kBlocks / device.granule + 1);
  uint64_t src = fixture::stats(from).address, dst = fixture::stats(to).address;
  Bytes data = pattern(kBlock * kBlocks, 3);
  std::vector<uint64_t> ids;

  Scene() {
    for (uint64_t i = 0; i < kBlocks; i += 2) ids.push_back(i);
    device.write(src, data);
    clear();
  }
  void clear() { device.write(dst, Bytes(kBlock * kBlocks, 0)); }
  tp_status begin(tp_block_copy **out) {
    const tp_blocks blocks{&dst, &src, 1, kBlock, ids.data(), ids.data(), ids.size(), kBlocks, kBlocks};
    return tp_block_copy_begin(device.handle, &blocks, 1, out, nullptr);
  }
  void check_arrived() {
    Bytes expected(kBlock * kBlocks, 0);
    for (const uint64_t id : ids) std::copy_n(&data[id * kBlock], kBlock, &expected[id * kBlock]);
    CHECK(device.read(dst, expected.size()) == expected);
  }
  void close() {
    fixture::destroy(from);
    fixture::destroy(to);
    device.close();
  }
};

}  // namespace

TEST(block_copies_that_were_begun_end_in_any_order_and_on_any_thread) {
  Scene scene;
  tp_block_copy *first = nullptr, *second = nullptr;
  CHECK_EQ(scene.begin(&first), TP_OK);
  CHECK_EQ(scene.begin(&second), TP_OK);
  std::fill(scene.ids.begin(), scene.ids.end(), 1);  // the lists are the caller's again
  std::thread other([&] { CHECK_EQ(tp_block_copy_end(second, nullptr), TP_OK); });
  other.join();
  OK(tp_block_copy_end(first, &err));
  for (uint64_t i = 0; i < scene.ids.size(); ++i) scene.ids[i] = 2 * i;
  scene.check_arrived();
  scene.close();
}

TEST(threads_memory_stays_while_blocks_are_copied) {
  Scene scene;
  for (tp_region *region : {scene.from, scene.to}) {
    tp_block_copy *copy = nullptr;
    CHECK_EQ(scene.begin(&copy), TP_OK);
    std::atomic<bool> gone{false};
    std::thread sleeper([&] {
      fixture::unmap({region});
      gone = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const bool early = gone;
    const tp_status ended = tp_block_copy_end(copy, nullptr);
    sleeper.join();
    CHECK(!early);
    CHECK_EQ(ended, TP_OK);
    CHECK_EQ(scene.begin(&copy), TP_STATE);
    fixture::map({region});
  }
  scene.close();
}

// A device that counts no copies any more may be gone the moment after.
TEST(threads_a_block_copy_counts_until_it_has_let_go_of_the_device) {
  torpor::AccessTable table;
  std::atomic<uint64_t> counter{0};
  auto copy = std::make_unique<torpor::BlockCopy>(table, counter);
  std::thread ender;
  bool forgotten = false;
  table.change([&] {  // letting go of what is pinned waits for this
    ender = std::thread([&] { copy.reset(); });
    for (int i = 0; i < 20 && !forgotten; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      forgotten = counter == 0;
    }
  });
  ender.join();
  CHECK(!forgotten);
  CHECK_EQ(counter.load(), 0u);
}

// Blocks may lie in memory that the device knows nothing of, which pins nothing.
TEST(a_device_is_not_closed_while_blocks_are_copied) {
  Scene scene;
  tp_block_copy *copy = nullptr;
  const tp_blocks none{nullptr, nullptr, 0, kBlock, nullptr, nullptr, 0, 0, 0};
  OK(tp_block_copy_begin(scene.device.handle, &none, 1, &copy, &err));
  fixture::destroy(scene.from);
  fixture::destroy(scene.to);
  CHECK_STATUS(tp_device_close(scene.device.handle, &err), TP_STATE);
  OK(tp_block_copy_end(copy, &err));
  scene.device.close();
}

TEST(m12_a_block_copy_that_fails_leaves_nothing_pinned) {
  Scene scene;
  scene.device.arm(TP_OP_COPY, 1);
  tp_block_copy *copy = nullptr;
  CHECK_EQ(scene.begin(&copy), TP_DRIVER);
  CHECK(copy == nullptr);
  scene.device.clear();
  fixture::unmap({scene.from, scene.to});
  fixture::map({scene.from, scene.to});
  scene.device.write(scene.src, scene.data);
  for (const char *call : {"cuLaunchKernel", "cuStreamCreate", "cuStreamSynchronize"}) {
    bool reached = true;
    for (int64_t nth = 1; reached; ++nth) {
      scene.clear();
      fake_cuda::refuse(call, nth);
      const bool begun = scene.begin(&copy) == TP_OK, arrived = begun && tp_block_copy_end(copy, nullptr) == TP_OK;
      reached = fake_cuda::refused();
      CHECK(arrived || reached);
      if (arrived) scene.check_arrived();
      fixture::unmap({scene.to});
      fixture::map({scene.to});
    }
  }
  scene.close();
}
