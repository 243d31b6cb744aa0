// Regions on every driver: M1, M5, M12 as far as the core carries them, P4, and what bad arguments get.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "fake_cuda.h"
#include "fixture.h"

using fixture::Bytes;
using fixture::pattern;

TEST(region_address_never_changes) {
  fixture::Device device;
  tp_region *region = device.region(5);
  const tp_region_stats first = fixture::stats(region);
  CHECK_EQ(first.bytes, 5 * device.granule);
  CHECK_EQ(first.extents, 5u);
  CHECK_EQ(first.mapped, 1);
  for (int round = 0; round < 4; ++round) {
    const Bytes data = pattern(first.bytes, round);
    device.write(first.address, data);
    CHECK(device.read(first.address, first.bytes) == data);
    fixture::unmap({region});
    CHECK_EQ(fixture::stats(region).mapped, 0);
    CHECK_EQ(device.stats().mapped_bytes, 0u);
    CHECK_EQ(device.stats().live_extents, 0u);
    fixture::map({region});
    CHECK_EQ(fixture::stats(region).address, first.address);
    CHECK_EQ(device.stats().mapped_bytes, first.bytes);
    if (check::driver() == "host") CHECK(device.read(first.address, first.bytes) == Bytes(first.bytes, 0));
  }
  fixture::destroy(region);
  CHECK_EQ(device.stats().reserved_bytes, 0u);
  device.close();
}

TEST(region_sizes_are_rounded_up_and_the_last_extent_may_be_short) {
  fixture::Device device;
  tp_region *region = nullptr;
  OK(tp_region_create(device.handle, 4 * device.granule + 1, 2 * device.granule - 1, 0, nullptr, &region, &err));
  const tp_region_stats stats = fixture::stats(region);
  CHECK_EQ(stats.bytes, 5 * device.granule);
  CHECK_EQ(stats.extent_bytes, 2 * device.granule);
  tp_extent extents[3];
  uint64_t n = 0;
  OK(tp_region_extents(region, extents, 3, &n, &err));
  CHECK_EQ(n, 3u);
  CHECK_EQ(extents[2].bytes, device.granule);
  fixture::unmap({region});
  OK(tp_region_extents(region, extents, 3, &n, &err));
  CHECK_EQ(n, 0u);
  fixture::destroy(region);
  device.close();
}

TEST(region_repeats_are_no_ops) {
  fixture::Device device;
  tp_region *a = device.region(2), *b = device.region(3);
  fixture::map({a, b});
  fixture::unmap({a});
  const uint64_t unmaps = device.calls(TP_OP_UNMAP);
  fixture::unmap({a, b});
  CHECK_EQ(device.calls(TP_OP_UNMAP), unmaps + 1);  // one per range, and none for what sleeps
  fixture::unmap({a, b});
  CHECK_EQ(device.calls(TP_OP_UNMAP), unmaps + 1);
  const uint64_t creates = device.calls(TP_OP_CREATE);
  fixture::map({a});
  fixture::map({a, b});
  CHECK_EQ(device.calls(TP_OP_CREATE), creates + 5);
  CHECK_STATUS(tp_device_close(device.handle, &err), TP_STATE);
  fixture::destroy(a);
  fixture::destroy(b);
  device.close();
}

TEST(region_too_large_says_what_is_needed_and_free) {
  fixture::Device device;
  tp_region *region = nullptr;
  tp_error error{};
  const uint64_t huge = fixture::kTooMuch;
  CHECK_EQ(tp_region_create(device.handle, huge, huge / 4, 0, "huge", &region, &error), TP_DEVICE_MEMORY);
  CHECK_EQ(error.bytes_needed, huge);
  CHECK(error.bytes_free > 0 && error.bytes_free < huge);
  CHECK(region == nullptr);
  CHECK_EQ(device.stats().live_regions, 0u);
  CHECK_EQ(device.stats().reserved_bytes, 0u);
  device.close();
}

// Address ranges that sleep stay reserved: nothing else may come to lie there.
TEST(region_asleep_keeps_its_addresses) {
  if (check::driver() != "host") throw check::Skip("looks at this process's maps");
  fixture::Device device;
  tp_region *region = device.region(1024);
  const tp_region_stats stats = fixture::stats(region);
  fixture::unmap({region});
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
  void *taken = mmap(reinterpret_cast<void *>(stats.address), 4096, PROT_READ, flags, -1, 0);
  CHECK(taken == MAP_FAILED);
  fixture::destroy(region);
  device.close();
}

TEST(region_guarded_reads_zeros_while_asleep) {
  if (check::driver() != "host") throw check::Skip("only the host has guard pages");
  fixture::Device device;
  tp_region *region = device.region(4, TP_REGION_GUARDED);
  const tp_region_stats stats = fixture::stats(region);
  device.write(stats.address, pattern(stats.bytes, 1));
  fixture::unmap({region});
  auto *memory = reinterpret_cast<volatile unsigned char *>(stats.address);
  for (uint64_t i = 0; i < stats.bytes; i += 512) CHECK_EQ(static_cast<int>(memory[i]), 0);
  memory[7] = 9;  // goes nowhere
  fixture::map({region});
  CHECK_EQ(static_cast<int>(memory[7]), 0);
  fixture::destroy(region);
  device.close();
}

// P4: at no moment of a sleep, a failing wake or a wake does a late access fault.
TEST(region_guarded_never_faults_under_a_late_reader) {
  if (check::driver() != "host") throw check::Skip("only the host has guard pages");
  fixture::Device device;
  tp_region *region = device.region(2, TP_REGION_GUARDED);
  const tp_region_stats stats = fixture::stats(region);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      for (uint64_t at = 0; at < stats.bytes; at += 4096) (void)*reinterpret_cast<volatile unsigned char *>(stats.address + at);
    }
  });
  for (int round = 0; round < 1500; ++round) {
    fixture::unmap({region});
    device.arm(TP_OP_SET_ACCESS, 1);
    CHECK(tp_regions_map(&region, 1, nullptr) != TP_OK);
    fixture::map({region});
  }
  stop = true;
  reader.join();
  fixture::destroy(region);
  device.close();
}

TEST(copy_from_a_region_that_sleeps_is_an_error) {
  fixture::Device device;
  tp_region *region = device.region(2, 0, "kv_cache");
  const uint64_t address = fixture::stats(region).address;
  Bytes buffer(64);
  const tp_span spans[] = {{reinterpret_cast<uint64_t>(buffer.data()), address + device.granule, 64}};
  fixture::unmap({region});
  tp_error error{};
  CHECK_EQ(tp_copy(device.handle, TP_COPY_TO_HOST, spans, 1, 1, &error), TP_STATE);
  CHECK(std::strstr(error.message, "kv_cache") != nullptr);
  uint64_t hash = 0;
  CHECK_STATUS(tp_hash(device.handle, address, 64, 64, 0, &hash, 1, &err), TP_STATE);
  fixture::map({region});
  OK(tp_copy(device.handle, TP_COPY_TO_HOST, spans, 1, 1, &err));
  fixture::destroy(region);
  device.close();
}

TEST(copy_of_many_spans_and_blocks) {
  fixture::Device device;
  tp_region *from = device.region(3), *to = device.region(3);
  const uint64_t src = fixture::stats(from).address, dst = fixture::stats(to).address, bytes = 3 * device.granule;
  const Bytes data = pattern(bytes, 4);
  device.write(src, data);
  device.write(dst, Bytes(bytes, 0));
  const uint64_t block = 1000, blocks = bytes / block;
  std::vector<uint64_t> src_ids, dst_ids;
  for (uint64_t i = 0; i < blocks; i += 2) src_ids.push_back(i), dst_ids.push_back((i * 7 + 3) % blocks);
  tp_blocks list{&dst, &src, 1, block, dst_ids.data(), src_ids.data(), src_ids.size(), blocks, blocks};
  OK(fixture::copy_blocks(device.handle, list, &err));
  Bytes expected(bytes, 0);
  for (size_t i = 0; i < src_ids.size(); ++i) std::memcpy(&expected[dst_ids[i] * block], &data[src_ids[i] * block], block);
  CHECK(device.read(dst, bytes) == expected);
  OK(fixture::copy_blocks(device.handle, {&dst, &src, 1, block, nullptr, nullptr, 0, blocks, blocks}, &err));
  OK(fixture::copy_blocks(device.handle, {nullptr, nullptr, 0, block, dst_ids.data(), src_ids.data(), 1, blocks, blocks}, &err));
  const uint64_t last = *std::max_element(src_ids.begin(), src_ids.end());
  list.src_limit = last;
  CHECK_EQ(fixture::copy_blocks(device.handle, list), TP_INVALID);
  list.src_limit = last + 1, list.dst_limit = *std::max_element(dst_ids.begin(), dst_ids.end());
  CHECK_EQ(fixture::copy_blocks(device.handle, list), TP_INVALID);
  const uint64_t far = UINT64_MAX / 4;
  CHECK_STATUS(fixture::copy_blocks(device.handle, {&dst, &src, 1, block, &far, &src_ids[0], 1, UINT64_MAX, blocks}, &err), TP_INVALID);
  fixture::destroy(from);
  fixture::destroy(to);
  device.close();
}

// Every size of block meets a border of what the kernel copies at once in its own way; so do many lists.
void copy_arrays_of_blocks(fixture::Device &device, uint64_t block, uint64_t blocks, uint64_t arrays) {
  const uint64_t bytes = arrays * blocks * block;
  tp_region *from = device.region(bytes / device.granule + 1), *to = device.region(bytes / device.granule + 1);
  const uint64_t src = fixture::stats(from).address, dst = fixture::stats(to).address;
  const Bytes data = pattern(bytes, static_cast<uint32_t>(block));
  device.write(src, data);
  device.write(dst, Bytes(bytes, 0));
  std::vector<uint64_t> src_at, dst_at, src_ids, dst_ids;
  for (uint64_t a = 0; a < arrays; ++a) src_at.push_back(src + a * blocks * block), dst_at.push_back(dst + (arrays - 1 - a) * blocks * block);
  for (uint64_t i = 0; i + 1 < blocks; ++i) src_ids.push_back(i), dst_ids.push_back((i * 7 + 3) % blocks);
  Bytes expected(bytes, 0);
  for (uint64_t a = 0; a < arrays; ++a) {
    for (size_t i = 0; i < src_ids.size(); ++i) {
      std::memcpy(&expected[dst_at[a] - dst + dst_ids[i] * block], &data[src_at[a] - src + src_ids[i] * block], block);
    }
  }
  OK(fixture::copy_blocks(device.handle,
                          {dst_at.data(), src_at.data(), arrays, block, dst_ids.data(), src_ids.data(), src_ids.size(), blocks, blocks}, &err));
  CHECK(device.read(dst, bytes) == expected);
  fixture::destroy(from);
  fixture::destroy(to);
}

TEST(copy_of_blocks_of_many_arrays) {
  fixture::Device device;
  for (const uint64_t block : {16, 48, 4096, 16384, 16384 + 16, 40960, 65536, 100}) copy_arrays_of_blocks(device, block, 11, 5);
  copy_arrays_of_blocks(device, 16384, 2, 3);
  copy_arrays_of_blocks(device, 4096, 2, 3);
  copy_arrays_of_blocks(device, 16, 70001, 2);   // more ids than go with one launch
  copy_arrays_of_blocks(device, 48, 3, 4099);    // more arrays
  device.close();
}

TEST(copy_of_blocks_where_the_device_has_no_memory_for_their_lists) {
  fixture::Device device;
  fake_cuda::refuse_buffers(true);
  copy_arrays_of_blocks(device, 48, 11, 5);
  fake_cuda::refuse_buffers(false);
  device.close();
}

TEST(export_and_import_share_memory_until_both_let_go) {
  fixture::Device device;
  const int descriptors = fixture::open_descriptors();
  tp_region *region = device.region(3, TP_REGION_EXPORTABLE | TP_REGION_GUARDED);
  const tp_region_stats stats = fixture::stats(region);
  const Bytes data = pattern(stats.bytes, 6);
  device.write(stats.address, data);
  int32_t fds[3];
  uint64_t n = 0;
  OK(tp_region_export(region, fds, 3, &n, &err));
  const std::vector<uint64_t> sizes(3, device.granule);
  tp_import *import = nullptr;
  uint64_t address = 0;
  OK(tp_import_open(device.handle, fds, sizes.data(), 3, 0, &import, &address, &err));
  for (int fd : fds) {
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    close(fd);
  }
  CHECK(device.read(address, stats.bytes) == data);
  CHECK_EQ(device.stats().imported_bytes, stats.bytes);
  fixture::unmap({region});
  CHECK(device.read(address, stats.bytes) == data);  // the importer holds the old bytes
  fixture::map({region});
  device.write(stats.address, pattern(stats.bytes, 8));
  CHECK(device.read(address, stats.bytes) == data);
  OK(tp_import_close(import, &err));
  fixture::destroy(region);
  CHECK_EQ(device.stats().imported_bytes, 0u);
  if (check::driver() == "host") CHECK_EQ(fixture::open_descriptors(), descriptors);
  device.close();
}

TEST(export_and_import_refuse_bad_arguments) {
  fixture::Device device;
  tp_region *closed = device.region(1), *region = device.region(2, TP_REGION_EXPORTABLE);
  int32_t fds[2];
  uint64_t n = 0, address = 0;
  tp_import *import = nullptr;
  CHECK_STATUS(tp_region_export(closed, fds, 2, &n, &err), TP_STATE);
  CHECK_STATUS(tp_region_export(region, fds, 1, &n, &err), TP_INVALID);
  OK(tp_region_export(region, fds, 2, &n, &err));
  const uint64_t sizes[] = {device.granule, device.granule + 1};
  CHECK_STATUS(tp_import_open(device.handle, fds, sizes, 2, 0, &import, &address, &err), TP_INVALID);
  CHECK_STATUS(tp_import_open(device.handle, fds, sizes, 0, 0, &import, &address, &err), TP_INVALID);
  if (check::driver() == "host") {
    const uint64_t large[] = {device.granule, 2 * device.granule};
    CHECK_STATUS(tp_import_open(device.handle, fds, large, 2, 0, &import, &address, &err), TP_INVALID);
    const int plain = memfd_create("plain", MFD_CLOEXEC);  // its owner could shrink it under us
    CHECK_EQ(ftruncate(plain, static_cast<off_t>(device.granule)), 0);
    CHECK_STATUS(tp_import_open(device.handle, &plain, sizes, 1, 0, &import, &address, &err), TP_INVALID);
    close(plain);
    CHECK_EQ(ftruncate(fds[0], 0), -1);
  }
  const int32_t bad = -1;
  CHECK(tp_import_open(device.handle, &bad, sizes, 1, 0, &import, &address, nullptr) != TP_OK);
  CHECK_EQ(device.stats().live_imports, 0u);
  for (int fd : fds) close(fd);
  fixture::unmap({region});
  CHECK_STATUS(tp_region_export(region, fds, 2, &n, &err), TP_STATE);
  fixture::destroy(closed);
  fixture::destroy(region);
  device.close();
}

TEST(bad_arguments_are_errors) {
  tp_device *none = nullptr;
  CHECK_STATUS(tp_device_open("rocm", 0, 0, &none, &err), TP_INVALID);
  CHECK_STATUS(tp_device_open("host", 1, 0, &none, &err), TP_INVALID);
  CHECK_STATUS(tp_device_open("host", 0, 64, &none, &err), TP_INVALID);
  CHECK_STATUS(tp_device_open(nullptr, 0, 0, &none, &err), TP_INVALID);
  tp_device *plain = nullptr;
  OK(tp_device_open("host", 0, 0, &plain, &err));
  CHECK_STATUS(tp_fault_arm(plain, TP_OP_MAP, 1, 1, &err), TP_UNSUPPORTED);
  fixture::Device device;
  tp_region *region = nullptr;
  CHECK_STATUS(tp_region_create(device.handle, 0, 1, 0, "", &region, &err), TP_INVALID);
  CHECK_STATUS(tp_region_create(device.handle, 1, 0, 0, "", &region, &err), TP_INVALID);
  CHECK_STATUS(tp_region_create(device.handle, UINT64_MAX, 1, 0, "", &region, &err), TP_INVALID);
  CHECK_STATUS(tp_region_create(device.handle, 1, 1, 8, "", &region, &err), TP_INVALID);
  CHECK_STATUS(tp_fault_arm(device.handle, TP_OP_COUNT, 1, 1, &err), TP_INVALID);
  CHECK_STATUS(tp_fault_arm(device.handle, TP_OP_MAP, 0, 1, &err), TP_INVALID);
  region = device.region(1);
  tp_region *other = nullptr;
  OK(tp_region_create(plain, 1, 1, 0, "", &other, &err));
  tp_region *twice[] = {region, region}, *mixed[] = {region, other};
  CHECK_STATUS(tp_regions_map(twice, 2, &err), TP_INVALID);
  CHECK_STATUS(tp_regions_map(mixed, 2, &err), TP_INVALID);
  uint64_t hash = 0, address = fixture::stats(region).address;
  CHECK_STATUS(tp_hash(device.handle, address, 8, 12, 0, &hash, 1, &err), TP_INVALID);
  CHECK_STATUS(tp_hash(device.handle, address, 8, 0, 0, &hash, 1, &err), TP_INVALID);
  const tp_span wraps{UINT64_MAX - 4, address, 8}, null{0, address, 8};
  CHECK_STATUS(tp_copy(device.handle, TP_COPY_TO_HOST, &wraps, 1, 1, &err), TP_INVALID);
  CHECK_STATUS(tp_copy(device.handle, TP_COPY_TO_HOST, &null, 1, 1, &err), TP_INVALID);
  CHECK_STATUS(tp_regions_map(nullptr, 1, &err), TP_INVALID);
  OK(tp_regions_map(nullptr, 0, &err));
  fixture::destroy(region);
  fixture::destroy(other);
  OK(tp_device_close(plain, &err));
  device.close();
}

TEST(abi_version_is_the_headers) { CHECK_EQ(tp_abi_version(), TP_ABI_VERSION); }
