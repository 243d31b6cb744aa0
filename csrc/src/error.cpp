#include "error.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace torpor {

const char *op_name(int op) noexcept {
  static const char *const names[TP_OP_COUNT] = {"reserve",    "free_address", "create", "release", "map",  "set_access",
                                                 "unmap",      "export",       "import", "copy",    "hash", "commit"};
  return op >= 0 && op < TP_OP_COUNT ? names[op] : "none";
}

tp_status memory_status(tp_op op) noexcept { return op == TP_OP_COMMIT ? TP_HOST_MEMORY : TP_DEVICE_MEMORY; }

std::string human_bytes(uint64_t bytes) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return text;
}

Error Error::driver(tp_op op, int64_t code, std::string message) {
  Error error(TP_DRIVER, std::move(message));
  error.op = op;
  error.code = code;
  return error;
}

Error Error::system(tp_op op, int errno_, const std::string &what) {
  char buffer[128];
  // The GNU variant, which returns the text; it is thread-safe where strerror is not.
  const char *text = strerror_r(errno_, buffer, sizeof buffer);
  Error error = driver(op, errno_, what + ": " + text);
  if (errno_ == ENOMEM || errno_ == ENOSPC) error.status = memory_status(op);
  return error;
}

Error Error::memory(tp_op op, uint64_t needed, uint64_t free) {
  const char *kind = op == TP_OP_COMMIT ? "host memory" : "device memory";
  Error error(memory_status(op), std::string("not enough ") + kind + ": " + human_bytes(needed) + " needed, " +
                                     human_bytes(free) + " free");
  error.op = op;
  error.code = ENOMEM;
  error.bytes_needed = needed;
  error.bytes_free = free;
  return error;
}

}  // namespace torpor
