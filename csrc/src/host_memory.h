// How much memory this process may still take: the machine's and every enclosing memory cgroup's (v1 and v2).
#pragma once

#include <cstdint>
#include <string>

#include "torpor/torpor.h"

namespace torpor {

struct HostMemory {
  uint64_t total = 0;      // the smallest limit that applies, or the machine's size
  uint64_t available = 0;  // what can be taken before the kernel would have to kill somebody; cache it can drop counts as free
};

// root is put before /proc and /sys paths, for tests. What cannot be read does not limit.
HostMemory read_host_memory(const std::string &root = "");

// Throws the memory error of `op` unless `bytes` more fit with a margin for everybody else. Asking first is all one can do: a
// page fault that the kernel cannot serve ends in its OOM killer, not in an error.
void require_host_memory(tp_op op, uint64_t bytes);
// What require_host_memory would let pass.
uint64_t free_host_memory();

}  // namespace torpor
