#include "cuda_host.h"

#include <algorithm>

namespace torpor::cuda {

Context::Context(int32_t ordinal) {
  const Table &cu = table();
  int count = 0;
  check(cu.cuDeviceGetCount(&count), kNoOp, "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count) {
    throw Error::unsupported("no CUDA device " + std::to_string(ordinal) + ": this machine has " + std::to_string(count));
  }
  check(cu.cuDeviceGet(&device_, ordinal), kNoOp, "cuDeviceGet");
  check(cu.cuDevicePrimaryCtxRetain(&context_, device_), kNoOp, "cuDevicePrimaryCtxRetain");
}

Context::~Context() { table().cuDevicePrimaryCtxRelease_v2(device_); }

int Context::attribute(int which) const {
  int value = 0;
  check(table().cuDeviceGetAttribute(&value, which, device_), kNoOp, "cuDeviceGetAttribute");
  return value;
}

Context::Scope::Scope(const Context &context, int op) {
  check(table().cuCtxPushCurrent_v2(context.context_), op, "cuCtxPushCurrent");
}

Context::Scope::~Scope() {
  CUcontext popped = nullptr;
  table().cuCtxPopCurrent_v2(&popped);
}

void HostLocks::lock_pieces(Range range) {
  for (Address at = range.address; at < range.end();) {
    // Piece borders at fixed addresses, whatever was committed first.
    const uint64_t bytes = std::min(range.end(), (at / kPiece + 1) * kPiece) - at;
    check(table().cuMemHostRegister_v2(reinterpret_cast<void *>(at), bytes, kHostPortable), TP_OP_COMMIT, "cuMemHostRegister");
    pieces_[at] = bytes;
    at += bytes;
  }
}

void HostLocks::drop(Address address) {
  check(table().cuMemHostUnregister(reinterpret_cast<void *>(address)), TP_OP_COMMIT, "cuMemHostUnregister");
  pieces_.erase(address);
}

void HostLocks::lock(Range range) {
  std::lock_guard<std::mutex> guard(mutex_);
  try {
    lock_pieces(range);
  } catch (...) {
    for (auto at = pieces_.lower_bound(range.address); at != pieces_.end() && at->first < range.end();) drop((at++)->first);
    throw;
  }
}

void HostLocks::unlock(Range range) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto at = pieces_.upper_bound(range.address);
  if (at != pieces_.begin() && std::prev(at)->first + std::prev(at)->second > range.address) --at;
  std::vector<Range> hit;
  for (; at != pieces_.end() && at->first < range.end(); ++at) hit.push_back({at->first, at->second});
  for (const Range &piece : hit) drop(piece.address);
  for (const Range &piece : hit) {
    try {
      if (piece.address < range.address) lock_pieces({piece.address, range.address - piece.address});
      if (piece.end() > range.end()) lock_pieces({range.end(), piece.end() - range.end()});
    } catch (const Error &) {
      // The neighbour's memory stays committed and right; copies of it are slower until it is committed anew.
    }
  }
}

Lanes::Lease::Lease(Lanes &lanes, bool buffer, int op) : lanes_(lanes) {
  {
    std::lock_guard<std::mutex> guard(lanes.mutex_);
    lanes.idle_.reserve(lanes.idle_.size() + 8);  // so that giving back needs no memory
    if (!lanes.idle_.empty()) {
      lane = lanes.idle_.back();
      lanes.idle_.pop_back();
    }
  }
  // A lane that lacks a part goes back to the others when an exception leaves here: both parts are optional to the destructor.
  try {
    if (lane.stream == nullptr) check(table().cuStreamCreate(&lane.stream, kStreamNonBlocking), op, "cuStreamCreate");
    if (buffer && lane.buffer == nullptr) {
      check(table().cuMemHostAlloc(&lane.buffer, Lane::kBufferBytes, kHostPortable), op, "cuMemHostAlloc");
    }
  } catch (...) {
    std::lock_guard<std::mutex> guard(lanes.mutex_);
    lanes.idle_.push_back(lane);
    throw;
  }
}

void Lanes::Lease::wait(int op) { check(table().cuStreamSynchronize(lane.stream), op, "cuStreamSynchronize"); }

Lanes::Lease::~Lease() {
  table().cuStreamSynchronize(lane.stream);
  std::lock_guard<std::mutex> guard(lanes_.mutex_);
  lanes_.idle_.push_back(lane);
}

Lanes::~Lanes() {
  try {
    const Context::Scope scope(context_);
    for (const Lane &lane : idle_) {
      if (lane.stream != nullptr) table().cuStreamDestroy_v2(lane.stream);
      if (lane.buffer != nullptr) table().cuMemFreeHost(lane.buffer);
    }
  } catch (const Error &) {
    // The context is broken; its streams and buffers go with it.
  }
}

}  // namespace torpor::cuda
