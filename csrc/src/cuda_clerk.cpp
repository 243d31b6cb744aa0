#include "cuda_clerk.h"

#include <unistd.h>

#include <cstdlib>
#include <new>
#include <system_error>

namespace torpor::cuda {
namespace {

constexpr std::chrono::seconds kLongestGoodbye{1};

// One clerk works at a time. A process that ends says goodbye first, so that nobody calls a driver that is taken down: no work begins
// after that, and for what a driver does not end nobody waits. Never destroyed.
struct Desk {
  std::mutex mutex;
  std::condition_variable changed;
  bool taken = false, closed = false;
};

Desk &desk() {
  static auto *only = new Desk;
  return *only;
}

void close_at_exit() {
  static const int once = std::atexit([] {
    std::unique_lock<std::mutex> lock(desk().mutex);
    desk().closed = true;
    desk().changed.notify_all();
    desk().changed.wait_for(lock, kLongestGoodbye, [] { return !desk().taken; });
  });
  (void)once;
}

void work_at_desk(const std::function<void()> &work) {
  std::unique_lock<std::mutex> lock(desk().mutex);
  desk().changed.wait(lock, [] { return !desk().taken || desk().closed; });
  if (desk().closed) return;
  desk().taken = true;
  lock.unlock();
  work();
  lock.lock();
  desk().taken = false;
  desk().changed.notify_all();
}

}  // namespace

Clerk::~Clerk() {
  if (!thread_.joinable()) return;
  if (process_ != getpid()) {
    thread_.detach();
    (void)changed_.release();  // its destructor would wait for the thread that waits there, and is not here to be woken
    return;
  }
  {
    std::lock_guard<std::mutex> guard(mutex_);
    ending_ = true;
  }
  changed_->notify_all();
  thread_.join();
}

void Clerk::expect(Clock::time_point due) noexcept {
  std::lock_guard<std::mutex> guard(mutex_);
  const bool sleeps = !expected_;
  expected_ = true;
  due_ = due;
  try {
    if (!thread_.joinable()) {
      close_at_exit();
      thread_ = std::thread([this] { run(); });
      process_ = getpid();
    } else if (sleeps) {
      changed_->notify_all();
    }
  } catch (const std::exception &) {
    expected_ = false;
  }
}

void Clerk::cancel() {
  std::unique_lock<std::mutex> lock(mutex_);
  expected_ = false;
  changed_->wait(lock, [this] { return !working_; });
}

void Clerk::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ending_) {
    if (!expected_) {
      changed_->wait(lock);
    } else if (Clock::now() < due_) {
      const Clock::time_point due = due_;
      changed_->wait_until(lock, due);
    } else {
      expected_ = false;
      working_ = true;
      lock.unlock();
      work_at_desk(work_);
      lock.lock();
      working_ = false;
      changed_->notify_all();
    }
  }
}

}  // namespace torpor::cuda
