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
    try {
      kernels_ = std::make_unique<Kernels>(context_);
      asked_ = true;
    } catch (const Error &error) {
      why_staged_ = error.message;
      asked_ = error.status == TP_UNSUPPORTED;  // else it was the moment: a device that is full, say
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

std::unique_ptr<Flight> Copies::begin_blocks(const tp_blocks &blocks, uint32_t threads) {
  const Context::Scope scope(context_, TP_OP_COPY);
  const Kernels *compiled = kernels();
  if (compiled != nullptr && Kernels::can_copy(blocks)) return blocks_.begin(*compiled, blocks);
  copy(TP_COPY_DEVICE, spans_of(blocks), threads);
  return nullptr;
}

void Copies::hash(const std::vector<HashItem> &chunks, uint32_t threads) {
  if (chunks.empty()) return;
  const Context::Scope scope(context_, TP_OP_HASH);
  if (const Kernels *compiled = kernels()) return hash_by_kernel(*compiled, chunks);
  parallel_for(chunks.size(), threads, [&](uint64_t i) { hash_staged(chunks[i]); });
}

void Copies::hash_by_kernel(const Kernels &compiled, const std::vector<HashItem> &chunks) {
  uint64_t most = 0;
  for (const HashItem &chunk : chunks) most = std::max(most, chunk.bytes);
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

}  // namespace torpor::cuda
