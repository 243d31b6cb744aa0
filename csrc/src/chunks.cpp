#include "chunks.h"

#include <atomic>

#include "hash.h"
#include "parallel.h"

namespace torpor {
namespace {

using Indices = std::vector<uint64_t>;

Indices wanted_indices(const Chunks &chunks) {
  Indices out;
  for (uint64_t i = 0; i < chunks.count(); ++i) {
    if (chunks.wanted[i] != 0) out.push_back(i);
  }
  return out;
}

tp_span to_host(const Chunks &chunks, uint64_t i) {
  return {chunks.host + chunks.offset(i), chunks.device + chunks.offset(i), chunks.size(i)};
}

tp_span to_device(const Chunks &chunks, uint64_t i) {
  return {chunks.device + chunks.offset(i), chunks.host + chunks.offset(i), chunks.size(i)};
}

uint64_t hash_on_host(const Chunks &chunks, uint64_t i) {
  return hash_chunk(reinterpret_cast<const void *>(chunks.host + chunks.offset(i)), chunks.size(i));
}

void hash_on_device(Driver &driver, const Chunks &chunks, uint64_t i, uint64_t *out) {
  driver.hash({chunks.device + chunks.offset(i), chunks.size(i), chunks.chunk_bytes, out + i}, 1);
}

// One driver call per stretch of neighbours.
void hash_stretches(Driver &driver, const Chunks &chunks, const Indices &indices, uint64_t *out, uint32_t threads) {
  for (size_t first = 0, last = 0; first < indices.size(); first = last) {
    for (last = first + 1; last < indices.size() && indices[last] == indices[last - 1] + 1;) ++last;
    const uint64_t start = indices[first], end = indices[last - 1];
    const uint64_t bytes = chunks.offset(end) + chunks.size(end) - chunks.offset(start);
    driver.hash({chunks.device + chunks.offset(start), bytes, chunks.chunk_bytes, out + start}, threads);
  }
}

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

// Clears the flag of a chunk that is about to be overwritten.
bool needs_copy(const SaveHashes &hashes, uint64_t i) {
  if (hashes.valid[i] != 0 && hashes.known[i] == hashes.source[i]) return false;
  hashes.valid[i] = 0;
  return true;
}

// Hashed first only where the image may turn out to be right.
void save_chunk(Driver &driver, const Chunks &chunks, const SaveHashes &hashes, uint64_t i, Streak &streak) {
  const bool was_valid = hashes.valid[i] != 0;
  if (was_valid && !streak.on()) {
    hash_on_device(driver, chunks, i, hashes.source);
    if (hashes.known[i] == hashes.source[i]) return streak.note(false);
  }
  hashes.valid[i] = 0;
  hashes.source[i] = driver.copy_hashed(TP_COPY_TO_HOST, to_host(chunks, i));
  hashes.copied[i] = hash_on_host(chunks, i);
  streak.note(!was_valid || hashes.known[i] != hashes.source[i]);
}

}  // namespace

void save_chunks(Driver &driver, const Chunks &chunks, const SaveHashes &hashes, uint32_t threads) {
  const Indices indices = wanted_indices(chunks);
  if (driver.chunk_by_chunk()) {
    Streak streak;
    return parallel_for(indices.size(), threads, [&](uint64_t k) { save_chunk(driver, chunks, hashes, indices[k], streak); });
  }
  hash_stretches(driver, chunks, indices, hashes.source, threads);
  std::vector<tp_span> spans;
  Indices changed;
  for (uint64_t i : indices) {
    if (!needs_copy(hashes, i)) continue;
    changed.push_back(i);
    spans.push_back(to_host(chunks, i));
  }
  if (changed.empty()) return;
  driver.copy(TP_COPY_TO_HOST, spans, threads);
  parallel_for(changed.size(), threads, [&](uint64_t k) { hashes.copied[changed[k]] = hash_on_host(chunks, changed[k]); });
}

void restore_chunks(Driver &driver, const Chunks &chunks, uint64_t *arrived, uint32_t threads) {
  const Indices indices = wanted_indices(chunks);
  if (driver.chunk_by_chunk()) {
    return parallel_for(indices.size(), threads, [&](uint64_t k) {
      driver.copy_hashed(TP_COPY_TO_DEVICE, to_device(chunks, indices[k]));
      hash_on_device(driver, chunks, indices[k], arrived);
    });
  }
  std::vector<tp_span> spans;
  for (uint64_t i : indices) spans.push_back(to_device(chunks, i));
  if (spans.empty()) return;
  driver.copy(TP_COPY_TO_DEVICE, spans, threads);
  hash_stretches(driver, chunks, indices, arrived, threads);
}

}  // namespace torpor
