#include "host_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

#include "error.h"

namespace torpor {
namespace {

constexpr uint64_t kUnlimited = UINT64_MAX;

// The number after `key` in a file of "key value" lines; an empty key: the file's first number. `missing` where there is none.
uint64_t read_number(const std::string &path, const std::string &key, uint64_t missing) {
  std::ifstream file(path);
  std::string word;
  uint64_t value = 0;
  if (key.empty()) return file >> value ? value : missing;  // "max" is no number
  while (file >> word) {
    if (word == key) return file >> value ? value : missing;
  }
  return missing;
}

struct Cgroup {
  bool v2 = false;
  std::string path;  // within its hierarchy
};

std::vector<Cgroup> memory_cgroups(const std::string &root) {
  std::vector<Cgroup> found;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controllers == ",,") found.push_back({true, line.substr(second + 1)});
    if (controllers.find(",memory,") != std::string::npos) found.push_back({false, line.substr(second + 1)});
  }
  return found;
}

struct Mount {
  std::string point;
  std::string base;  // which path of the hierarchy is mounted there
};

// Empty point: not mounted.
Mount find_mount(const std::string &root, bool v2) {
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream left(line.substr(0, dash)), right(line.substr(dash + 3));
    std::string id, parent, device, base, point, type, source, options;
    left >> id >> parent >> device >> base >> point;
    right >> type >> source >> options;
    const bool memory = ("," + options + ",").find(",memory,") != std::string::npos;
    if (v2 ? type == "cgroup2" : type == "cgroup" && memory) return {root + point, base};
  }
  return {};
}

HostMemory read_level(const std::string &folder, bool v2) {
  const std::string limit_file = v2 ? "/memory.max" : "/memory.limit_in_bytes";
  const uint64_t limit = read_number(folder + limit_file, "", kUnlimited);
  // v1 says "no limit" with a number near 2^63.
  if (limit >= (uint64_t{1} << 62)) return {kUnlimited, kUnlimited};
  const uint64_t used = read_number(folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes"), "", 0);
  const uint64_t cache = read_number(folder + "/memory.stat", v2 ? "inactive_file" : "total_inactive_file", 0);
  const uint64_t held = used - std::min(used, cache);
  return {limit, limit - std::min(limit, held)};
}

void limit_by(HostMemory &memory, const HostMemory &other) {
  memory.total = std::min(memory.total, other.total);
  memory.available = std::min(memory.available, other.available);
}

bool is_below(const std::string &path, const std::string &base) {
  return path.compare(0, base.size(), base) == 0 && (path.size() == base.size() || path[base.size()] == '/');
}

void limit_by_cgroup(HostMemory &memory, const std::string &root, const Cgroup &cgroup) {
  const Mount mount = find_mount(root, cgroup.v2);
  if (mount.point.empty()) return;
  std::string path = cgroup.path;
  // In a container without a cgroup namespace the path is the host's and the mount shows a subtree of it.
  if (mount.base != "/" && is_below(path, mount.base)) path.erase(0, mount.base.size());
  for (;;) {
    limit_by(memory, read_level(mount.point + path, cgroup.v2));
    const size_t slash = path.rfind('/');
    if (path.empty() || slash == std::string::npos) return;
    path.erase(slash);
  }
}

}  // namespace

HostMemory read_host_memory(const std::string &root) {
  const std::string meminfo = root + "/proc/meminfo";
  const uint64_t missing = kUnlimited / 1024;
  HostMemory memory{read_number(meminfo, "MemTotal:", missing) * 1024, read_number(meminfo, "MemAvailable:", missing) * 1024};
  for (const Cgroup &cgroup : memory_cgroups(root)) limit_by_cgroup(memory, root, cgroup);
  return memory;
}

uint64_t free_host_memory() {
  const HostMemory memory = read_host_memory();
  const uint64_t margin = std::min<uint64_t>(memory.total / 64, uint64_t{128} << 20);
  return memory.available - std::min(memory.available, margin);
}

void require_host_memory(tp_op op, uint64_t bytes) {
  const uint64_t free = free_host_memory();
  if (bytes > free) throw Error::memory(op, bytes, free);
}

}  // namespace torpor
