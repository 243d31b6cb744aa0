// Work that is better done before somebody waits for it, on a thread of its own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace torpor::cuda {

// Does its work once, some time after it was last asked to. Nobody depends on it: without a thread to be had nothing is done.
class Clerk {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Clerk(std::function<void()> work) : work_(std::move(work)) {}
  Clerk(const Clerk &) = delete;
  Clerk &operator=(const Clerk &) = delete;
  ~Clerk();  // waits for work that has begun

  void expect(Clock::time_point due) noexcept;  // in place of what was expected before
  void cancel();                                // waits for work that has begun; no other begins before it is expected again

 private:
  void run();

  const std::function<void()> work_;
  std::mutex mutex_;
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  bool expected_ = false, working_ = false, ending_ = false;
  Clock::time_point due_;
  std::thread thread_;
  int process_ = 0;  // that has the thread: a forked child does not
};

}  // namespace torpor::cuda
