#include "cuda_copies.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "hash.h"
#include "parallel.h"

namespace torpor::cuda {
namespace {

constexpr uint32_t kMaxStreams = 4;  // one saturates the link, a few keep it full between pieces
constexpr uint64_t kCopyPiece = uint64_t{32} << 20;
constexpr uint64_t kStageBytes = uint64_t{4} << 20;
constexpr uint64_t kMostBlocks = uint64_t{1} << 18;  // of one launch: their lists fill a buffer
// `meanwhile` creates memory, which the device then clears, against the copies: it starts when so much is left to copy.
#ifndef TORPOR_LATE_BYTES
#define TORPOR_LATE_BYTES (uint64_t{512} << 20)
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

template <typename Chunks, typename Size>
uint64_t largest(const Chunks &begin, uint64_t count, const Size &size) {
  uint64_t most = 0;
  for (uint64_t i = 0; i < count; ++i) most = std::max(most, size(begin[i]));
  return most;
}

uint64_t largest(const std::vector<CheckedCopy> &chunks) {
  return largest(chunks.data(), chunks.size(), [](const CheckedCopy &chunk) { return chunk.span.bytes; });
}

// Copies in flight: every piece on one of a few streams, an event behind each.
class Flight {
 public:
  Flight(Lanes &lanes, tp_copy_kind kind) : kind_(kind) {
    for (int i = 0; i < 2; ++i) leases_.emplace_back(lanes, 0, TP_OP_COPY);
  }
  const Event &start(const tp_span &span) {
    const CUstream stream = leases_[events_.size() % leases_.size()].lane.stream;
    enqueue(kind_, span, stream);
    events_.emplace_back();
    events_.back().record(stream, TP_OP_COPY);
    return events_.back();
  }
  void wait(uint64_t piece) const { events_[piece].wait(TP_OP_COPY); }
  void wait() {
    for (Lanes::Lease &lease : leases_) lease.wait(TP_OP_COPY);
  }

 private:
  tp_copy_kind kind_;
  std::deque<Lanes::Lease> leases_;  // end with nothing in flight
  std::deque<Event> events_;
};

// Waits until no more than kLateBytes are to come.
void wait_until_late(const Flight &flight, const std::vector<Piece> &pieces) {
  uint64_t left = 0;
  for (uint64_t i = pieces.size(); i-- > 0;) {
    left += pieces[i].span.bytes;
    if (left > kLateBytes) return flight.wait(i);
  }
}

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

void Copies::copy(tp_copy_kind kind, const std::vector<tp_span> &spans, uint32_t threads) {
  const Context::Scope scope(context_, TP_OP_COPY);
  std::deque<Lanes::Lease> leases;
  for (uint32_t i = 0; i < std::min(threads, kMaxStreams); ++i) leases.emplace_back(lanes_, 0, TP_OP_COPY);
  size_t next = 0;
  for (tp_span span : spans) {
    while (span.bytes > 0) {
      const uint64_t bytes = std::min(span.bytes, kCopyPiece);
      enqueue(kind, {span.dst, span.src, bytes}, leases[next++ % leases.size()].lane.stream);
      span = {span.dst + bytes, span.src + bytes, span.bytes - bytes};
    }
  }
  for (Lanes::Lease &lease : leases) lease.wait(TP_OP_COPY);
}

void Copies::copy_blocks(const BlockCopies &blocks, uint32_t threads) {
  const Context::Scope scope(context_, TP_OP_COPY);
  const Kernels *compiled = kernels();
  if (compiled == nullptr || !Kernels::can_copy(blocks)) return copy(TP_COPY_DEVICE, spans_of(blocks), threads);
  copy_blocks_by_kernel(*compiled, blocks);
}

void Copies::copy_blocks_by_kernel(const Kernels &compiled, const BlockCopies &blocks) {
  for (uint64_t first = 0; first < blocks.count; first += kMostBlocks) {
    const uint64_t count = std::min(kMostBlocks, blocks.count - first), bytes = count * sizeof(uint64_t);
    Lanes::Lease lease(lanes_, 2 * bytes, TP_OP_COPY);
    auto *ids = static_cast<uint64_t *>(lease.lane.buffer);
    std::memcpy(ids, blocks.dst_ids + first, bytes);
    std::memcpy(ids + count, blocks.src_ids + first, bytes);
    compiled.copy({blocks.dst, blocks.src, blocks.block_bytes, ids, ids + count, count}, lease.lane.stream);
    lease.wait(TP_OP_COPY);
  }
}

void Copies::hash(const std::vector<HashItem> &chunks, uint32_t threads) {
  const Context::Scope scope(context_, TP_OP_HASH);
  if (const Kernels *compiled = kernels()) return hash_by_kernel(*compiled, chunks.data(), chunks.size());
  parallel_for(chunks.size(), threads, [&](uint64_t i) { hash_staged(chunks[i]); });
}

void Copies::hash_by_kernel(const Kernels &compiled, const HashItem *chunks, uint64_t count) {
  if (count == 0) return;
  const uint64_t most = largest(chunks, count, [](const HashItem &chunk) { return chunk.bytes; });
  Lanes::Lease lease(lanes_, SumTable::bytes(count, most), TP_OP_HASH);
  SumTable sums(lease.lane.buffer, count, most);
  for (uint64_t i = 0; i < count; ++i) sums.set(i, {chunks[i].address, chunks[i].bytes});
  compiled.sum(sums, 0, count, lease.lane.stream);
  lease.wait(TP_OP_HASH);
  for (uint64_t i = 0; i < count; ++i) *chunks[i].out = sums.hash(i);
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

// The device hashes what has arrived while the next pieces arrive: reading it takes a hundredth of the time that the link does.
void Copies::restore(const std::vector<CheckedCopy> &chunks, const Meanwhile &meanwhile) {
  const Kernels &compiled = *kernels();
  const std::vector<Piece> pieces = pieces_of(chunks);
  const uint64_t most = largest(chunks);
  Lanes::Lease checker(lanes_, SumTable::bytes(chunks.size(), most), TP_OP_HASH);
  SumTable sums(checker.lane.buffer, chunks.size(), most);
  for (uint64_t i = 0; i < chunks.size(); ++i) sums.set(i, {chunks[i].span.dst, chunks[i].span.bytes});
  Flight flight(lanes_, TP_COPY_TO_DEVICE);
  for (const Piece &piece : pieces) {
    flight.start(piece.span).hold(checker.lane.stream, TP_OP_HASH);
    compiled.sum(sums, piece.first, piece.last, checker.lane.stream);
  }
  if (meanwhile) {
    wait_until_late(flight, pieces);
    meanwhile();
  }
  flight.wait();
  checker.wait(TP_OP_HASH);
  for (uint64_t i = 0; i < chunks.size(); ++i) *chunks[i].hash = sums.hash(i);
}

// The processors hash what lies in host memory, chunk by chunk behind the copies: nobody else can say what is really there.
void Copies::save(const std::vector<CheckedCopy> &chunks, uint32_t threads) {
  const std::vector<Piece> pieces = pieces_of(chunks);
  std::vector<uint64_t> piece_of(chunks.size());
  Flight flight(lanes_, TP_COPY_TO_HOST);
  for (uint64_t p = 0; p < pieces.size(); ++p) {
    flight.start(pieces[p].span);
    for (uint64_t i = pieces[p].first; i < pieces[p].last; ++i) piece_of[i] = p;
  }
  parallel_for(chunks.size(), threads, [&](uint64_t i) {
    const Context::Scope scope(context_, TP_OP_COPY);
    flight.wait(piece_of[i]);
    *chunks[i].hash = hash_chunk(reinterpret_cast<const void *>(chunks[i].span.dst), chunks[i].span.bytes);
  });
}

}  // namespace torpor::cuda
