// What the kernels count in 32 bits: as far as they are asked to, and no further.
#include "cuda_kernels.h"
#include "check.h"

#define __device__
#define __align__(bytes) alignas(bytes)

namespace kernels {
#include "cuda_kernels.cu"
}  // namespace kernels

// No memory is touched: only where each piece would come from is asked.
TEST(kernels_move_every_byte_of_the_blocks_that_they_are_given) {
  const uint64_t dst = uint64_t{1} << 44, src = uint64_t{1} << 45, id = 0;
  int given = 0;
  for (uint64_t bytes : {uint64_t{16}, uint64_t{4112}, uint64_t{1} << 31, uint64_t{1} << 32, (uint64_t{1} << 32) + 16, uint64_t{1} << 35}) {
    const tp_blocks list{&dst, &src, 1, bytes, &id, &id, 1, 1, 1};
    if (!torpor::cuda::Kernels::can_copy(list)) continue;
    const kernels::u64 to = dst, from = src, none = 0;
    const kernels::BlockCopy job{&to, &from, &none, &none, 1, 1, static_cast<kernels::u32>(bytes / 16)};
    uint64_t reached = 0;
    for (kernels::u32 i = 0; i < kernels::moves_of(job); ++i) {
      const kernels::Move move = kernels::move_of(job, i);
      CHECK_EQ(move.dst, dst + reached);
      CHECK_EQ(move.src, src + reached);
      reached += move.bytes;
    }
    CHECK_EQ(reached, bytes);
    ++given;
  }
  CHECK(given >= 3);
}
