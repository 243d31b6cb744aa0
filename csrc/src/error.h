// The one exception of the core. capi.cpp turns it into a tp_status and a tp_error; nothing else leaves the library.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "torpor/torpor.h"

namespace torpor {

inline constexpr int kNoOp = -1;

struct Error : std::exception {
  tp_status status;
  int op = kNoOp;
  int64_t code = 0;
  uint64_t bytes_needed = 0;
  uint64_t bytes_free = 0;
  std::string message;

  Error(tp_status status_, std::string message_) : status(status_), message(std::move(message_)) {}
  const char *what() const noexcept override { return message.c_str(); }

  static Error invalid(std::string message) { return {TP_INVALID, std::move(message)}; }
  static Error state(std::string message) { return {TP_STATE, std::move(message)}; }
  static Error unsupported(std::string message) { return {TP_UNSUPPORTED, std::move(message)}; }
  static Error driver(tp_op op, int64_t code, std::string message);
  // errno_ says what the kernel answered; ENOMEM and its like become `memory`, the status of the memory that `op` gives.
  static Error system(tp_op op, int errno_, const std::string &what);
  static Error memory(tp_op op, uint64_t needed, uint64_t free);
};

const char *op_name(int op) noexcept;
// TP_HOST_MEMORY for the memory of arenas, TP_DEVICE_MEMORY for everything else.
tp_status memory_status(tp_op op) noexcept;
// "1.5 GiB", for messages.
std::string human_bytes(uint64_t bytes);

}  // namespace torpor
