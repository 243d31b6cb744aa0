#include "cuda_kernels.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "cuda_nvrtc.h"
#include "hash.h"

namespace torpor::cuda {

extern const char *const kKernelSource;  // cuda_kernels.cu, embedded by CMake

namespace {

constexpr unsigned kThreads = 256;  // of cuda_kernels.cu
// Large enough that starting a block of threads does not show, small enough that few chunks fill the device.
constexpr uint64_t kPieceBytes = uint64_t{256} << 10;
constexpr uint64_t kVectorBytes = 16;
constexpr uint64_t kRoundVectors = 4 * kThreads;     // of cuda_kernels.cu, as the next one
constexpr uint32_t kBlocksPerProcessor = 5;
constexpr uint64_t kMovers = kThreads / 32;  // of cuda_kernels.cu, as the next one
constexpr uint64_t kMovedBytes = 4096;
constexpr uint32_t kMoverBlocksPerProcessor = 4;
constexpr int kMovesFromMajor = 9;
constexpr uint64_t kMostVectors = uint64_t{1} << 31;  // of one launch, which counts them in 32 bits
constexpr uint64_t kMostBlockBytes = uint64_t{1} << 31;  // which it counts in 32 bits too
// Of threads, enough to fill the link. While some run on many processors the driver maps no memory: in a wake at once all 48 GiB are
// mapped after 29 ms with 16 of them, after 60 with 32; with one on each processor only when all copies of the kernel are over.
constexpr unsigned kPullBlocks = 16;

uint64_t parts(uint64_t of, uint64_t most) { return (of + most - 1) / most; }
uint32_t pieces_of(uint64_t chunk_bytes) { return static_cast<uint32_t>(parts(chunk_bytes, kPieceBytes)); }

// Compiled once per process and kind of device.
const std::string &code_for(int major, int minor) {
  static std::mutex compiling;
  static std::map<std::pair<int, int>, std::string> compiled;
  std::lock_guard<std::mutex> guard(compiling);
  std::string &code = compiled[{major, minor}];
  if (code.empty()) code = compile(kKernelSource, "torpor_kernels.cu", major, minor);
  return code;
}

// As the kernel reads it.
struct BlockCopy {
  const uint64_t *dst, *src, *dst_ids, *src_ids;
  uint32_t arrays, count, block;
};

}  // namespace

uint64_t SumTable::bytes(uint64_t chunks, uint64_t chunk_bytes) {
  return chunks * (sizeof(SumChunk) + pieces_of(chunk_bytes) * sizeof(uint64_t));
}

SumTable::SumTable(void *memory, uint64_t chunks, uint64_t chunk_bytes)
    : chunks_(static_cast<SumChunk *>(memory)),
      sums_(reinterpret_cast<uint64_t *>(chunks_ + chunks)),
      pieces_(pieces_of(chunk_bytes)) {}

uint64_t SumTable::hash(uint64_t i) const {
  ChunkHash hash;
  uint64_t sum = 0;
  for (uint32_t piece = 0; piece < pieces_; ++piece) sum += sums_[i * pieces_ + piece];
  hash.add_summed(sum, chunks_[i].bytes);
  return hash.finish();
}

Kernels::Kernels(const Context &context) {
  const Table &cu = table();
  const int major = context.attribute(kAttributeComputeMajor), minor = context.attribute(kAttributeComputeMinor);
  const std::string &image = code_for(major, minor);
  processors_ = static_cast<uint32_t>(std::max(context.attribute(kAttributeProcessors), 1));
  check(cu.cuModuleLoadData(&module_, image.data()), kNoOp, "cuModuleLoadData");
  const CUresult found[] = {cu.cuModuleGetFunction(&sum_, module_, "torpor_sum"),
                            cu.cuModuleGetFunction(&copy_, module_, "torpor_copy_blocks"),
                            cu.cuModuleGetFunction(&pull_, module_, "torpor_pull")};
  for (const CUresult result : found) {
    if (result == kSuccess) continue;
    cu.cuModuleUnload(module_);
    check(result, kNoOp, "cuModuleGetFunction");
  }
  // Not in code that an old compiler has made for older devices.
  const bool moves = major >= kMovesFromMajor && cu.cuModuleGetFunction(&move_, module_, "torpor_move_blocks") == kSuccess;
  if (!moves) move_ = nullptr;
}

Kernels::~Kernels() { table().cuModuleUnload(module_); }

void Kernels::sum(const SumTable &sums, uint64_t first, uint64_t last, CUstream stream) const {
  if (first == last) return;
  const SumChunk *chunks = sums.chunks_ + first;
  uint32_t pieces = sums.pieces_;
  uint64_t piece_bytes = kPieceBytes;
  uint64_t *out = sums.sums_ + first * pieces;
  void *arguments[] = {&chunks, &pieces, &piece_bytes, &out};
  const auto blocks = static_cast<unsigned>((last - first) * pieces);
  check(table().cuLaunchKernel(sum_, blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr), TP_OP_HASH, "cuLaunchKernel");
}

bool Kernels::can_copy(const tp_blocks &list) {
  const auto aligned = [](uint64_t address) { return address % kVectorBytes == 0; };
  return aligned(list.block_bytes) && list.block_bytes <= kMostBlockBytes &&
         std::all_of(list.dst, list.dst + list.arrays, aligned) && std::all_of(list.src, list.src + list.arrays, aligned);
}

uint64_t Kernels::most_blocks(uint64_t block_bytes) { return kMostVectors / (block_bytes / kVectorBytes); }

void Kernels::copy(const tp_blocks &list, CUstream stream) const {
  const uint64_t block = list.block_bytes / kVectorBytes, items = list.arrays * list.count;
  BlockCopy job{list.dst, list.src, list.dst_ids, list.src_ids, static_cast<uint32_t>(list.arrays), static_cast<uint32_t>(list.count),
                static_cast<uint32_t>(block)};
  void *arguments[] = {&job};
  // A smaller block would be a piece of its own, and threads copy many of those at once.
  const bool moves = move_ != nullptr && list.block_bytes >= kMovedBytes;
  const uint64_t work = moves ? parts(items * parts(list.block_bytes, kMovedBytes), kMovers) : parts(items * block, kRoundVectors);
  const uint32_t most = processors_ * (moves ? kMoverBlocksPerProcessor : kBlocksPerProcessor);
  const auto blocks = static_cast<unsigned>(std::min<uint64_t>(work, most));
  check(table().cuLaunchKernel(moves ? move_ : copy_, blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr), TP_OP_COPY,
        "cuLaunchKernel");
}

void Kernels::pull(const tp_span &span, CUstream stream) const {
  uint64_t dst = span.dst, src = span.src, vectors = span.bytes / kVectorBytes;
  void *arguments[] = {&dst, &src, &vectors};
  check(table().cuLaunchKernel(pull_, kPullBlocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr), TP_OP_COPY,
        "cuLaunchKernel");
}

}  // namespace torpor::cuda
