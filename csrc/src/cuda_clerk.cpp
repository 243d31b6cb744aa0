#include "cuda_clerk.h"

#include <unistd.h>

#include <exception>

#include "process_end.h"

namespace torpor::cuda {

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
      say_goodbye_at_exit();
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
      work_before_goodbye(true, work_);
      lock.lock();
      working_ = false;
      changed_->notify_all();
    }
  }
}

}  // namespace torpor::cuda
