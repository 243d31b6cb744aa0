// Copies to the host, and what checks them there.
#include <atomic>
#include <deque>
#include <thread>

#include "cuda_copies.h"
#include "cuda_pieces.h"
#include "hash.h"
#include "parallel.h"

namespace torpor::cuda {
namespace {

constexpr size_t kDepth = 4;  // pieces in flight: the next one is always waiting
// Each piece costs the link two microseconds: 16 GiB take 325 ms by 4 MiB, 320 by 8, 317 by 32. The last one is checked in 0.4 ms.
constexpr uint64_t kPiece = uint64_t{32} << 20;
constexpr uint64_t kHashPart = uint64_t{256} << 10;  // what one processor hashes at a time: all of them are at what arrived last
constexpr uint64_t kSlice = 256;  // chunks that are hashed on the device before the first is copied

// The hashes of chunks where they are. The device has all of the work at once; what is known of the first is used while it is at
// the others.
class Sources {
 public:
  Sources(const Kernels &kernels, Lanes &lanes, const std::vector<CheckedCopy> &chunks)
      : chunks_(chunks),
        lease_(lanes, SumTable::bytes(chunks.size(), largest(chunks)), TP_OP_HASH),
        sums_(lease_.lane.buffer, chunks.size(), largest(chunks)) {
    for (uint64_t i = 0; i < chunks.size(); ++i) sums_.set(i, {chunks[i].span.src, chunks[i].span.bytes});
    for (uint64_t first = 0; first < chunks.size(); first += kSlice) {
      kernels.sum(sums_, first, std::min(first + kSlice, chunks.size()), lease_.lane.stream);
      marks_.emplace_back(true);
      marks_.back().record(lease_.lane.stream, TP_OP_HASH);
    }
  }
  // Waits for the next ones; how many chunks have their hash then.
  uint64_t more() {
    marks_.front().wait(TP_OP_HASH);
    marks_.pop_front();
    const uint64_t end = std::min(known_ + kSlice, chunks_.size());
    for (; known_ < end; ++known_) *chunks_[known_].was = sums_.hash(known_);
    return known_;
  }

 private:
  const std::vector<CheckedCopy> &chunks_;
  Lanes::Lease lease_;  // ends with nothing in flight
  SumTable sums_;
  std::deque<Event> marks_;
  uint64_t known_ = 0;
};

}  // namespace

// Pieces that have arrived, and those who check them there: nobody but a processor can say what really lies in host memory.
class Copies::Arrivals {
 public:
  explicit Arrivals(const std::vector<CheckedCopy> &chunks)
      : chunks_(chunks), parts_((largest(chunks) + kHashPart - 1) / kHashPart), landed_(chunks.size()), sums_(chunks.size()) {}

  // By one thread, in the order in which pieces arrive.
  void add(const Piece &piece) {
    Landed &next = landed_[count_.load(std::memory_order_relaxed)];
    next.first = piece.first, next.last = piece.last;
    count_.fetch_add(1, std::memory_order_release);
  }
  // When it dies nothing more arrives, whatever has happened.
  struct Coming {
    explicit Coming(Arrivals &all) : arrivals(all) {}
    Coming(const Coming &) = delete;
    Coming &operator=(const Coming &) = delete;
    ~Coming() { arrivals.ended_.store(true, std::memory_order_release); }
    Arrivals &arrivals;
  };

  // Until the end, on as many threads as like to: each takes part of what arrived last.
  void check() {
    for (uint64_t p = 0; wait(p); ++p) {
      Landed &piece = landed_[p];
      const uint64_t all = (piece.last - piece.first) * parts_;
      for (uint64_t k = piece.next.fetch_add(1); k < all; k = piece.next.fetch_add(1)) add_part(piece.first + k / parts_, k % parts_);
    }
  }
  // Every chunk that arrived has its hash.
  void finish() {
    for (uint64_t p = 0; p < count_; ++p) {
      for (uint64_t i = landed_[p].first; i < landed_[p].last; ++i) {
        ChunkHash whole;
        whole.add_summed(sums_[i], chunks_[i].span.bytes);
        *chunks_[i].hash = whole.finish();
      }
    }
  }

 private:
  struct Landed {
    uint64_t first = 0, last = 0;
    std::atomic<uint64_t> next{0};  // part to check
  };
  // False: there is no such piece. Looks again and again: what it waits for takes microseconds.
  bool wait(uint64_t piece) const {
    for (;;) {
      const bool ended = ended_.load(std::memory_order_acquire);
      if (count_.load(std::memory_order_acquire) > piece) return true;
      if (ended) return false;
      std::this_thread::yield();
    }
  }
  void add_part(uint64_t i, uint64_t part) {
    const tp_span &span = chunks_[i].span;
    const uint64_t offset = part * kHashPart;
    if (offset >= span.bytes) return;
    ChunkHash hash = ChunkHash::from(offset);
    hash.add(reinterpret_cast<const void *>(span.dst + offset), std::min(kHashPart, span.bytes - offset));
    sums_[i] += hash.sum();
  }

  const std::vector<CheckedCopy> &chunks_;
  const uint64_t parts_;  // of the largest chunk
  std::vector<Landed> landed_;
  std::vector<std::atomic<uint64_t>> sums_;
  std::atomic<uint64_t> count_{0};
  std::atomic<bool> ended_{false};
};

// Keeps a few copies in flight on one stream, where they end in order.
void Copies::save_pieces(Cutter &pieces, Piece first, Arrivals &arrivals) {
  const Context::Scope scope(context_, TP_OP_COPY);
  const Lanes::Lease lease(lanes_, 0, TP_OP_COPY);
  std::deque<std::pair<Piece, Event>> flight;
  const auto land = [&] {
    flight.front().second.wait(TP_OP_COPY);
    arrivals.add(flight.front().first);
    flight.pop_front();
  };
  for (std::optional<Piece> piece = first; piece; piece = pieces.next()) {
    if (flight.size() == kDepth) land();
    start(TP_COPY_TO_HOST, piece->span, lease.lane.stream);
    flight.emplace_back(*piece, true);
    flight.back().second.record(lease.lane.stream, TP_OP_COPY);
  }
  while (!flight.empty()) land();
}

void Copies::save(const std::vector<CheckedCopy> &chunks, uint32_t threads, const std::function<bool(uint64_t)> &wanted) {
  if (chunks.empty()) return;
  const Context::Scope scope(context_, TP_OP_COPY);
  std::optional<Sources> sources;
  if (const Kernels *compiled = kernels()) {
    sources.emplace(*compiled, lanes_, chunks);
  } else {
    std::vector<HashItem> items;
    for (const CheckedCopy &chunk : chunks) items.push_back({chunk.span.src, chunk.span.bytes, chunk.was});
    hash(items, threads);
  }
  Cutter pieces(chunks, kPiece, [&] { return sources ? sources->more() : chunks.size(); }, wanted);
  const std::optional<Piece> first = pieces.next();
  if (!first) return;
  Arrivals arrivals(chunks);
  const auto copy_all = [&] {
    const Arrivals::Coming coming(arrivals);
    save_pieces(pieces, *first, arrivals);
  };
  // Copying is the first to be begun: where no threads are to be had, the caller does one after the other.
  parallel_for(threads + 1, threads + 1, [&](uint64_t i) { i == 0 ? copy_all() : arrivals.check(); });
  arrivals.finish();
}

}  // namespace torpor::cuda
