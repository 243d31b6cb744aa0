// cuda_kernels.cu itself, compiled as C++: what each thread adds or copies is the kernels' own code. What threads do together (a sum
// over their block, a list in shared memory) is done here, one after the other.
#include "fake_kernels.h"

#include <cstring>

#define __device__
#define __align__(bytes) alignas(bytes)

namespace {

#include "cuda_kernels.cu"

template <typename Value>
Value argument(void **arguments, int i) {
  Value value;
  std::memcpy(&value, arguments[i], sizeof value);
  return value;
}

void run_sum(unsigned blocks, unsigned threads, void **arguments) {
  const auto *chunks = argument<const Chunk *>(arguments, 0);
  const auto pieces = argument<u32>(arguments, 1);
  const auto piece_bytes = argument<u64>(arguments, 2);
  auto *sums = argument<u64 *>(arguments, 3);
  for (unsigned block = 0; block < blocks; ++block) {
    const Piece piece = piece_of(chunks[block / pieces], block % pieces, piece_bytes);
    sums[block] = 0;
    for (unsigned thread = 0; thread < threads; ++thread) sums[block] += thread_sum(piece, thread);
  }
}

void run_copy_blocks(unsigned, unsigned threads, void **arguments) {
  const auto job = argument<BlockCopy>(arguments, 0);
  for (u32 round = 0; round < rounds_of(job); ++round) {
    for (unsigned thread = 0; thread < threads; ++thread) thread_copy(job, round, thread);
  }
}

void run_move_blocks(unsigned, unsigned, void **arguments) {
  const auto job = argument<BlockCopy>(arguments, 0);
  for (u32 number = 0; number < moves_of(job); ++number) {
    const Move move = move_of(job, number);
    std::memcpy(reinterpret_cast<void *>(move.dst), reinterpret_cast<const void *>(move.src), move.bytes);
  }
}

void run_pull(unsigned blocks, unsigned threads, void **arguments) {
  auto *dst = argument<Word2 *>(arguments, 0);
  const auto *src = argument<const Word2 *>(arguments, 1);
  const u64 all = u64{blocks} * threads;
  for (u64 thread = 0; thread < all; ++thread) thread_pull(dst, src, argument<u64>(arguments, 2), thread, all);
}

}  // namespace

FakeKernel fake_kernel(const char *name) {
  if (std::strcmp(name, "torpor_sum") == 0) return run_sum;
  if (std::strcmp(name, "torpor_copy_blocks") == 0) return run_copy_blocks;
  if (std::strcmp(name, "torpor_move_blocks") == 0) return run_move_blocks;
  if (std::strcmp(name, "torpor_pull") == 0) return run_pull;
  return nullptr;
}
