// The chunk hash. It decides whether content has changed (M7), so its definition is fixed: the same bytes have the same hash on
// every driver and machine. Not cryptographic.
//
// A chunk of n bytes is read as 64-bit little-endian words w[0..m), m = ceil(n / 8), the last padded with zero bytes.
// All arithmetic is unsigned, modulo 2^64; lo and hi are the 32-bit halves of a word.
//
//     k = K + i * G                      G = 0x9e3779b97f4a7c15, K = 0xd1b54a32d192ed03
//     x = w[i] ^ k
//     x = x ^ (x >> 32)
//     x = x * M                          M = 0x9e3779b1
//     z = x ^ (x >> 32)
//     S = sum over i of z * (2 * z + 1)
//     hash = mix(S + n * G)              mix(v): v ^= v >> 30; v *= 0xbf58476d1ce4e5b9;
//                                                v ^= v >> 27; v *= 0x94d049bb133111eb; v ^= v >> 31
//
// Every step from w[i] to its summand is a bijection of 64-bit words (z * (2 z + 1) is RC6's), and so is mix. Hence two chunks of
// one length that differ within one word always have different hashes; other differences meet at random, one in 2^64.
// The sum has no order, so lanes, threads and the programs of a GPU kernel may each add up a part. In vectors
// z * (2 z + 1) = z + 2 * lo * lo + (lo * hi << 34), whose three sums are kept apart until the end.
#pragma once

#include <cstdint>

#include "driver.h"

namespace torpor {

// One chunk, given in parts; every part but the last is a multiple of 8 bytes.
class ChunkHash {
 public:
  ChunkHash() = default;
  // Begins in the middle, at a multiple of 8 bytes: only its sum says something then.
  static ChunkHash from(uint64_t offset) noexcept {
    ChunkHash hash;
    hash.bytes_ = offset;
    return hash;
  }
  void add(const void *data, uint64_t bytes) noexcept;
  // A first part whose sum is known.
  void add_summed(uint64_t sum, uint64_t bytes) noexcept {
    sum_ += sum;
    bytes_ += bytes;
  }
  uint64_t sum() const noexcept { return sum_; }
  uint64_t finish() const noexcept;

 private:
  uint64_t sum_ = 0;
  uint64_t bytes_ = 0;
};

uint64_t hash_chunk(const void *data, uint64_t bytes) noexcept;

// Copies, and gives the hash of the bytes that it read. Past the caches: whoever reads the copy reads memory, and neither side's old
// content has to be fetched or displaced.
uint64_t copy_and_hash(void *to, const void *from, uint64_t bytes) noexcept;

// Chunks whose memory this process can read.
void hash_chunks(const std::vector<HashItem> &chunks, uint32_t threads);

namespace hash_detail {
// The sum over `words` words, of which the first has the index `first`. What the machine cannot run is null. Tests compare them.
using Kernel = uint64_t (*)(const unsigned char *data, uint64_t words, uint64_t first) noexcept;
uint64_t sum_portable(const unsigned char *data, uint64_t words, uint64_t first) noexcept;
Kernel kernel_avx2() noexcept;
Kernel kernel_avx512() noexcept;
// The same sum, of words that are copied on the way; `words` is a multiple of 8 and `to` of 64.
using CopyKernel = uint64_t (*)(unsigned char *to, const unsigned char *from, uint64_t words) noexcept;
uint64_t copy_portable(unsigned char *to, const unsigned char *from, uint64_t words) noexcept;
CopyKernel copy_avx2() noexcept;
CopyKernel copy_avx512() noexcept;
}  // namespace hash_detail

}  // namespace torpor
