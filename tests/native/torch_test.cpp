// The functions that torch calls: what they give belongs to a slot, freeing never waits for the owner, nothing is lost when the owner
// goes first.
#include <sys/types.h>

#include <atomic>
#include <thread>

#include "fixture.h"

extern "C" {
void *tp_torch_alloc_0(ssize_t, int, void *);
void tp_torch_free_0(void *, ssize_t, int, void *);
void *tp_torch_alloc_1(ssize_t, int, void *);
void tp_torch_free_1(void *, ssize_t, int, void *);
void *tp_torch_alloc_31(ssize_t, int, void *);
void tp_torch_free_31(void *, ssize_t, int, void *);
}

namespace {

constexpr uint64_t kSize = 4 << 20;

uint32_t open_slot(const fixture::Device &device, const char *name = "weights") {
  uint32_t slot = 99;
  OK(tp_torch_open(device.handle, 0, kSize, 0, name, &slot, &err));
  return slot;
}

void set(uint32_t slot, tp_torch_mode mode) { OK(tp_torch_set_mode(slot, mode, &err)); }
void disown(uint32_t slot) { OK(tp_torch_disown(slot, &err)); }

struct News {
  std::vector<tp_region *> born;
  std::vector<uint64_t> dead;
};

News take(uint32_t slot, uint64_t cap = 16) {
  News news;
  news.born.resize(cap), news.dead.resize(cap);
  uint64_t born = 0, dead = 0;
  OK(tp_torch_take(slot, news.born.data(), cap, &born, news.dead.data(), cap, &dead, &err));
  news.born.resize(born), news.dead.resize(dead);
  return news;
}

tp_torch_refusal refusal(uint32_t slot) {
  tp_torch_refusal out{};
  OK(tp_torch_get_refusal(slot, &out, &err));
  return out;
}

uint64_t number(void *address) { return reinterpret_cast<uint64_t>(address); }

}  // namespace

TEST(torch_memory_is_a_region_of_its_slot) {
  fixture::Device device;
  const uint32_t slot = open_slot(device);
  CHECK_EQ(slot, 0u);
  void *address = tp_torch_alloc_0(kSize, 0, nullptr);
  CHECK(address != nullptr);
  const News news = take(slot);
  CHECK_EQ(news.born.size(), 1u);
  CHECK_EQ(fixture::stats(news.born[0]).address, number(address));
  CHECK_EQ(fixture::stats(news.born[0]).bytes, kSize);
  CHECK_EQ(take(slot).born.size(), 0u);
  CHECK(tp_torch_alloc_1(kSize, 0, nullptr) == nullptr);  // nobody's slot
  tp_torch_free_1(address, kSize, 0, nullptr);            // not of that slot
  tp_torch_free_0(address, kSize, 0, nullptr);
  const News after = take(slot);
  CHECK_EQ(after.dead.size(), 1u);
  CHECK_EQ(after.dead[0], number(address));
  fixture::destroy(news.born[0]);
  disown(slot);
  device.close();
}

TEST(torch_slots_are_bound_one_by_one_and_used_again) {
  fixture::Device device;
  for (uint32_t i = 0; i < TP_TORCH_SLOTS; ++i) CHECK_EQ(open_slot(device), i);
  uint32_t slot = 0;
  CHECK_STATUS(tp_torch_open(device.handle, 0, kSize, 0, "one more", &slot, &err), TP_STATE);
  void *last = tp_torch_alloc_31(kSize, 0, nullptr);
  CHECK(last != nullptr);
  CHECK_EQ(take(31).born.size(), 1u);
  for (uint32_t i = 0; i < TP_TORCH_SLOTS - 1; ++i) disown(i);
  CHECK_STATUS(tp_torch_set_mode(0, TP_TORCH_OPEN, &err), TP_STATE);
  CHECK_STATUS(tp_torch_set_mode(TP_TORCH_SLOTS, TP_TORCH_OPEN, &err), TP_INVALID);
  CHECK_EQ(open_slot(device), 0u);
  disown(0);
  disown(31);
  CHECK_STATUS(tp_torch_set_mode(31, TP_TORCH_OPEN, &err), TP_STATE);
  CHECK_EQ(device.stats().live_regions, 1u);
  tp_torch_free_31(last, kSize, 0, nullptr);
  CHECK_EQ(device.stats().live_regions, 0u);
  device.close();
}

TEST(torch_frees_give_memory_back_at_once_only_when_open) {
  fixture::Device device;
  const uint32_t slot = open_slot(device);
  void *first = tp_torch_alloc_0(kSize, 0, nullptr), *second = tp_torch_alloc_0(kSize, 0, nullptr);
  void *third = tp_torch_alloc_0(kSize, 0, nullptr);
  const News news = take(slot);
  tp_torch_free_0(first, kSize, 0, nullptr);
  CHECK_EQ(device.stats().mapped_bytes, 3 * kSize);  // held
  set(slot, TP_TORCH_OPEN);
  CHECK_EQ(device.stats().mapped_bytes, 2 * kSize);
  tp_torch_free_0(second, kSize, 0, nullptr);
  CHECK_EQ(device.stats().mapped_bytes, kSize);
  set(slot, TP_TORCH_SHUT);
  tp_torch_free_0(third, kSize, 0, nullptr);
  CHECK_EQ(device.stats().mapped_bytes, kSize);
  CHECK_EQ(take(slot, 2).dead.size(), 2u);
  CHECK_EQ(take(slot, 2).dead.size(), 1u);
  for (tp_region *region : news.born) fixture::destroy(region);
  disown(slot);
  device.close();
}

TEST(torch_gets_nothing_while_the_pool_sleeps_and_is_told_why) {
  fixture::Device device;
  const uint32_t slot = open_slot(device, "kv_cache");
  void *address = tp_torch_alloc_0(kSize, 0, nullptr);
  const News news = take(slot);
  set(slot, TP_TORCH_SHUT);
  fixture::unmap(news.born);
  CHECK(tp_torch_alloc_0(kSize, 0, nullptr) == nullptr);
  CHECK_EQ(refusal(slot).count, 1u);
  CHECK_EQ(refusal(slot).last.status, TP_STATE);
  CHECK(std::strstr(refusal(slot).last.message, "kv_cache") != nullptr);
  tp_torch_free_0(address, kSize, 0, nullptr);  // asleep
  CHECK_EQ(take(slot).dead.size(), 1u);
  fixture::destroy(news.born[0]);
  set(slot, TP_TORCH_OPEN);
  CHECK(tp_torch_alloc_0(kSize, 1, nullptr) == nullptr);
  CHECK_EQ(refusal(slot).last.status, TP_INVALID);
  CHECK(tp_torch_alloc_0(-1, 0, nullptr) == nullptr);
  CHECK(tp_torch_alloc_0(static_cast<ssize_t>(fixture::kTooMuch), 0, nullptr) == nullptr);
  CHECK_EQ(refusal(slot).last.status, TP_DEVICE_MEMORY);
  CHECK(refusal(slot).last.bytes_needed >= fixture::kTooMuch);
  CHECK_EQ(refusal(slot).count, 4u);
  disown(slot);
  device.close();
}

TEST(torch_memory_outlives_its_owner_and_closes_the_device) {
  const int before = fixture::open_descriptors();
  fixture::Device device;
  const uint32_t slot = open_slot(device);
  void *awake = tp_torch_alloc_0(kSize, 0, nullptr), *asleep = tp_torch_alloc_0(kSize, 0, nullptr);
  void *freed = tp_torch_alloc_0(kSize, 0, nullptr), *unseen = nullptr;
  const News news = take(slot);
  fixture::unmap({news.born[1]});
  unseen = tp_torch_alloc_0(kSize, 0, nullptr);  // never taken
  tp_torch_free_0(freed, kSize, 0, nullptr);
  disown(slot);
  CHECK_EQ(device.stats().live_regions, 3u);
  CHECK_EQ(device.stats().mapped_bytes, 2 * kSize);
  CHECK(tp_torch_alloc_0(kSize, 0, nullptr) == nullptr);

  tp_region *own = device.region(1);
  CHECK_STATUS(tp_device_close(device.handle, &err), TP_STATE);  // something besides torch's lives
  fixture::destroy(own);
  OK(tp_device_close(device.handle, &err));
  tp_torch_free_0(awake, kSize, 0, nullptr);
  tp_torch_free_0(asleep, kSize, 0, nullptr);
  tp_torch_free_0(unseen, kSize, 0, nullptr);  // the device is gone with this one
  device.handle = nullptr;
  if (check::driver() == "host") CHECK_EQ(fixture::open_descriptors(), before);
  fixture::Device next;
  CHECK_EQ(open_slot(next), slot);
  disown(slot);
  next.close();
}

TEST(torch_memory_that_the_driver_keeps_is_tried_again) {
  fixture::Device device;
  const uint32_t slot = open_slot(device);
  void *first = tp_torch_alloc_0(kSize, 0, nullptr), *second = tp_torch_alloc_0(kSize, 0, nullptr);
  void *third = tp_torch_alloc_0(kSize, 0, nullptr);
  device.arm(TP_OP_CREATE, 1);
  CHECK(tp_torch_alloc_0(kSize, 0, nullptr) == nullptr);
  set(slot, TP_TORCH_OPEN);
  device.arm(TP_OP_UNMAP, 1);
  tp_torch_free_0(first, kSize, 0, nullptr);
  CHECK_EQ(device.stats().mapped_bytes, 3 * kSize);
  set(slot, TP_TORCH_OPEN);
  CHECK_EQ(device.stats().mapped_bytes, 2 * kSize);
  disown(slot);
  device.arm(TP_OP_UNMAP, 1);
  tp_torch_free_0(second, kSize, 0, nullptr);
  CHECK_EQ(device.stats().live_regions, 2u);
  tp_torch_free_0(third, kSize, 0, nullptr);
  CHECK_EQ(device.stats().live_regions, 0u);
  device.close();
}

// Torch's threads allocate and free while the owner adopts, sleeps, wakes and destroys.
TEST(threads_torch_and_owner) {
  fixture::Device device;
  uint32_t slot = open_slot(device);
  const bool first = slot == 0;
  void *(*const alloc)(ssize_t, int, void *) = first ? tp_torch_alloc_0 : tp_torch_alloc_1;
  void (*const free)(void *, ssize_t, int, void *) = first ? tp_torch_free_0 : tp_torch_free_1;
  std::atomic<bool> stop{false};
  std::atomic<int> given{0}, refused{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      std::vector<void *> mine;
      while (!stop) {
        void *address = alloc(kSize, 0, nullptr);
        ++(address != nullptr ? given : refused);
        if (address != nullptr) mine.push_back(address);
        if (mine.size() > 3 || address == nullptr) {
          for (void *old : mine) free(old, kSize, 0, nullptr);
          mine.clear();
        }
      }
      for (void *old : mine) free(old, kSize, 0, nullptr);
    });
  }
  std::vector<tp_region *> owned;
  bool lost = false;  // checked at the end: a failure must not leave threads behind
  const auto adopt = [&] {
    const News news = take(slot, 64);
    owned.insert(owned.end(), news.born.begin(), news.born.end());
    for (uint64_t address : news.dead) {
      const auto found = std::find_if(owned.begin(), owned.end(), [&](tp_region *r) { return fixture::stats(r).address == address; });
      if ((lost = lost || found == owned.end())) continue;
      fixture::destroy(*found);
      owned.erase(found);
    }
    return !news.born.empty() || !news.dead.empty();
  };
  for (int round = 0; (round < 30 || given < 30 || refused == 0) && round < 100000; ++round) {
    set(slot, TP_TORCH_HELD);
    adopt();  // once: torch may allocate faster than it is adopted
    set(slot, TP_TORCH_SHUT);
    while (adopt()) continue;
    fixture::unmap(owned);
    fixture::map(owned);
    set(slot, TP_TORCH_OPEN);
    std::this_thread::yield();
  }
  stop = true;
  for (std::thread &thread : threads) thread.join();
  set(slot, TP_TORCH_HELD);
  while (adopt()) continue;
  CHECK(!lost);
  CHECK(refused > 0);
  CHECK_EQ(owned.size(), 0u);
  disown(slot);
  CHECK_EQ(device.stats().reserved_bytes, 0u);
  device.close();
}
