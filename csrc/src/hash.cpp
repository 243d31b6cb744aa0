#include "hash.h"

#include <cstring>

#include "parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define TORPOR_X86 1
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the chunk hash reads words in little-endian order");

namespace torpor {
namespace {

constexpr uint64_t kG = 0x9e3779b97f4a7c15u;
constexpr uint64_t kK = 0xd1b54a32d192ed03u;
constexpr uint64_t kM = 0x9e3779b1u;
constexpr uint64_t kCopyBlock = 4096;
constexpr uint64_t kAhead = 8192;  // bytes that are fetched before they are summed; what lies behind the data does no harm

inline uint64_t term(uint64_t word, uint64_t index) noexcept {
  uint64_t x = word ^ (kK + index * kG);
  x ^= x >> 32;
  x *= kM;
  x ^= x >> 32;
  return x * (2 * x + 1);
}

inline uint64_t load(const unsigned char *at) noexcept {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

inline uint64_t mix(uint64_t v) noexcept {
  v = (v ^ (v >> 30)) * 0xbf58476d1ce4e5b9u;
  v = (v ^ (v >> 27)) * 0x94d049bb133111ebu;
  return v ^ (v >> 31);
}

#ifdef TORPOR_X86

// Into the second cache. A core that fetches by itself only what it asks for has too few lines under way: 6 GB/s become 12 on a Xeon,
// and an EPYC, which fetches ahead, stays at 24.
inline void fetch(const unsigned char *at) noexcept { _mm_prefetch(reinterpret_cast<const char *>(at), _MM_HINT_T1); }

struct Sums256 {
  __m256i z, square, cross;
};

__attribute__((target("avx2"), always_inline)) inline void add256(Sums256 &sums, __m256i word, __m256i key) noexcept {
  const __m256i m = _mm256_set1_epi64x(static_cast<int64_t>(kM));
  __m256i x = _mm256_xor_si256(word, key);
  __m256i high = _mm256_srli_epi64(x, 32);
  x = _mm256_xor_si256(x, high);  // its high half is still `high`
  x = _mm256_add_epi64(_mm256_mul_epu32(x, m), _mm256_slli_epi64(_mm256_mul_epu32(high, m), 32));
  high = _mm256_srli_epi64(x, 32);
  x = _mm256_xor_si256(x, high);
  sums.z = _mm256_add_epi64(sums.z, x);
  sums.square = _mm256_add_epi64(sums.square, _mm256_mul_epu32(x, x));
  sums.cross = _mm256_add_epi64(sums.cross, _mm256_mul_epu32(x, high));
}

__attribute__((target("avx2"))) uint64_t fold256(const Sums256 &sums) noexcept {
  __m256i v = _mm256_add_epi64(sums.z, _mm256_slli_epi64(sums.square, 1));
  v = _mm256_add_epi64(v, _mm256_slli_epi64(sums.cross, 34));
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), v);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

__attribute__((target("avx2"))) uint64_t sum_avx2(const unsigned char *data, uint64_t words, uint64_t first) noexcept {
  const __m256i zero = _mm256_setzero_si256();
  Sums256 even{zero, zero, zero}, odd{zero, zero, zero};
  const __m256i step = _mm256_set1_epi64x(static_cast<int64_t>(4 * kG));
  const auto key = [first](uint64_t i) { return static_cast<int64_t>(kK + (first + i) * kG); };
  __m256i keys = _mm256_set_epi64x(key(3), key(2), key(1), key(0));
  const uint64_t whole = words & ~uint64_t{7};
  for (uint64_t i = 0; i < whole; i += 8) {
    const auto *at = reinterpret_cast<const __m256i *>(data + 8 * i);
    fetch(data + 8 * i + kAhead);
    add256(even, _mm256_loadu_si256(at), keys);
    keys = _mm256_add_epi64(keys, step);
    add256(odd, _mm256_loadu_si256(at + 1), keys);
    keys = _mm256_add_epi64(keys, step);
  }
  return fold256(even) + fold256(odd) + hash_detail::sum_portable(data + 8 * whole, words - whole, first + whole);
}

__attribute__((target("avx2"))) uint64_t copy_sum_avx2(unsigned char *to, const unsigned char *from, uint64_t words) noexcept {
  const __m256i zero = _mm256_setzero_si256();
  Sums256 even{zero, zero, zero}, odd{zero, zero, zero};
  const __m256i step = _mm256_set1_epi64x(static_cast<int64_t>(4 * kG));
  const auto key = [](uint64_t i) { return static_cast<int64_t>(kK + i * kG); };
  __m256i keys = _mm256_set_epi64x(key(3), key(2), key(1), key(0));
  for (uint64_t i = 0; i < words; i += 8) {
    const auto *in = reinterpret_cast<const __m256i *>(from + 8 * i);
    auto *out = reinterpret_cast<__m256i *>(to + 8 * i);
    const __m256i first = _mm256_loadu_si256(in), second = _mm256_loadu_si256(in + 1);
    _mm256_stream_si256(out, first);
    _mm256_stream_si256(out + 1, second);
    add256(even, first, keys);
    keys = _mm256_add_epi64(keys, step);
    add256(odd, second, keys);
    keys = _mm256_add_epi64(keys, step);
  }
  _mm_sfence();
  return fold256(even) + fold256(odd);
}

struct Sums512 {
  __m512i z, square, cross;
};

__attribute__((target("avx512f"), always_inline)) inline void add512(Sums512 &sums, __m512i word, __m512i key) noexcept {
  const __m512i m = _mm512_set1_epi64(static_cast<int64_t>(kM));
  __m512i x = _mm512_xor_si512(word, key);
  __m512i high = _mm512_srli_epi64(x, 32);
  x = _mm512_xor_si512(x, high);
  x = _mm512_add_epi64(_mm512_mul_epu32(x, m), _mm512_slli_epi64(_mm512_mul_epu32(high, m), 32));
  high = _mm512_srli_epi64(x, 32);
  x = _mm512_xor_si512(x, high);
  sums.z = _mm512_add_epi64(sums.z, x);
  sums.square = _mm512_add_epi64(sums.square, _mm512_mul_epu32(x, x));
  sums.cross = _mm512_add_epi64(sums.cross, _mm512_mul_epu32(x, high));
}

__attribute__((target("avx512f"))) inline __m512i keys512(uint64_t first) noexcept {
  alignas(64) uint64_t key[8];
  for (uint64_t i = 0; i < 8; ++i) key[i] = kK + (first + i) * kG;
  return _mm512_load_si512(key);
}

__attribute__((target("avx512f"))) uint64_t fold512(const Sums512 &sums) noexcept {
  __m512i v = _mm512_add_epi64(sums.z, _mm512_slli_epi64(sums.square, 1));
  v = _mm512_add_epi64(v, _mm512_slli_epi64(sums.cross, 34));
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, v);
  uint64_t sum = 0;
  for (uint64_t lane : lanes) sum += lane;
  return sum;
}

__attribute__((target("avx512f"))) uint64_t sum_avx512(const unsigned char *data, uint64_t words, uint64_t first) noexcept {
  const __m512i zero = _mm512_setzero_si512();
  Sums512 sums{zero, zero, zero};
  __m512i keys = keys512(first);
  const __m512i step = _mm512_set1_epi64(static_cast<int64_t>(8 * kG));
  const uint64_t whole = words & ~uint64_t{7};
  for (uint64_t i = 0; i < whole; i += 8) {
    fetch(data + 8 * i + kAhead);
    add512(sums, _mm512_loadu_si512(data + 8 * i), keys);
    keys = _mm512_add_epi64(keys, step);
  }
  return fold512(sums) + hash_detail::sum_portable(data + 8 * whole, words - whole, first + whole);
}

__attribute__((target("avx512f"))) uint64_t copy_sum_avx512(unsigned char *to, const unsigned char *from, uint64_t words) noexcept {
  const __m512i zero = _mm512_setzero_si512();
  Sums512 sums{zero, zero, zero};
  __m512i keys = keys512(0);
  const __m512i step = _mm512_set1_epi64(static_cast<int64_t>(8 * kG));
  for (uint64_t i = 0; i < words; i += 8) {
    const __m512i word = _mm512_loadu_si512(from + 8 * i);
    _mm512_stream_si512(reinterpret_cast<__m512i *>(to + 8 * i), word);
    add512(sums, word, keys);
    keys = _mm512_add_epi64(keys, step);
  }
  _mm_sfence();
  return fold512(sums);
}

#endif  // TORPOR_X86

hash_detail::Kernel choose_kernel() noexcept {
  if (auto kernel = hash_detail::kernel_avx512()) return kernel;
  if (auto kernel = hash_detail::kernel_avx2()) return kernel;
  return hash_detail::sum_portable;
}

hash_detail::CopyKernel choose_copy_kernel() noexcept {
  if (auto kernel = hash_detail::copy_avx512()) return kernel;
  if (auto kernel = hash_detail::copy_avx2()) return kernel;
  return hash_detail::copy_portable;
}

}  // namespace

namespace hash_detail {

uint64_t sum_portable(const unsigned char *data, uint64_t words, uint64_t first) noexcept {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < words; ++i) sum += term(load(data + 8 * i), first + i);
  return sum;
}

uint64_t copy_portable(unsigned char *to, const unsigned char *from, uint64_t words) noexcept {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < words; ++i) {
    const uint64_t word = load(from + 8 * i);
    std::memcpy(to + 8 * i, &word, sizeof word);
    sum += term(word, i);
  }
  return sum;
}

#ifdef TORPOR_X86
CopyKernel copy_avx2() noexcept { return __builtin_cpu_supports("avx2") ? copy_sum_avx2 : nullptr; }
CopyKernel copy_avx512() noexcept { return __builtin_cpu_supports("avx512f") ? copy_sum_avx512 : nullptr; }
Kernel kernel_avx2() noexcept { return __builtin_cpu_supports("avx2") ? sum_avx2 : nullptr; }
Kernel kernel_avx512() noexcept { return __builtin_cpu_supports("avx512f") ? sum_avx512 : nullptr; }
#else
CopyKernel copy_avx2() noexcept { return nullptr; }
CopyKernel copy_avx512() noexcept { return nullptr; }
Kernel kernel_avx2() noexcept { return nullptr; }
Kernel kernel_avx512() noexcept { return nullptr; }
#endif

}  // namespace hash_detail

void ChunkHash::add(const void *data, uint64_t bytes) noexcept {
  static const hash_detail::Kernel kernel = choose_kernel();
  const auto *from = static_cast<const unsigned char *>(data);
  const uint64_t words = bytes / 8, first = bytes_ / 8;
  sum_ += kernel(from, words, first);
  if (const uint64_t rest = bytes % 8) {
    uint64_t last = 0;
    std::memcpy(&last, from + 8 * words, rest);
    sum_ += term(last, first + words);
  }
  bytes_ += bytes;
}

uint64_t ChunkHash::finish() const noexcept { return mix(sum_ + bytes_ * kG); }

uint64_t hash_chunk(const void *data, uint64_t bytes) noexcept {
  ChunkHash hash;
  hash.add(data, bytes);
  return hash.finish();
}

uint64_t copy_and_hash(void *to, const void *from, uint64_t bytes) noexcept {
  static const hash_detail::CopyKernel kernel = choose_copy_kernel();
  constexpr uint64_t kLine = 64;
  auto *out = static_cast<unsigned char *>(to);
  const auto *in = static_cast<const unsigned char *>(from);
  const uint64_t lines = reinterpret_cast<uintptr_t>(to) % kLine == 0 ? bytes / kLine * kLine : 0;
  ChunkHash hash;
  hash.add_summed(kernel(out, in, lines / 8), lines);
  for (uint64_t at = lines; at < bytes; at += kCopyBlock) {
    // What is copied is hashed from the copy's own bytes: the source may change in between.
    const uint64_t size = bytes - at < kCopyBlock ? bytes - at : kCopyBlock;
    unsigned char block[kCopyBlock];
    std::memcpy(block, in + at, size);
    hash.add(block, size);
    std::memcpy(out + at, block, size);
  }
  return hash.finish();
}

void hash_chunks(const std::vector<HashItem> &chunks, uint32_t threads) {
  parallel_for(chunks.size(), threads, [&](uint64_t i) {
    *chunks[i].out = hash_chunk(reinterpret_cast<const void *>(chunks[i].address), chunks[i].bytes);
  });
}

}  // namespace torpor
