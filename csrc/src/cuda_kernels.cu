// The kernels of the cuda driver. This text is embedded in the library and compiled by NVRTC for the device at hand; the tests compile
// it as C++ too. Nothing may be included.
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kThreads = 256;

struct __align__(16) Word2 {
  u64 x, y;
};

// Read once, so kept in no cache that somebody else could use.
__device__ Word2 load_once(const Word2 *at) {
#ifdef __CUDA_ARCH__
  Word2 word;
  asm volatile("ld.global.L1::no_allocate.v2.u64 {%0, %1}, [%2];" : "=l"(word.x), "=l"(word.y) : "l"(at));
  return word;
#else
  return *at;
#endif
}

// ---- chunk sums: the S of hash.h -----------------------------------------------------------------------------------------------

constexpr u64 kG = 0x9e3779b97f4a7c15ull;
constexpr u64 kK = 0xd1b54a32d192ed03ull;
constexpr u32 kM = 0x9e3779b1u;

// One piece of a chunk. The order of a sum does not matter, so pieces are added up by the host.
struct Piece {
  const unsigned char *data;
  u64 bytes;
  u64 first;  // index of its first word in the chunk
};

// In halves: a 64-bit multiplication costs three of these instructions, and most of what it would compute is known.
struct Sums {
  u64 z = 0, square = 0;
  u32 cross = 0;  // only its low 30 bits count

  __device__ void add(u64 word, u64 key) {
    const u64 x = word ^ key;
    const u32 high = static_cast<u32>(x >> 32);
    const u32 low = static_cast<u32>(x) ^ high;
    const u64 product = static_cast<u64>(low) * kM + (static_cast<u64>(high * kM) << 32);
    const u32 top = static_cast<u32>(product >> 32);
    const u32 bottom = static_cast<u32>(product) ^ top;
    z += static_cast<u64>(top) << 32 | bottom;
    square += static_cast<u64>(bottom) * bottom;
    cross += bottom * top;
  }
  __device__ u64 total() const { return z + (square << 1) + (static_cast<u64>(cross) << 34); }
};

// The last word of a chunk, padded with zeros, and whatever is not aligned to 16 bytes.
__device__ u64 slow_word(const Piece &piece, u64 index) {
  u64 word = 0;
  for (u32 b = 0; b < 8; ++b) {
    const u64 at = 8 * index + b;
    if (at < piece.bytes) word |= static_cast<u64>(piece.data[at]) << (8 * b);
  }
  return word;
}

// What thread `thread` of kThreads adds to the sum of a piece.
__device__ u64 thread_sum(const Piece &piece, u32 thread) {
  constexpr u32 kDeep = 4;  // loads in flight per thread
  Sums sums;
  const u64 pairs = reinterpret_cast<u64>(piece.data) % 16 == 0 ? piece.bytes / 16 : 0;
  const Word2 *at = reinterpret_cast<const Word2 *>(piece.data);
  u64 pair = thread;
  u64 key = kK + (piece.first + 2 * pair) * kG;
  for (; pair + (kDeep - 1) * kThreads < pairs; pair += kDeep * kThreads) {
    Word2 words[kDeep];
#pragma unroll
    for (u32 k = 0; k < kDeep; ++k) words[k] = load_once(at + pair + k * kThreads);
#pragma unroll
    for (u32 k = 0; k < kDeep; ++k) {
      sums.add(words[k].x, key);
      sums.add(words[k].y, key + kG);
      key += 2 * kThreads * kG;
    }
  }
  for (; pair < pairs; pair += kThreads) {
    const Word2 words = load_once(at + pair);
    sums.add(words.x, key);
    sums.add(words.y, key + kG);
    key += 2 * kThreads * kG;
  }
  for (u64 word = 2 * pairs + thread; word < (piece.bytes + 7) / 8; word += kThreads) {
    sums.add(slow_word(piece, word), kK + (piece.first + word) * kG);
  }
  return sums.total();
}

struct Chunk {
  const unsigned char *data;
  u64 bytes;
};

__device__ Piece piece_of(const Chunk &chunk, u32 number, u64 piece_bytes) {
  const u64 start = number * piece_bytes;
  if (start >= chunk.bytes) return {chunk.data, 0, 0};
  const u64 left = chunk.bytes - start;
  return {chunk.data + start, left < piece_bytes ? left : piece_bytes, start / 8};
}

#ifdef __CUDACC__
// One block of threads per piece; sums[chunk * pieces + piece].
extern "C" __global__ void __launch_bounds__(kThreads) torpor_sum(const Chunk *chunks, u32 pieces, u64 piece_bytes, u64 *sums) {
  __shared__ u64 warps[kThreads / 32];
  const Piece piece = piece_of(chunks[blockIdx.x / pieces], blockIdx.x % pieces, piece_bytes);
  u64 sum = thread_sum(piece, threadIdx.x);
#pragma unroll
  for (u32 lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_down_sync(0xffffffffu, sum, lanes);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (u32 warp = 1; warp < kThreads / 32; ++warp) sum += warps[warp];
  sums[blockIdx.x] = sum;
}
#endif

// ---- blocks --------------------------------------------------------------------------------------------------------------------

// Block dst_ids[i] of every array of dst becomes block src_ids[i] of the same array of src. Arrays are addresses, a block has `block`
// vectors of 16 bytes, and all of them together are fewer than 2^32. A vector's number is its place in this order:
//
//     | array 0: block ids[0] | block ids[1] | ... | array 1: block ids[0] | ...
//
// Threads next to each other have vectors next to each other, whatever the size of a block, and every round of a block of threads is
// of one size: so small and large, few and many blocks fill the device alike.
struct BlockCopy {
  const u64 *dst, *src, *dst_ids, *src_ids;  // in device memory: every thread looks some of them up
  u32 arrays, count, block;
  __device__ u32 vectors() const { return arrays * count * block; }
};

constexpr u32 kDeep = 4;  // loads in flight per thread
constexpr u32 kRound = kDeep * kThreads;
constexpr u32 kBlocksPerProcessor = 5;  // of threads; with fewer registers each, some would be spilled

__device__ u32 rounds_of(const BlockCopy &job) { return job.vectors() / kRound + (job.vectors() % kRound != 0); }

// Where a vector is.
struct Place {
  u32 array, index, offset;

  __device__ Place(const BlockCopy &job, u32 vector) {
    const u32 item = vector / job.block;
    offset = vector % job.block;
    array = item / job.count;
    index = item % job.count;
  }
  __device__ void advance(const BlockCopy &job, u32 vectors) {
    offset += vectors;
    if (offset < job.block) return;
    index += offset / job.block;
    offset %= job.block;
    if (index < job.count) return;
    array += index / job.count;
    index %= job.count;
  }
  __device__ const Word2 *src(const BlockCopy &job) const { return at(job.src[array], job.src_ids[index], job.block); }
  __device__ Word2 *dst(const BlockCopy &job) const { return at(job.dst[array], job.dst_ids[index], job.block); }
  __device__ Word2 *at(u64 array_address, u64 id, u32 block) const {
    return reinterpret_cast<Word2 *>(array_address) + id * block + offset;
  }
};

// A round that lies in one block: one look at the lists, and nothing to check.
__device__ void copy_whole_round(const BlockCopy &job, const Place &place) {
  const Word2 *from = place.src(job);
  Word2 *to = place.dst(job);
  Word2 words[kDeep];
#pragma unroll
  for (u32 k = 0; k < kDeep; ++k) words[k] = load_once(from + k * kThreads);
#pragma unroll
  for (u32 k = 0; k < kDeep; ++k) to[k * kThreads] = words[k];
}

__device__ void copy_mixed_round(const BlockCopy &job, Place place, u32 vector) {
  const u32 all = job.vectors();
  Word2 words[kDeep];
  Word2 *to[kDeep];
#pragma unroll
  for (u32 k = 0; k < kDeep; ++k) {
    if (vector + k * kThreads >= all) break;
    to[k] = place.dst(job);
    words[k] = load_once(place.src(job));
    place.advance(job, kThreads);
  }
#pragma unroll
  for (u32 k = 0; k < kDeep; ++k) {
    if (vector + k * kThreads < all) *to[k] = words[k];
  }
}

// What thread `thread` of kThreads copies of a round.
__device__ void thread_copy(const BlockCopy &job, u32 round, u32 thread) {
  const u32 vector = round * kRound + thread;
  if (vector >= job.vectors()) return;
  const Place place(job, vector);
  if (job.block % kRound == 0) {
    copy_whole_round(job, place);
  } else {
    copy_mixed_round(job, place, vector);
  }
}

#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) torpor_copy_blocks(BlockCopy job) {
  for (u32 round = blockIdx.x; round < rounds_of(job); round += gridDim.x) thread_copy(job, round, threadIdx.x);
}
#endif

// ---- blocks, moved in bulk ----------------------------------------------------------------------------------------------------

// From compute capability 9 on the device moves pieces of blocks through shared memory by itself: one thread per warp asks, and no
// register holds a byte. An H200 copies 1.93 TB/s within its memory so, whatever the size of a block from 4 KiB on; with loads and
// stores of threads it is 1.75. Larger pieces, fewer warps and hints to the cache were all slower; over NVLink all are alike.
constexpr u32 kMovedBytes = 4096;  // of a piece; the last of a block may be smaller

struct Move {
  u64 dst, src;
  u32 bytes;
};

__device__ u32 pieces_of(const BlockCopy &job) { return (job.block * 16 + kMovedBytes - 1) / kMovedBytes; }
__device__ u32 moves_of(const BlockCopy &job) { return job.arrays * job.count * pieces_of(job); }

__device__ Move move_of(const BlockCopy &job, u32 number) {
  const u64 block_bytes = static_cast<u64>(job.block) * 16;
  const u32 pieces = pieces_of(job), item = number / pieces, array = item / job.count, index = item % job.count;
  const u64 at = static_cast<u64>(number % pieces) * kMovedBytes, left = block_bytes - at;
  return {job.dst[array] + job.dst_ids[index] * block_bytes + at, job.src[array] + job.src_ids[index] * block_bytes + at,
          left < kMovedBytes ? static_cast<u32>(left) : kMovedBytes};
}

#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
constexpr u32 kMovers = kThreads / 32;  // warps, each with a piece on its way

__device__ u32 shared_address(const void *at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

__device__ void fetch(u32 stage, u32 arrived, const Move &move) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived), "r"(move.bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(stage), "l"(move.src),
               "r"(move.bytes), "r"(arrived)
               : "memory");
}

__device__ void wait_for(u32 arrived, u32 parity) {
  for (u32 done = 0; !done;) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(arrived), "r"(parity)
                 : "memory");
  }
}

// Returns when the stage can be filled again, not when the bytes have arrived.
__device__ void store(u32 stage, const Move &move) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(move.dst), "r"(stage), "r"(move.bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(kThreads) torpor_move_blocks(BlockCopy job) {
  __shared__ __align__(128) unsigned char stages[kMovers][kMovedBytes];
  __shared__ __align__(8) u64 barriers[kMovers];
  if (threadIdx.x % 32 != 0) return;
  const u32 warp = threadIdx.x / 32, stage = shared_address(stages[warp]), arrived = shared_address(&barriers[warp]);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(arrived) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  u32 parity = 0;
  for (u32 number = blockIdx.x * kMovers + warp; number < moves_of(job); number += gridDim.x * kMovers, parity ^= 1) {
    const Move move = move_of(job, number);
    fetch(stage, arrived, move);
    wait_for(arrived, parity);
    store(stage, move);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif

// ---- one long stretch, read from host memory -----------------------------------------------------------------------------------

// What thread `thread` of `threads` copies.
__device__ void thread_pull(Word2 *dst, const Word2 *src, u64 vectors, u64 thread, u64 threads) {
  constexpr u32 kDeep = 8;
  for (u64 first = thread; first < vectors; first += kDeep * threads) {
    Word2 words[kDeep];
#pragma unroll
    for (u32 k = 0; k < kDeep; ++k) {
      if (first + k * threads < vectors) words[k] = load_once(src + first + k * threads);
    }
#pragma unroll
    for (u32 k = 0; k < kDeep; ++k) {
      if (first + k * threads < vectors) dst[first + k * threads] = words[k];
    }
  }
}

#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(kThreads) torpor_pull(Word2 *dst, const Word2 *src, u64 vectors) {
  thread_pull(dst, src, vectors, blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads);
}
#endif
