#include "chunks.h"

#include <algorithm>
#include <atomic>

#include "hash.h"
#include "parallel.h"

namespace torpor {
namespace {

tp_span to_host(const ImageChunk &chunk) { return {chunk.host(), chunk.device(), chunk.bytes}; }
tp_span to_device(const ImageChunk &chunk) { return {chunk.device(), chunk.host(), chunk.bytes}; }

uint64_t hash_on_host(const ImageChunk &chunk) { return hash_chunk(reinterpret_cast<const void *>(chunk.host()), chunk.bytes); }

void hash_on_device(Driver &driver, const ImageChunk &chunk, uint64_t *out) { driver.hash({{chunk.device(), chunk.bytes, out}}, 1); }

// Where many chunks in a row had changed, the next is copied without asking: hashing it first would be one read more, and a chunk that
// turns out unchanged is as right as before.
class Streak {
 public:
  bool on() const noexcept { return length_.load(std::memory_order_relaxed) >= kLong; }
  void note(bool changed) noexcept {
    if (changed) {
      length_.fetch_add(1, std::memory_order_relaxed);
    } else {
      length_.store(0, std::memory_order_relaxed);
    }
  }

 private:
  static constexpr uint64_t kLong = 8;
  std::atomic<uint64_t> length_{0};
};

bool is_known(const ImageChunk &chunk) { return chunk.image->known[chunk.index] == chunk.image->source[chunk.index]; }
bool is_valid(const ImageChunk &chunk) { return chunk.image->valid[chunk.index] != 0; }

// Hashed first only where the image may turn out to be right. The flag of a chunk that is about to be overwritten is cleared.
void save_chunk(Driver &driver, const ImageChunk &chunk, Streak &streak) {
  const bool was_valid = is_valid(chunk);
  uint64_t *source = chunk.image->source + chunk.index;
  if (was_valid && !streak.on()) {
    hash_on_device(driver, chunk, source);
    if (is_known(chunk)) return streak.note(false);
  }
  chunk.image->valid[chunk.index] = 0;
  *source = driver.copy_hashed(TP_COPY_TO_HOST, to_host(chunk));
  chunk.image->checked[chunk.index] = hash_on_host(chunk);
  streak.note(!was_valid || !is_known(chunk));
}

// For drivers that copy in batches.
template <typename AsCopy>
std::vector<CheckedCopy> batch_of(const std::vector<ImageChunk> &chunks, const AsCopy &as_copy) {
  std::vector<CheckedCopy> out;
  out.reserve(chunks.size());
  const ImageChunk *before = nullptr;
  for (const ImageChunk &chunk : chunks) {
    out.push_back(as_copy(chunk));
    out.back().follows = before != nullptr && chunk.follows(*before);
    before = &chunk;
  }
  return out;
}

// Where a chunk's hash is not known it is copied.
void save_in_batches(Driver &driver, const std::vector<ImageChunk> &chunks, uint32_t threads) {
  const auto copies = batch_of(chunks, [](const ImageChunk &chunk) {
    return CheckedCopy{to_host(chunk), chunk.image->checked + chunk.index, false, chunk.image->source + chunk.index};
  });
  driver.save(copies, threads, [&](uint64_t i) {
    if (is_valid(chunks[i]) && is_known(chunks[i])) return false;
    chunks[i].image->valid[chunks[i].index] = 0;
    return true;
  });
}

}  // namespace

std::vector<ImageChunk> wanted_chunks(const Images &images) {
  std::vector<ImageChunk> out;
  for (const tp_image &image : images.list) {
    uint64_t bytes = 0;
    for (uint64_t i = 0, offset = 0; offset < image.bytes; ++i, offset += bytes) {
      bytes = std::min(images.chunk_bytes, image.bytes - offset);
      if (image.wanted[i] != 0) out.push_back({&image, i, offset, bytes});
    }
  }
  return out;
}

void save_chunks(Driver &driver, const std::vector<ImageChunk> &chunks, uint32_t threads) {
  if (chunks.empty()) return;
  driver.quiesce();
  if (!driver.chunk_by_chunk()) return save_in_batches(driver, chunks, threads);
  Streak streak;
  parallel_for(chunks.size(), threads, [&](uint64_t k) { save_chunk(driver, chunks[k], streak); });
}

void restore_chunks(Driver &driver, const std::vector<ImageChunk> &chunks, uint32_t threads, const Beside &beside) {
  if (driver.chunk_by_chunk() || chunks.empty()) {
    if (beside.work) beside.work([] {});
    if (beside.meanwhile) beside.meanwhile();
    return parallel_for(chunks.size(), threads, [&](uint64_t k) {
      driver.copy_hashed(TP_COPY_TO_DEVICE, to_device(chunks[k]));
      hash_on_device(driver, chunks[k], chunks[k].image->checked + chunks[k].index);
    });
  }
  const auto copies = batch_of(chunks, [](const ImageChunk &chunk) {
    return CheckedCopy{to_device(chunk), chunk.image->checked + chunk.index};
  });
  driver.restore(copies, threads, beside);
}

}  // namespace torpor
