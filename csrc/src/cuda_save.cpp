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
constexpr uint64_t kPiece = uint64_t{4} << 20;  // little: it is hashed close behind
constexpr uint64_t kHashPart = uint64_t{256} << 10;

// A stream on which a few copies are under way, in order.
class Flight {
 public:
  explicit Flight(Lanes &lanes) : lease_(lanes, 0, TP_OP_COPY) {}
  CUstream stream() const { return lease_.lane.stream; }
  // Behind what was started last. Waits until there are fewer than kDepth in front; `landed` is then called for what has ended.
  template <typename Landed>
  void mark(const Landed &landed) {
    if (events_.size() == kDepth) land(landed);
    events_.emplace_back(true);
    events_.back().record(stream(), TP_OP_COPY);
  }
  template <typename Landed>
  void finish(const Landed &landed) {
    while (!events_.empty()) land(landed);
  }

 private:
  template <typename Landed>
  void land(const Landed &landed) {
    events_.front().wait(TP_OP_COPY);
    events_.pop_front();
    landed();
  }
  Lanes::Lease lease_;  // ends with nothing in flight
  std::deque<Event> events_;
};

// How many pieces have arrived, for those who wait to check them. They look again and again: what they wait for takes microseconds.
class Arrivals {
 public:
  void add() { count_.fetch_add(1, std::memory_order_release); }
  void fail() { failed_.store(true); }
  // False: it will not arrive.
  bool wait(uint64_t piece) const {
    while (count_.load(std::memory_order_acquire) <= piece) {
      if (failed_.load()) return false;
      std::this_thread::yield();
    }
    return true;
  }

 private:
  std::atomic<uint64_t> count_{0};
  std::atomic<bool> failed_{false};
};

// What one processor hashes at a time: little, so that all of them are at what arrived last.
struct Part {
  uint64_t chunk, piece, offset, bytes;
};

std::vector<Part> parts_of(const std::vector<CheckedCopy> &chunks, const std::vector<Piece> &pieces) {
  std::vector<Part> out;
  for (uint64_t p = 0; p < pieces.size(); ++p) {
    for (uint64_t i = pieces[p].first; i < pieces[p].last; ++i) {
      for (uint64_t offset = 0; offset < chunks[i].span.bytes; offset += kHashPart) {
        out.push_back({i, p, offset, std::min(kHashPart, chunks[i].span.bytes - offset)});
      }
    }
  }
  return out;
}

uint64_t sum_of(const Part &part, const CheckedCopy &chunk) {
  ChunkHash hash = ChunkHash::from(part.offset);
  hash.add(reinterpret_cast<const void *>(chunk.span.dst + part.offset), part.bytes);
  return hash.sum();
}

}  // namespace

// Whatever fails here ends the wait of those who check.
void Copies::save_pieces(const std::vector<Piece> &pieces, const std::function<void()> &landed) {
  const Context::Scope scope(context_, TP_OP_COPY);
  Flight flight(lanes_);
  for (const Piece &piece : pieces) {
    start(TP_COPY_TO_HOST, piece.span, flight.stream());
    flight.mark(landed);
  }
  flight.finish(landed);
}

// The processors hash what lies in host memory, close behind the copies: nobody else can say what is really there.
void Copies::save(const std::vector<CheckedCopy> &chunks, uint32_t threads) {
  const std::vector<Piece> pieces = pieces_of(chunks, kPiece);
  const std::vector<Part> parts = parts_of(chunks, pieces);
  std::vector<std::atomic<uint64_t>> sums(chunks.size());
  Arrivals arrivals;
  const auto copy_all = [&] {
    try {
      save_pieces(pieces, [&] { arrivals.add(); });
    } catch (...) {
      arrivals.fail();
      throw;
    }
  };
  std::atomic<uint64_t> next{0};
  const auto hash_some = [&] {
    for (uint64_t i = next.fetch_add(1); i < parts.size() && arrivals.wait(parts[i].piece); i = next.fetch_add(1)) {
      sums[parts[i].chunk] += sum_of(parts[i], chunks[parts[i].chunk]);
    }
  };
  // Copying is the first to be begun: where no threads are to be had, the caller does one after the other.
  parallel_for(threads + 1, threads + 1, [&](uint64_t i) { i == 0 ? copy_all() : hash_some(); });
  for (uint64_t i = 0; i < chunks.size(); ++i) {
    ChunkHash whole;
    whole.add_summed(sums[i], chunks[i].span.bytes);
    *chunks[i].hash = whole.finish();
  }
}

}  // namespace torpor::cuda
