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

// Block dst_ids[i] of dst becomes block src_ids[i] of src. Sizes in vectors of 16 bytes. Blocks are cut into pieces of at most
// `piece` vectors; every block of threads takes its share of all pieces, so that few large and many small blocks fill the device alike.
struct BlockCopy {
  Word2 *dst;
  const Word2 *src;
  const u64 *dst_ids, *src_ids;
  u64 count, block, piece;
  __device__ u64 per_block() const { return (block + piece - 1) / piece; }
  __device__ u64 pieces() const { return count * per_block(); }
};

struct PiecePlace {
  u64 dst, src;
  u32 size;
};

__device__ PiecePlace place_of(const BlockCopy &job, u64 number) {
  const u64 index = number / job.per_block(), start = number % job.per_block() * job.piece;
  const u64 left = job.block - start;
  return {job.dst_ids[index] * job.block + start, job.src_ids[index] * job.block + start,
          static_cast<u32>(left < job.piece ? left : job.piece)};
}

// What thread `thread` of kThreads copies of `count` pieces: 32 threads have one at a time.
__device__ void thread_copy(const BlockCopy &job, const PiecePlace *places, u32 count, u32 thread) {
  constexpr u32 kDeep = 8, kWarp = 32;
  for (u32 which = thread / kWarp; which < count; which += kThreads / kWarp) {
    const PiecePlace place = places[which];
    const Word2 *from = job.src + place.src;
    Word2 *to = job.dst + place.dst;
    for (u32 first = thread % kWarp; first < place.size; first += kDeep * kWarp) {
      Word2 words[kDeep];
#pragma unroll
      for (u32 k = 0; k < kDeep; ++k) {
        if (first + k * kWarp < place.size) words[k] = load_once(from + first + k * kWarp);
      }
#pragma unroll
      for (u32 k = 0; k < kDeep; ++k) {
        if (first + k * kWarp < place.size) to[first + k * kWarp] = words[k];
      }
    }
  }
}

#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(kThreads) torpor_copy_blocks(BlockCopy job) {
  __shared__ PiecePlace places[kThreads];
  const u64 all = job.pieces(), share = (all + gridDim.x - 1) / gridDim.x;
  const u64 end = (blockIdx.x + 1) * share < all ? (blockIdx.x + 1) * share : all;
  for (u64 first = blockIdx.x * share; first < end; first += kThreads) {
    const u32 count = end - first < kThreads ? static_cast<u32>(end - first) : kThreads;
    __syncthreads();
    if (threadIdx.x < count) places[threadIdx.x] = place_of(job, first + threadIdx.x);
    __syncthreads();
    thread_copy(job, places, count, threadIdx.x);
  }
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
