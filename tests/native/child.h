// Tests in processes of their own.
#pragma once

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace child {

inline constexpr const char *kMark = "TORPOR_TEST_CHILD";

// Is this process such a child?
inline bool here() { return std::getenv(kMark) != nullptr; }

// Waits; whether it came to its end, and a good one. One that does not is killed.
inline bool ended(pid_t child) {
  for (int i = 0; i < 2000; ++i) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) && WEXITSTATUS(status) == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return false;
}

// This very test in a process of its own; whether that came to its end.
inline bool ends(const char *test) {
  std::string mark = std::string(kMark) + "=1";
  std::string program = "/proc/self/exe", driver = check::driver(), name = test;
  char *const arguments[] = {program.data(), driver.data(), name.data(), nullptr};
  std::vector<char *> environment{mark.data()};
  for (char **each = environ; *each != nullptr; ++each) environment.push_back(*each);
  environment.push_back(nullptr);
  pid_t child = 0;
  CHECK_EQ(posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environment.data()), 0);
  return ended(child);
}

}  // namespace child
