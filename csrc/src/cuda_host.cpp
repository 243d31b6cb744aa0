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

namespace {

void register_pages(Range range, unsigned flags) {
  check(table().cuMemHostRegister_v2(reinterpret_cast<void *>(range.address), range.bytes, kHostPortable | kHostDeviceMap | flags),
        TP_OP_COMMIT, "cuMemHostRegister");
}

// Borders at fixed addresses, whatever was committed first.
std::vector<Range> in_pieces(Range range, uint64_t piece) {
  std::vector<Range> pieces;
  for (Address at = range.address; at < range.end(); at = pieces.back().end()) {
    pieces.push_back({at, std::min(range.end(), (at / piece + 1) * piece) - at});
  }
  return pieces;
}

}  // namespace

void HostLocks::lock_again(Range range, unsigned flags) {
  for (const Range &piece : in_pieces(range, kPiece)) {
    register_pages(piece, flags);
    pieces_[piece.address] = {piece.bytes, flags};
  }
}

void HostLocks::drop(Address address) {
  check(table().cuMemHostUnregister(reinterpret_cast<void *>(address)), TP_OP_COMMIT, "cuMemHostUnregister");
  pieces_.erase(address);
}

void HostLocks::lock(Range range, unsigned flags) {
  try {
    for (const Range &piece : in_pieces(range, kPiece)) {
      register_pages(piece, flags);
      std::lock_guard<std::mutex> guard(mutex_);
      pieces_[piece.address] = {piece.bytes, flags};
    }
  } catch (...) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto at = pieces_.lower_bound(range.address); at != pieces_.end() && at->first < range.end();) drop((at++)->first);
    throw;
  }
}

void HostLocks::unlock(Range range) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto at = pieces_.upper_bound(range.address);
  if (at != pieces_.begin() && std::prev(at)->first + std::prev(at)->second.bytes > range.address) --at;
  std::vector<std::pair<Range, unsigned>> hit;
  for (; at != pieces_.end() && at->first < range.end(); ++at) hit.push_back({{at->first, at->second.bytes}, at->second.flags});
  for (const auto &[piece, flags] : hit) drop(piece.address);
  for (const auto &[piece, flags] : hit) {
    try {
      if (piece.address < range.address) lock_again({piece.address, range.address - piece.address}, flags);
      if (piece.end() > range.end()) lock_again({range.end(), piece.end() - range.end()}, flags);
    } catch (const Error &) {
      // The neighbour's memory stays committed and right; copies of it are slower until it is committed anew.
    }
  }
}

Address HostLocks::border_after(Address at) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto next = pieces_.upper_bound(at);
  if (next != pieces_.begin()) {
    const Address end = std::prev(next)->first + std::prev(next)->second.bytes;
    if (at < end) return end;
  }
  return next == pieces_.end() ? UINT64_MAX : next->first;
}

bool HostLocks::locked(Range range) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto piece = pieces_.upper_bound(range.address);
  if (piece == pieces_.begin()) return false;
  Address reached = range.address;
  for (--piece; piece != pieces_.end() && piece->first <= reached && reached < range.end(); ++piece) {
    const Address end = piece->first + piece->second.bytes;
    if (end <= reached) return false;
    reached = end;
  }
  return reached >= range.end();
}

Event::Event(bool spin) {
  const unsigned flags = kEventDisableTiming | (spin ? 0 : kEventBlockingSync);
  check(table().cuEventCreate(&event_, flags), TP_OP_COPY, "cuEventCreate");
}
Event::~Event() {
  if (event_ != nullptr) table().cuEventDestroy_v2(event_);
}
void Event::record(CUstream stream, int op) { check(table().cuEventRecord(event_, stream), op, "cuEventRecord"); }
void Event::wait(int op) const { check(table().cuEventSynchronize(event_), op, "cuEventSynchronize"); }
void Event::hold(CUstream stream, int op) const { check(table().cuStreamWaitEvent(stream, event_, 0), op, "cuStreamWaitEvent"); }

// One whose buffer is large enough if there is one, and an idle one without its buffer otherwise.
Lane Lanes::take(uint64_t buffer_bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  idle_.reserve(idle_.size() + lent_ + 1);  // so that giving back needs no memory
  ++lent_;
  if (idle_.empty()) return {};
  const auto fits = [&](const Lane &lane) { return lane.buffer_bytes >= buffer_bytes; };
  auto found = std::find_if(idle_.rbegin(), idle_.rend(), fits);
  if (found == idle_.rend()) found = idle_.rbegin();
  const Lane lane = *found;
  idle_.erase(std::next(found).base());
  return lane;
}

Lanes::Lease::Lease(Lanes &lanes, uint64_t buffer_bytes, int op) : lane(lanes.take(buffer_bytes)), lanes_(lanes) {
  // A lane that lacks a part goes back to the others when an exception leaves here: both parts are optional to the destructor.
  try {
    complete(buffer_bytes, op);
  } catch (...) {
    std::lock_guard<std::mutex> guard(lanes.mutex_);
    --lanes.lent_;
    lanes.idle_.push_back(lane);
    throw;
  }
}

void Lanes::Lease::complete(uint64_t buffer_bytes, int op) {
  const Table &cu = table();
  if (lane.stream == nullptr) check(cu.cuStreamCreate(&lane.stream, kStreamNonBlocking), op, "cuStreamCreate");
  if (lane.buffer_bytes >= buffer_bytes) return;
  if (lane.buffer != nullptr) check(cu.cuMemFreeHost(lane.buffer), op, "cuMemFreeHost");
  lane.buffer = nullptr, lane.buffer_bytes = 0;
  const uint64_t bytes = std::max(buffer_bytes, kLeastBuffer);
  check(cu.cuMemHostAlloc(&lane.buffer, bytes, kHostPortable | kHostDeviceMap), op, "cuMemHostAlloc");
  lane.buffer_bytes = bytes;
}

void Lanes::Lease::wait(int op) { check(table().cuStreamSynchronize(lane.stream), op, "cuStreamSynchronize"); }

Lanes::Lease::~Lease() {
  if (lane.stream != nullptr) table().cuStreamSynchronize(lane.stream);
  std::lock_guard<std::mutex> guard(lanes_.mutex_);
  --lanes_.lent_;
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
