// What the cuda driver does for memory that was released, beside everybody else.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <thread>

#include "child.h"
#include "cuda_clerk.h"
#include "fake_cuda.h"
#include "fixture.h"

namespace {

constexpr uint64_t kMuch = uint64_t{4} << 30;  // nothing touches it
constexpr uint64_t kExtents = 4;

void need_the_stand_in() {
  if (fake_cuda::created() < 0) throw check::Skip("needs the stand-in for the CUDA driver");
}

tp_region *much(const fixture::Device &device) {
  tp_region *out = nullptr;
  OK(tp_region_create(device.handle, kMuch, kMuch / kExtents, 0, "much", &out, &err));
  return out;
}

void pass(int64_t milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// Waits: as many pieces were created since `before`.
bool created_since(int64_t before, int64_t count) {
  for (int i = 0; i < 500 && fake_cuda::created() < before + count; ++i) pass(10);
  return fake_cuda::created() == before + count;
}

// Its work is due between the process's goodbye and its own end.
void leave_work_until_the_end() {
  static torpor::cuda::Clerk clerk([] {});
  std::atexit([] { pass(200); });
  clerk.expect(torpor::cuda::Clerk::Clock::now() + std::chrono::milliseconds(100));
}

}  // namespace

// A clerk may be ended after the process has said goodbye to the driver, with work that is due: it does none, and ends.
TEST(threads_a_clerk_that_outlives_the_goodbye_ends) {
  if (child::here()) return leave_work_until_the_end();
  CHECK(child::ends("threads_a_clerk_that_outlives_the_goodbye_ends"));
}

// A forked child has the clerk, and not its thread: whoever ends it there waits for nobody.
TEST(a_clerk_ends_in_a_forked_child) {
  torpor::cuda::Clerk clerk([] {});
  clerk.expect(torpor::cuda::Clerk::Clock::now() + std::chrono::hours(1));
  pass(50);  // its thread waits by then
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    clerk.~Clerk();
    _exit(0);
  }
  CHECK(child::ended(child));
}

// Nor does such a child, when it ends, wait for work of its parent's.
TEST(a_forked_child_does_not_wait_for_the_work_of_its_parent) {
  std::promise<void> begun, done;
  torpor::cuda::Clerk clerk([&] {
    begun.set_value();
    done.get_future().wait();
  });
  clerk.expect(torpor::cuda::Clerk::Clock::now());
  begun.get_future().wait();
  const auto before = std::chrono::steady_clock::now();
  std::fflush(nullptr);  // or the child says again what was said
  const pid_t child = fork();
  if (child == 0) std::exit(0);
  const bool ended = child::ended(child);
  const auto took = std::chrono::steady_clock::now() - before;
  done.set_value();
  CHECK(ended);
  CHECK(took < std::chrono::milliseconds(900));
}

// The driver takes released memory back when the next is created: once, before somebody waits for it.
TEST(threads_released_memory_is_taken_back_before_it_is_asked_for) {
  need_the_stand_in();
  fixture::Device device;
  tp_region *region = much(device);
  for (int turn = 0; turn < 2; ++turn) {
    const int64_t before = fake_cuda::created();
    fixture::unmap({region});
    CHECK(created_since(before, 1));
    pass(200);
    CHECK(created_since(before, 1));
    fixture::map({region});
    CHECK(created_since(before, 1 + kExtents));
  }
  fixture::destroy(region);
  device.close();
}

// What is awake keeps all of its memory: nothing is created beside it.
TEST(threads_nothing_is_created_after_a_wake) {
  need_the_stand_in();
  fixture::Device device;
  tp_region *region = much(device);
  const int64_t before = fake_cuda::created();
  fixture::unmap({region});
  fixture::map({region});
  pass(400);
  CHECK(created_since(before, kExtents));
  fixture::destroy(region);
  device.close();
}

// A device that closes waits for nothing that is still to come; one whose driver refuses is as good as before.
TEST(threads_end_with_their_device) {
  need_the_stand_in();
  for (const bool refused : {false, true}) {
    fixture::Device device;
    tp_region *region = much(device);
    const int64_t before = fake_cuda::created();
    if (refused) fake_cuda::refuse("cuMemCreate", 1);
    fixture::destroy(region);
    if (refused) {
      for (int i = 0; i < 500 && !fake_cuda::reached(); ++i) pass(10);
      CHECK(fake_cuda::refused());
    }
    device.close();
    pass(200);
    CHECK(created_since(before, 0));
  }
  fake_cuda::check_nothing_left();
}
