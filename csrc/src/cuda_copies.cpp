#include "cuda_copies.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>

#include "hash.h"
#include "parallel.h"

namespace torpor::cuda {
namespace {

constexpr uint32_t kMaxStreams = 4;  // one saturates the link, a few keep it full between pieces
constexpr uint64_t kCopyPiece = uint64_t{32} << 20;
constexpr uint64_t kStageBytes = uint64_t{4} << 20;
constexpr uint64_t kMostBlocks = uint64_t{1} << 18;  // of one launch: their lists fill a buffer
constexpr size_t kDepth = 4;                         // pieces in flight per stream: the next one is always waiting
// `meanwhile` creates memory, which the device then clears, against the copies: it starts when so much is left to copy.
#ifndef TORPOR_LATE_BYTES
#define TORPOR_LATE_BYTES (uint64_t{512} << 20)
#endif
#ifndef TORPOR_MOVERS
#define TORPOR_MOVERS 3  // 1: copy engine, 2: kernel, 3: both
#endif
constexpr uint64_t kLateBytes = TORPOR_LATE_BYTES;

void enqueue(tp_copy_kind kind, const tp_span &span, CUstream stream) {
  const Table &cu = table();
  switch (kind) {
    case TP_COPY_TO_HOST:
      return check(cu.cuMemcpyDtoHAsync_v2(reinterpret_cast<void *>(span.dst), span.src, span.bytes, stream), TP_OP_COPY,
                   "cuMemcpyDtoHAsync");
    case TP_COPY_TO_DEVICE:
      return check(cu.cuMemcpyHtoDAsync_v2(span.dst, reinterpret_cast<const void *>(span.src), span.bytes, stream), TP_OP_COPY,
                   "cuMemcpyHtoDAsync");
    case TP_COPY_DEVICE:
      return check(cu.cuMemcpyAsync(span.dst, span.src, span.bytes, stream), TP_OP_COPY, "cuMemcpyAsync");
  }
}

// Chunks that are neighbours on both sides, copied in one go.
struct Piece {
  tp_span span;
  uint64_t first, last;  // of the chunks
};

std::vector<Piece> pieces_of(const std::vector<CheckedCopy> &chunks) {
  std::vector<Piece> out;
  for (uint64_t i = 0; i < chunks.size(); ++i) {
    const tp_span &next = chunks[i].span;
    if (!out.empty()) {
      Piece &piece = out.back();
      const tp_span &have = piece.span;
      if (have.dst + have.bytes == next.dst && have.src + have.bytes == next.src && have.bytes + next.bytes <= kCopyPiece) {
        piece.span.bytes += next.bytes, piece.last = i + 1;
        continue;
      }
    }
    out.push_back({next, i, i + 1});
  }
  return out;
}

// The first piece after which no more than kLateBytes are to come.
uint64_t late_piece(const std::vector<Piece> &pieces) {
  uint64_t left = 0, i = pieces.size();
  while (i > 0 && left + pieces[i - 1].span.bytes <= kLateBytes) left += pieces[--i].span.bytes;
  return i;
}

template <typename Chunk, typename Size>
uint64_t largest(const std::vector<Chunk> &chunks, const Size &size) {
  uint64_t most = 0;
  for (const Chunk &chunk : chunks) most = std::max(most, size(chunk));
  return most;
}

// A stream on which a few copies are under way, in order.
class Flight {
 public:
  Flight(Lanes &lanes) : lease_(lanes, 0, TP_OP_COPY) {}
  CUstream stream() const { return lease_.lane.stream; }
  // Behind what was started last. Waits until there are fewer than kDepth in front; `landed` is then called for what has ended.
  template <typename Landed>
  const Event &mark(const Landed &landed) {
    if (events_.size() == kDepth) land(landed);
    events_.emplace_back();
    events_.back().record(stream(), TP_OP_COPY);
    return events_.back();
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

// How many pieces have arrived, for those who wait to check them.
class Arrivals {
 public:
  void add() { change([&] { ++count_; }); }
  void fail() { change([&] { failed_ = true; }); }
  // False: it will not arrive.
  bool wait(uint64_t piece) {
    std::unique_lock<std::mutex> guard(mutex_);
    changed_.wait(guard, [&] { return failed_ || count_ > piece; });
    return count_ > piece;
  }

 private:
  template <typename Change>
  void change(const Change &body) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      body();
    }
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t count_ = 0;
  bool failed_ = false;
};

void nothing() {}

}  // namespace

Copies::~Copies() {
  if (!kernels_) return;
  try {
    const Context::Scope scope(context_);
    kernels_.reset();
  } catch (const Error &) {
    // The context is broken; the code goes with it.
  }
}

const Kernels *Copies::kernels() {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!asked_) {
    asked_ = true;
    try {
      kernels_ = std::make_unique<Kernels>(context_);
    } catch (const Error &error) {
      why_staged_ = error.message;
    }
  }
  return kernels_.get();
}

std::string Copies::hash_path() {
  const Context::Scope scope(context_, TP_OP_HASH);
  return kernels() != nullptr ? "kernel on the device" : "staged through host memory: " + why_staged_;
}

// One driver call per stretch that lies within one lock.
void Copies::start(tp_copy_kind kind, tp_span span, CUstream stream) {
  while (span.bytes > 0) {
    uint64_t bytes = span.bytes;
    if (kind != TP_COPY_DEVICE) {
      const Address host = kind == TP_COPY_TO_HOST ? span.dst : span.src;
      bytes = std::min(bytes, locks_.border_after(host) - host);
    }
    enqueue(kind, {span.dst, span.src, bytes}, stream);
    span = {span.dst + bytes, span.src + bytes, span.bytes - bytes};
  }
}

void Copies::copy(tp_copy_kind kind, const std::vector<tp_span> &spans, uint32_t threads) {
  const Context::Scope scope(context_, TP_OP_COPY);
  std::deque<Lanes::Lease> leases;
  for (uint32_t i = 0; i < std::min(threads, kMaxStreams); ++i) leases.emplace_back(lanes_, 0, TP_OP_COPY);
  size_t next = 0;
  for (tp_span span : spans) {
    while (span.bytes > 0) {
      const uint64_t bytes = std::min(span.bytes, kCopyPiece);
      start(kind, {span.dst, span.src, bytes}, leases[next++ % leases.size()].lane.stream);
      span = {span.dst + bytes, span.src + bytes, span.bytes - bytes};
    }
  }
  for (Lanes::Lease &lease : leases) lease.wait(TP_OP_COPY);
}

void Copies::copy_blocks(const BlockCopies &blocks, uint32_t threads) {
  const Context::Scope scope(context_, TP_OP_COPY);
  const Kernels *compiled = kernels();
  if (compiled == nullptr || !Kernels::can_copy(blocks)) return copy(TP_COPY_DEVICE, spans_of(blocks), threads);
  for (uint64_t first = 0; first < blocks.count; first += kMostBlocks) {
    const uint64_t count = std::min(kMostBlocks, blocks.count - first), bytes = count * sizeof(uint64_t);
    Lanes::Lease lease(lanes_, 2 * bytes, TP_OP_COPY);
    auto *ids = static_cast<uint64_t *>(lease.lane.buffer);
    std::memcpy(ids, blocks.dst_ids + first, bytes);
    std::memcpy(ids + count, blocks.src_ids + first, bytes);
    compiled->copy({blocks.dst, blocks.src, blocks.block_bytes, ids, ids + count, count}, lease.lane.stream);
    lease.wait(TP_OP_COPY);
  }
}

void Copies::hash(const std::vector<HashItem> &chunks, uint32_t threads) {
  if (chunks.empty()) return;
  const Context::Scope scope(context_, TP_OP_HASH);
  if (const Kernels *compiled = kernels()) return hash_by_kernel(*compiled, chunks);
  parallel_for(chunks.size(), threads, [&](uint64_t i) { hash_staged(chunks[i]); });
}

void Copies::hash_by_kernel(const Kernels &compiled, const std::vector<HashItem> &chunks) {
  const uint64_t most = largest(chunks, [](const HashItem &chunk) { return chunk.bytes; });
  Lanes::Lease lease(lanes_, SumTable::bytes(chunks.size(), most), TP_OP_HASH);
  SumTable sums(lease.lane.buffer, chunks.size(), most);
  for (uint64_t i = 0; i < chunks.size(); ++i) sums.set(i, {chunks[i].address, chunks[i].bytes});
  compiled.sum(sums, 0, chunks.size(), lease.lane.stream);
  lease.wait(TP_OP_HASH);
  for (uint64_t i = 0; i < chunks.size(); ++i) *chunks[i].out = sums.hash(i);
}

// Through a page-locked buffer, hashed by the processor.
void Copies::hash_staged(const HashItem &chunk) {
  const Context::Scope scope(context_, TP_OP_HASH);
  Lanes::Lease lease(lanes_, kStageBytes, TP_OP_HASH);
  ChunkHash hash;
  for (uint64_t offset = 0; offset < chunk.bytes; offset += kStageBytes) {
    const uint64_t bytes = std::min(kStageBytes, chunk.bytes - offset);
    check(table().cuMemcpyDtoHAsync_v2(lease.lane.buffer, chunk.address + offset, bytes, lease.lane.stream), TP_OP_HASH,
          "cuMemcpyDtoHAsync");
    lease.wait(TP_OP_HASH);
    hash.add(lease.lane.buffer, bytes);
  }
  *chunk.out = hash.finish();
}

void Copies::copy_checked(tp_copy_kind kind, const std::vector<CheckedCopy> &chunks, uint32_t threads, const Meanwhile &meanwhile) {
  const Context::Scope scope(context_, TP_OP_COPY);
  if (kind == TP_COPY_TO_HOST) return save(chunks, threads);
  if (kernels() != nullptr) return restore(chunks, meanwhile);
  std::vector<tp_span> spans;
  std::vector<HashItem> arrived;
  for (const CheckedCopy &chunk : chunks) {
    spans.push_back(chunk.span);
    arrived.push_back({chunk.span.dst, chunk.span.bytes, chunk.hash});
  }
  copy(kind, spans, threads);
  if (meanwhile) meanwhile();
  hash(arrived, threads);
}

// Two movers share the pieces: a copy engine, and a kernel that reads host memory. While the device clears what was released a
// moment ago, it does that with the copy engines; the kernel then does most of the work, and otherwise a part of it. What has arrived
// is hashed while the next pieces arrive: reading it takes a hundredth of the time that the link does.
void Copies::restore(const std::vector<CheckedCopy> &chunks, const Meanwhile &meanwhile) {
  const Kernels &compiled = *kernels();
  const std::vector<Piece> pieces = pieces_of(chunks);
  const uint64_t most = largest(chunks, [](const CheckedCopy &chunk) { return chunk.span.bytes; }), late = late_piece(pieces);
  Lanes::Lease checker(lanes_, SumTable::bytes(chunks.size(), most), TP_OP_HASH);
  SumTable sums(checker.lane.buffer, chunks.size(), most);
  for (uint64_t i = 0; i < chunks.size(); ++i) sums.set(i, {chunks[i].span.dst, chunks[i].span.bytes});

  std::atomic<uint64_t> next{0};
  const auto move = [&](bool by_kernel, const Meanwhile &once) {
    Flight flight(lanes_);
    bool called = !once;
    for (uint64_t p = next.fetch_add(1); p < pieces.size(); p = next.fetch_add(1)) {
      const Piece &piece = pieces[p];
      if (by_kernel && can_pull(piece.span)) {
        compiled.pull(piece.span, flight.stream());
      } else {
        start(TP_COPY_TO_DEVICE, piece.span, flight.stream());
      }
      flight.mark(nothing).hold(checker.lane.stream, TP_OP_HASH);
      compiled.sum(sums, piece.first, piece.last, checker.lane.stream);
      if (!called && p >= late) {
        called = true;
        once();
      }
    }
    flight.finish(nothing);
    if (!called) once();
  };
  const bool both = TORPOR_MOVERS == 3 && pieces.size() > 2 * kDepth;
  parallel_for(both ? 2 : 1, 2, [&](uint64_t mover) {
    const Context::Scope scope(context_, TP_OP_COPY);
    try {
      move(mover == 1 || TORPOR_MOVERS == 2, mover == 0 ? meanwhile : Meanwhile());
    } catch (...) {
      next = pieces.size();  // for the other one
      throw;
    }
  });
  checker.wait(TP_OP_HASH);
  for (uint64_t i = 0; i < chunks.size(); ++i) *chunks[i].hash = sums.hash(i);
}

bool Copies::can_pull(const tp_span &span) {
  return span.dst % 16 == 0 && span.src % 16 == 0 && span.bytes % 16 == 0 && locks_.locked({span.src, span.bytes});
}

// The processors hash what lies in host memory, close behind the copies: nobody else can say what is really there.
void Copies::save(const std::vector<CheckedCopy> &chunks, uint32_t threads) {
  const std::vector<Piece> pieces = pieces_of(chunks);
  std::vector<uint64_t> piece_of;
  for (uint64_t p = 0; p < pieces.size(); ++p) piece_of.resize(pieces[p].last, p);
  Arrivals arrivals;
  const auto copy_all = [&] {
    const Context::Scope scope(context_, TP_OP_COPY);
    try {
      Flight flight(lanes_);
      const auto landed = [&] { arrivals.add(); };
      for (const Piece &piece : pieces) {
        start(TP_COPY_TO_HOST, piece.span, flight.stream());
        flight.mark(landed);
      }
      flight.finish(landed);
    } catch (...) {
      arrivals.fail();
      throw;
    }
  };
  std::atomic<uint64_t> next{0};
  const auto hash_some = [&] {
    for (uint64_t i = next.fetch_add(1); i < chunks.size() && arrivals.wait(piece_of[i]); i = next.fetch_add(1)) {
      *chunks[i].hash = hash_chunk(reinterpret_cast<const void *>(chunks[i].span.dst), chunks[i].span.bytes);
    }
  };
  // The first is the caller's: where no threads are to be had, copying comes first.
  parallel_for(threads + 1, threads + 1, [&](uint64_t i) { i == 0 ? copy_all() : hash_some(); });
}

}  // namespace torpor::cuda
