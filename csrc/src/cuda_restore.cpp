// Copies to the device, and the sums of what has arrived.
#include <algorithm>
#include <chrono>

#include "cuda_copies.h"
#include "cuda_pieces.h"

namespace torpor::cuda {
namespace {

// Large, so that much is under way while the driver creates memory; what arrives last is summed in a hundredth of its time.
constexpr uint64_t kPiece = uint64_t{256} << 20;

// What was measured on an H200, the only kind of device where a kernel is known to help: 48 GiB are cleared within 0.16 s of the first
// release, and a kernel reads host memory at 50 GB/s. A wake at once that leaves the rest of that time to the kernel takes 330 ms, one
// that has the kernel do a GiB less 335-350, because the copy engine comes too soon.
constexpr int kMeasured = 9;  // compute capability, major
constexpr int64_t kClearedPerNs = 330, kPulledPerNs = 50;  // bytes

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::chrono::steady_clock::time_point Copies::note_released(uint64_t bytes) {
  const int64_t end = std::max(cleared_ns_.load(), now_ns()) + static_cast<int64_t>(bytes) / kClearedPerNs;
  cleared_ns_ = end;
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(end));
}

// The device clears what was released with its copy engines, which move half as much meanwhile. A kernel that reads host memory loses
// nothing to that, but is slower than they are at other times, and far slower where the link is not PCIe. The two at once are slower
// than one after the other.
uint64_t Copies::bytes_to_pull() const {
  if (context_.attribute(kAttributeComputeMajor) != kMeasured || context_.attribute(kAttributeHostPageTables) != 0) return 0;
  return static_cast<uint64_t>(std::max(cleared_ns_ - now_ns(), int64_t{0}) * kPulledPerNs);
}

bool Copies::can_pull(const tp_span &span) {
  return span.dst % 16 == 0 && span.src % 16 == 0 && span.bytes % 16 == 0 && locks_.locked({span.src, span.bytes});
}

// Everything is started by one thread, far ahead of the device: nobody waits for another thread, and the link does not wait for the
// driver's locks, which whoever creates memory holds most of the time.
class Copies::Restore {
 public:
  Restore(Copies &copies, const Kernels &kernels, const std::vector<CheckedCopy> &chunks)
      : copies_(copies),
        kernels_(kernels),
        chunks_(chunks),
        pieces_(pieces_of(chunks, kPiece)),
        to_pull_(copies.bytes_to_pull()),
        mover_(copies.lanes_, 0, TP_OP_COPY),
        checker_(copies.lanes_, SumTable::bytes(chunks.size(), largest(chunks)), TP_OP_HASH),
        sums_(checker_.lane.buffer, chunks.size(), largest(chunks)) {
    for (uint64_t i = 0; i < chunks.size(); ++i) sums_.set(i, {chunks[i].span.dst, chunks[i].span.bytes});
  }

  // Starts the next pieces, as many as are ready.
  template <typename Ready>
  void advance(const Ready &ready) {
    for (; next_ < pieces_.size() && ready(pieces_[next_].span); ++next_) start(pieces_[next_]);
  }

  // Waits; then every chunk has its hash.
  void finish() {
    mark_.record(checker_.lane.stream, TP_OP_HASH);
    mark_.wait(TP_OP_HASH);
    for (uint64_t i = 0; i < chunks_.size(); ++i) *chunks_[i].hash = sums_.hash(i);
  }

 private:
  void start(const Piece &piece) {
    move(piece.span);
    mark_.record(mover_.lane.stream, TP_OP_COPY);
    mark_.hold(checker_.lane.stream, TP_OP_HASH);  // as recorded now; the mark can be used again
    kernels_.sum(sums_, piece.first, piece.last, checker_.lane.stream);
  }

  // One stream: first what the kernel is to take, then the copy engine's.
  void move(const tp_span &span) {
    if (to_pull_ > span.bytes / 2 && copies_.can_pull(span)) {
      to_pull_ -= std::min(to_pull_, span.bytes);
      return kernels_.pull(span, mover_.lane.stream);
    }
    to_pull_ = 0;
    copies_.start(TP_COPY_TO_DEVICE, span, mover_.lane.stream);
  }

  Copies &copies_;
  const Kernels &kernels_;
  const std::vector<CheckedCopy> &chunks_;
  const std::vector<Piece> pieces_;
  uint64_t next_ = 0;
  uint64_t to_pull_;  // bytes that the kernel still is to take
  Event mark_{false};
  Lanes::Lease mover_, checker_;  // end with nothing in flight
  SumTable sums_;
};

void Copies::restore(const std::vector<CheckedCopy> &chunks, uint32_t threads, const Beside &beside) {
  const Context::Scope scope(context_, TP_OP_COPY);
  const Kernels *compiled = kernels();
  if (compiled != nullptr && !chunks.empty()) return restore_by_kernel(*compiled, chunks, beside);
  if (beside.work) beside.work([] {});
  if (beside.meanwhile) beside.meanwhile();
  std::vector<tp_span> spans;
  std::vector<HashItem> arrived;
  for (const CheckedCopy &chunk : chunks) {
    spans.push_back(chunk.span);
    arrived.push_back({chunk.span.dst, chunk.span.bytes, chunk.hash});
  }
  copy(TP_COPY_TO_DEVICE, spans, threads);
  hash(arrived, threads);
}

void Copies::restore_by_kernel(const Kernels &compiled, const std::vector<CheckedCopy> &chunks, const Beside &beside) {
  Restore job(*this, compiled, chunks);
  const auto ready = [&](const tp_span &span) { return !beside.ready || beside.ready({span.dst, span.bytes}); };
  if (beside.work) beside.work([&] { job.advance(ready); });
  job.advance([](const tp_span &) { return true; });
  if (beside.meanwhile) beside.meanwhile();
  job.finish();
}

}  // namespace torpor::cuda
