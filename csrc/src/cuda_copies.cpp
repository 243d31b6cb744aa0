#include "cuda_copies.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>

#include "hash.h"
#include "parallel.h"

namespace torpor::cuda {
namespace {

constexpr uint32_t kMaxStreams = 4;  // one saturates the link, a few keep it full between pieces
constexpr uint64_t kCopyPiece = uint64_t{32} << 20;
constexpr uint64_t kStageBytes = uint64_t{4} << 20;
constexpr size_t kDepth = 4;                         // pieces in flight per stream: the next one is always waiting
constexpr uint64_t kSavePiece = uint64_t{4} << 20;  // of a copy to the host, which is hashed close behind
constexpr uint64_t kHashPart = uint64_t{256} << 10;
constexpr uint64_t kClearedPerNs = 400;  // bytes; an H200 clears 48 GiB in about 0.12 s

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

// Chunks of one image in a row, copied in one go. Never of two: their regions come to memory one after the other, and the driver
// refuses a copy over the border of two reservations, however close they lie.
struct Piece {
  tp_span span;
  uint64_t first, last;  // of the chunks
};

std::vector<Piece> pieces_of(const std::vector<CheckedCopy> &chunks, uint64_t most) {
  std::vector<Piece> out;
  for (uint64_t i = 0; i < chunks.size(); ++i) {
    const tp_span &next = chunks[i].span;
    if (!out.empty()) {
      Piece &piece = out.back();
      const tp_span &have = piece.span;
      if (chunks[i].follows && have.bytes + next.bytes <= most) {
        piece.span.bytes += next.bytes, piece.last = i + 1;
        continue;
      }
    }
    out.push_back({next, i, i + 1});
  }
  return out;
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
  Flight(Lanes &lanes, bool spin) : spin_(spin), lease_(lanes, 0, TP_OP_COPY) {}
  CUstream stream() const { return lease_.lane.stream; }
  // Behind what was started last. Waits until there are fewer than kDepth in front; `landed` is then called for what has ended.
  template <typename Landed>
  const Event &mark(const Landed &landed) {
    if (events_.size() == kDepth) land(landed);
    events_.emplace_back(spin_);
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
  const bool spin_;
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

// Threads that work beside the caller. When anybody throws, `stop` tells the others, and the first failure leaves run().
class Crew {
 public:
  Crew() = default;
  Crew(const Crew &) = delete;
  Crew &operator=(const Crew &) = delete;
  ~Crew() { join(); }

  template <typename Body, typename Stop>
  void hire(const Body &body, const Stop &stop) {
    try {
      threads_.emplace_back([this, &stop, body]() noexcept { guarded(body, stop); });
    } catch (const std::exception &) {
      // No thread to be had: the others, or the caller, do its work.
    }
  }
  bool empty() const { return threads_.empty(); }
  // The caller's part, and the end of all others.
  template <typename Body, typename Stop>
  void run(const Body &body, const Stop &stop) {
    guarded(body, stop);
    join();
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  template <typename Body, typename Stop>
  void guarded(const Body &body, const Stop &stop) noexcept {
    try {
      body();
    } catch (...) {
      std::lock_guard<std::mutex> guard(mutex_);
      if (!failure_) failure_ = std::current_exception();
      stop();
    }
  }
  void join() {
    for (std::thread &thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::exception_ptr failure_;
};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

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
  blocks_.copy(*compiled, blocks);
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

void Copies::copy_checked(tp_copy_kind kind, const std::vector<CheckedCopy> &chunks, uint32_t threads, const Beside &beside) {
  const Context::Scope scope(context_, TP_OP_COPY);
  if (kind == TP_COPY_TO_HOST) return save(chunks, threads);
  const Kernels *compiled = kernels();
  if (compiled != nullptr && !chunks.empty()) return restore(*compiled, chunks, beside);
  if (beside.work) beside.work();
  std::vector<tp_span> spans;
  std::vector<HashItem> arrived;
  for (const CheckedCopy &chunk : chunks) {
    spans.push_back(chunk.span);
    arrived.push_back({chunk.span.dst, chunk.span.bytes, chunk.hash});
  }
  copy(kind, spans, threads);
  hash(arrived, threads);
}

void Copies::note_released(uint64_t bytes) {
  const int64_t begin = std::max(cleared_ns_.load(), now_ns());
  cleared_ns_ = begin + static_cast<int64_t>(bytes / kClearedPerNs);
}

bool Copies::clearing() const { return now_ns() < cleared_ns_; }

// A copy engine moves the pieces. While the device clears what was released a moment ago, it does that with the copy engines, and a
// kernel that reads host memory helps; at other times it would be in the way. What has arrived is hashed while the next pieces arrive:
// reading it takes a hundredth of the time that the link does.
void Copies::restore(const Kernels &compiled, const std::vector<CheckedCopy> &chunks, const Beside &beside) {
  const std::vector<Piece> pieces = pieces_of(chunks, kCopyPiece);
  const uint64_t most = largest(chunks, [](const CheckedCopy &chunk) { return chunk.span.bytes; });
  Lanes::Lease checker(lanes_, SumTable::bytes(chunks.size(), most), TP_OP_HASH);
  SumTable sums(checker.lane.buffer, chunks.size(), most);
  for (uint64_t i = 0; i < chunks.size(); ++i) sums.set(i, {chunks[i].span.dst, chunks[i].span.bytes});

  std::atomic<uint64_t> next{0};
  const auto move = [&](bool by_kernel) {
    const Context::Scope scope(context_, TP_OP_COPY);
    Flight flight(lanes_, false);
    while (!by_kernel || clearing()) {
      const uint64_t p = next.fetch_add(1);
      if (p >= pieces.size()) break;
      const Piece &piece = pieces[p];
      if (beside.ready && !beside.ready({piece.span.dst, piece.span.bytes})) break;
      if (by_kernel && can_pull(piece.span)) {
        compiled.pull(piece.span, flight.stream());
      } else {
        start(TP_COPY_TO_DEVICE, piece.span, flight.stream());
      }
      flight.mark(nothing).hold(checker.lane.stream, TP_OP_HASH);
      compiled.sum(sums, piece.first, piece.last, checker.lane.stream);
    }
    flight.finish(nothing);
  };
  const auto stop = [&] { next = pieces.size(); };
  Crew crew;
  crew.hire([&] { move(false); }, stop);
  if (clearing()) crew.hire([&] { move(true); }, stop);
  crew.run([&] {
    if (beside.work) beside.work();
  }, stop);
  if (crew.empty()) move(false);
  checker.wait(TP_OP_HASH);
  for (uint64_t i = 0; i < chunks.size(); ++i) *chunks[i].hash = sums.hash(i);
}

bool Copies::can_pull(const tp_span &span) {
  return span.dst % 16 == 0 && span.src % 16 == 0 && span.bytes % 16 == 0 && locks_.locked({span.src, span.bytes});
}

// The processors hash what lies in host memory, close behind the copies: nobody else can say what is really there.
void Copies::save(const std::vector<CheckedCopy> &chunks, uint32_t threads) {
  const std::vector<Piece> pieces = pieces_of(chunks, kSavePiece);
  const std::vector<Part> parts = parts_of(chunks, pieces);
  std::vector<std::atomic<uint64_t>> sums(chunks.size());
  Arrivals arrivals;
  const auto copy_all = [&] {
    const Context::Scope scope(context_, TP_OP_COPY);
    try {
      Flight flight(lanes_, true);
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
    for (uint64_t i = next.fetch_add(1); i < parts.size() && arrivals.wait(parts[i].piece); i = next.fetch_add(1)) {
      ChunkHash part = ChunkHash::from(parts[i].offset);
      part.add(reinterpret_cast<const void *>(chunks[parts[i].chunk].span.dst + parts[i].offset), parts[i].bytes);
      sums[parts[i].chunk] += part.sum();
    }
  };
  // The first is the caller's: where no threads are to be had, copying comes first.
  parallel_for(threads + 1, threads + 1, [&](uint64_t i) { i == 0 ? copy_all() : hash_some(); });
  for (uint64_t i = 0; i < chunks.size(); ++i) {
    ChunkHash whole;
    whole.add_summed(sums[i], chunks[i].span.bytes);
    *chunks[i].hash = whole.finish();
  }
}

}  // namespace torpor::cuda
