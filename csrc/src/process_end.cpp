#include "process_end.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>

namespace torpor {
namespace {

constexpr std::chrono::seconds kLongestGoodbye{1};

// Never destroyed.
struct Desk {
  std::mutex mutex;
  std::condition_variable changed;
  int working = 0;
  bool taken = false, closed = false;
  const pid_t process = getpid();  // a forked child has the counts, and nobody who works
};

Desk &desk() {
  static auto *only = new Desk;
  return *only;
}

// One who works, until it dies.
class Place {
 public:
  explicit Place(bool alone) : alone_(alone) {
    ++desk().working;
    if (alone_) desk().taken = true;
  }
  Place(const Place &) = delete;
  Place &operator=(const Place &) = delete;
  ~Place() {
    const std::lock_guard<std::mutex> lock(desk().mutex);
    --desk().working;
    if (alone_) desk().taken = false;
    desk().changed.notify_all();
  }

 private:
  const bool alone_;
};

}  // namespace

bool work_before_goodbye(bool alone, const std::function<void()> &work) {
  std::unique_lock<std::mutex> lock(desk().mutex);
  desk().changed.wait(lock, [alone] { return !alone || !desk().taken || desk().closed; });
  if (desk().closed) return false;
  const Place place(alone);
  lock.unlock();
  work();
  return true;
}

void say_goodbye_at_exit() {
  static const int once = std::atexit([] {
    if (desk().process != getpid()) return;
    std::unique_lock<std::mutex> lock(desk().mutex);
    desk().closed = true;
    desk().changed.notify_all();
    desk().changed.wait_for(lock, kLongestGoodbye, [] { return desk().working == 0; });
  });
  (void)once;
}

}  // namespace torpor
