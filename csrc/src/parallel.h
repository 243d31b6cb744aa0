// Runs independent pieces of work on a few threads that live for one call.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace torpor {

// Calls body(i) once for each i < count, on up to `threads` threads, the caller's among them. Returns when all have returned;
// rethrows the first exception of a body, after which no new piece is begun, and throws nothing of its own.
template <typename Body>
void parallel_for(uint64_t count, uint32_t threads, const Body &body) {
  std::atomic<uint64_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  auto work = [&]() noexcept {
    for (uint64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      try {
        body(i);
      } catch (...) {
        std::lock_guard<std::mutex> lock(failure_mutex);
        if (!failure) failure = std::current_exception();
        next.store(count);
      }
    }
  };
  std::vector<std::thread> helpers;
  const uint64_t wanted = threads < count ? threads : count;
  try {
    helpers.reserve(wanted);
    for (uint64_t i = 1; i < wanted; ++i) helpers.emplace_back(work);
  } catch (const std::exception &) {
    // No more threads to be had: those that run do all of it.
  }
  work();
  for (std::thread &helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace torpor
