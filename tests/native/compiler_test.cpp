// The kernels' way into the device: by compilers of any age, and at bad moments.
#include <cstring>

#include "fake_cuda.h"
#include "fixture.h"

namespace {

using fixture::Bytes;
using fixture::pattern;

bool kernels_run(const fixture::Device &device) {
  char text[64] = {};
  OK(tp_hash_path(device.handle, text, sizeof text, &err));
  return std::strncmp(text, "kernel", 6) == 0;
}

void need_compiler() {
  if (fake_cuda::created() < 0) throw check::Skip("needs the stand-in");
  fixture::Device device;
  const bool there = kernels_run(device);
  device.close();
  if (!there) throw check::Skip("needs a compiler");
}

}  // namespace

// What it makes then lacks the kernel that moves blocks in bulk: another one copies them (ctest's native_cuda_old_compiler).
TEST(compiler_older_than_the_device_will_do) {
  need_compiler();
  fixture::Device device;
  tp_region *from = device.region(1), *to = device.region(1);
  const Bytes content = pattern(device.granule, 3);
  device.write(fixture::stats(from).address, content);
  const uint64_t dst = fixture::stats(to).address, src = fixture::stats(from).address, ids[] = {0, 1}, half = device.granule / 2;
  const tp_blocks blocks{&dst, &src, 1, half, ids, ids, 2, 2, 2};
  tp_block_copy *copy = nullptr;
  OK(tp_block_copy_begin(device.handle, &blocks, 1, &copy, &err));
  OK(tp_block_copy_end(copy, &err));
  CHECK(device.read(dst, device.granule) == content);
  fixture::destroy(from);
  fixture::destroy(to);
  device.close();
}

TEST(compiler_that_fails_for_the_moment_is_asked_again) {
  need_compiler();
  fixture::Device device;
  fake_cuda::refuse("cuModuleLoadData", 1, fake_cuda::kNoMemory);
  CHECK(!kernels_run(device));
  fake_cuda::refuse("", 0);
  CHECK(kernels_run(device));
  device.close();
}
