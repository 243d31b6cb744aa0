// The chunk hash keeps its definition, on every kernel (M7 relies on it).
#include "hash.h"

#include <cstring>
#include <set>

#include "fixture.h"

using namespace torpor;
using fixture::Bytes;
using fixture::pattern;

namespace {

// The text of hash.h, word by word.
uint64_t by_definition(const Bytes &data) {
  const uint64_t G = 0x9e3779b97f4a7c15u, K = 0xd1b54a32d192ed03u, M = 0x9e3779b1u;
  uint64_t sum = 0;
  for (uint64_t i = 0; i < (data.size() + 7) / 8; ++i) {
    uint64_t w = 0;
    for (uint64_t b = 0; b < 8 && 8 * i + b < data.size(); ++b) w |= uint64_t{data[8 * i + b]} << (8 * b);
    uint64_t x = w ^ (K + i * G);
    x ^= x >> 32;
    x *= M;
    const uint64_t z = x ^ (x >> 32);
    sum += z * (2 * z + 1);
  }
  uint64_t v = sum + data.size() * G;
  v ^= v >> 30, v *= 0xbf58476d1ce4e5b9u;
  v ^= v >> 27, v *= 0x94d049bb133111ebu;
  return v ^ (v >> 31);
}

uint64_t hash(const Bytes &data) { return hash_chunk(data.data(), data.size()); }

}  // namespace

TEST(hash_is_its_definition_at_every_length) {
  for (uint64_t n = 0; n < 300; ++n) {
    const Bytes data = pattern(n, n);
    CHECK_EQ(hash(data), by_definition(data));
  }
}

TEST(hash_values_are_fixed) {
  CHECK_EQ(hash(Bytes{}), 0u);
  CHECK_EQ(hash(Bytes(8, 0)), 0xa7bb326531e487b4u);
  CHECK_EQ(hash(Bytes{'t', 'o', 'r', 'p', 'o', 'r'}), 0xd834093275e3c2f1u);
}

TEST(hash_kernels_agree) {
  const Bytes data = pattern(8 * 1037 + 1, 5);
  for (const auto kernel : {hash_detail::kernel_avx2(), hash_detail::kernel_avx512()}) {
    if (kernel == nullptr) continue;
    for (uint64_t words = 0; words < 1037; words += words < 40 ? 1 : 97) {
      const unsigned char *unaligned = data.data() + 1;
      CHECK_EQ(kernel(unaligned, words, words * 3), hash_detail::sum_portable(unaligned, words, words * 3));
    }
  }
}

TEST(hash_of_parts_is_hash_of_whole) {
  const Bytes data = pattern(4096 + 3, 9);
  ChunkHash parts;
  for (uint64_t at = 0, n = 8; at < data.size(); at += n, n = n * 3) {
    n = std::min<uint64_t>(n, data.size() - at);
    parts.add(data.data() + at, n);
  }
  CHECK_EQ(parts.finish(), hash(data));
}

TEST(hash_changes_with_every_bit) {
  for (const unsigned char fill : {0x00, 0xff, 0x5a}) {
    Bytes data(523, fill);
    std::set<uint64_t> seen{hash(data)};
    for (uint64_t bit = 0; bit < 8 * data.size(); ++bit) {
      data[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
      CHECK(seen.insert(hash(data)).second);
      data[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
    }
  }
}

// Two changes that undo each other in a plain sum: signs flipped apart, words swapped, a value moved.
TEST(hash_changes_with_pairs_of_changes) {
  Bytes data = pattern(4096, 77);
  const uint64_t whole = hash(data);
  std::set<uint64_t> seen{whole};
  for (uint64_t i = 0; i < 512; ++i) {
    for (uint64_t j = i + 1; j < 512; j += 7) {
      data[8 * i + 7] ^= 0x80;
      data[8 * j + 7] ^= 0x80;
      CHECK(seen.insert(hash(data)).second);
      data[8 * i + 7] ^= 0x80;
      data[8 * j + 7] ^= 0x80;
      for (int b = 0; b < 8; ++b) std::swap(data[8 * i + b], data[8 * j + b]);
      CHECK(seen.insert(hash(data)).second);
      for (int b = 0; b < 8; ++b) std::swap(data[8 * i + b], data[8 * j + b]);
    }
  }
  CHECK_EQ(hash(data), whole);
}

TEST(hash_depends_on_length) {
  std::set<uint64_t> seen;
  for (uint64_t n = 0; n < 600; ++n) CHECK(seen.insert(hash(Bytes(n, 0))).second);
}

TEST(hash_is_the_same_on_device_and_host) {
  fixture::Device device;
  tp_region *region = device.region(3);
  const uint64_t bytes = 2 * device.granule + 4096 - 8;
  const Bytes data = pattern(bytes, 3);
  const uint64_t address = fixture::stats(region).address;
  device.write(address, data);
  const uint64_t chunk = device.granule / 2;
  const uint64_t chunks = (bytes + chunk - 1) / chunk;
  std::vector<uint64_t> there(chunks), here(chunks);
  OK(tp_hash(device.handle, address, bytes, chunk, 0, there.data(), 3, &err));
  OK(tp_hash(device.handle, reinterpret_cast<uint64_t>(data.data()), bytes, chunk, 1, here.data(), 1, &err));
  for (uint64_t i = 0; i < chunks; ++i) {
    CHECK_EQ(there[i], here[i]);
    const uint64_t end = std::min((i + 1) * chunk, bytes);
    CHECK_EQ(here[i], by_definition(Bytes(data.begin() + static_cast<long>(i * chunk), data.begin() + static_cast<long>(end))));
  }
  fixture::destroy(region);
  device.close();
}

TEST(hash_of_a_copy_is_that_of_the_bytes_at_every_length_and_alignment) {
  alignas(64) static unsigned char target[5000];
  for (const uint64_t offset : {0, 1, 8, 63}) {
    for (uint64_t n = 0; n < 4800; n += n < 200 ? 1 : 331) {
      const Bytes data = pattern(n, n + offset);
      std::memset(target, 0xA5, sizeof target);
      CHECK_EQ(copy_and_hash(target + offset, data.data(), n), by_definition(data));
      CHECK(n == 0 || std::memcmp(target + offset, data.data(), n) == 0);  // an empty vector has no address
      CHECK_EQ(int{target[offset + n]}, 0xA5);
    }
  }
}

TEST(hash_copy_kernels_agree) {
  const Bytes data = pattern(8 * 1040 + 1, 7);
  alignas(64) static unsigned char target[8 * 1040];
  for (const auto kernel : {hash_detail::copy_avx2(), hash_detail::copy_avx512(), &hash_detail::copy_portable}) {
    if (kernel == nullptr) continue;
    for (uint64_t words = 0; words <= 1040; words += 8) {
      const unsigned char *unaligned = data.data() + 1;
      std::memset(target, 0, sizeof target);
      CHECK_EQ(kernel(target, unaligned, words), hash_detail::sum_portable(unaligned, words, 0));
      CHECK(std::memcmp(target, unaligned, 8 * words) == 0);
    }
  }
}
