#include "cuda_clerk.h"

#include <unistd.h>

#include <cstdlib>
#include <new>
#include <system_error>

namespace torpor::cuda {
namespace {

constexpr std::chrono::seconds kLongestGoodbye{1};

// Held while a clerk works. A process that ends takes it for good, so that nobody calls a driver that is taken down; a driver that
// does not answer keeps it, and is not waited for. Never destroyed.
std::timed_mutex &at_work() {
  static auto *mutex = new std::timed_mutex;
  return *mutex;
}

void close_at_exit() {
  static const int once = std::atexit([] { (void)at_work().try_lock_for(kLongestGoodbye); });
  (void)once;
}

}  // namespace

Clerk::~Clerk() {
  if (!thread_.joinable()) return;
  if (process_ != getpid()) {
    thread_.detach();
    return;
  }
  {
    std::lock_guard<std::mutex> guard(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
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
      changed_.notify_all();
    }
  } catch (const std::exception &) {
    expected_ = false;
  }
}

void Clerk::cancel() {
  std::unique_lock<std::mutex> lock(mutex_);
  expected_ = false;
  changed_.wait(lock, [this] { return !working_; });
}

void Clerk::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ending_) {
    if (!expected_) {
      changed_.wait(lock);
    } else if (Clock::now() < due_) {
      const Clock::time_point due = due_;
      changed_.wait_until(lock, due);
    } else {
      expected_ = false;
      working_ = true;
      lock.unlock();
      {
        const std::lock_guard<std::timed_mutex> guard(at_work());
        work_();
      }
      lock.lock();
      working_ = false;
      changed_.notify_all();
    }
  }
}

}  // namespace torpor::cuda
