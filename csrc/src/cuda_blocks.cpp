#include "cuda_blocks.h"

#include <algorithm>
#include <deque>

namespace torpor::cuda {
namespace {

// Of one batch. Many more than fill the device; the lists then take a megabyte, which the link moves in 20 us.
constexpr uint64_t kMostIds = uint64_t{1} << 16;
constexpr uint64_t kMostArrays = uint64_t{1} << 12;
constexpr uint64_t kListBytes = 2 * (kMostIds + kMostArrays) * sizeof(uint64_t);
constexpr size_t kBatches = 2;  // at once: the lists of one travel while the other is copied

// Lists one after another, as they are written and as the device reads them.
tp_blocks placed_at(const tp_blocks &blocks, const void *lists) {
  const auto *words = static_cast<const uint64_t *>(lists);
  const uint64_t *ids = words + 2 * blocks.arrays;
  return {words, words + blocks.arrays, blocks.arrays, blocks.block_bytes, ids, ids + blocks.count, blocks.count,
          blocks.dst_limit, blocks.src_limit};
}

void write_lists(void *lists, const tp_blocks &blocks) {
  auto *words = static_cast<uint64_t *>(lists);
  words = std::copy_n(blocks.dst, blocks.arrays, words);
  words = std::copy_n(blocks.src, blocks.arrays, words);
  words = std::copy_n(blocks.dst_ids, blocks.count, words);
  std::copy_n(blocks.src_ids, blocks.count, words);
}

tp_blocks part_of(const tp_blocks &blocks, uint64_t array, uint64_t arrays, uint64_t first, uint64_t count) {
  return {blocks.dst + array, blocks.src + array, arrays, blocks.block_bytes, blocks.dst_ids + first, blocks.src_ids + first, count,
          blocks.dst_limit, blocks.src_limit};
}

// `each` is called for parts that one launch can copy.
template <typename Each>
void for_each_part(const tp_blocks &blocks, const Each &each) {
  const uint64_t most = Kernels::most_blocks(blocks.block_bytes);
  const uint64_t ids = std::min({blocks.count, kMostIds, most});
  const uint64_t arrays = std::min({blocks.arrays, kMostArrays, most / ids});
  for (uint64_t array = 0; array < blocks.arrays; array += arrays) {
    for (uint64_t first = 0; first < blocks.count; first += ids) {
      each(part_of(blocks, array, std::min(arrays, blocks.arrays - array), first, std::min(ids, blocks.count - first)));
    }
  }
}

}  // namespace

// One launch at a time, with a stream and lists of its own.
class BlockCopier::Batch {
 public:
  explicit Batch(BlockCopier &copier) : lists_(copier), lease_(copier.lanes_, kListBytes, TP_OP_COPY) {}

  // Waits for the one before.
  void start(const Kernels &kernels, const tp_blocks &blocks) {
    wait();
    write_lists(lease_.lane.buffer, blocks);
    if (lists_.at == 0) return kernels.copy(placed_at(blocks, lease_.lane.buffer), lease_.lane.stream);
    const uint64_t bytes = 2 * (blocks.arrays + blocks.count) * sizeof(uint64_t);
    // By a kernel: a copy engine would have to be waited for by what follows on the stream, which takes longer than so little does.
    kernels.pull({lists_.at, reinterpret_cast<Address>(lease_.lane.buffer), bytes}, lease_.lane.stream);
    kernels.copy(placed_at(blocks, reinterpret_cast<const void *>(lists_.at)), lease_.lane.stream);
  }
  void wait() { lease_.wait(TP_OP_COPY); }

 private:
  struct Lists {
    explicit Lists(BlockCopier &from) : copier(from), at(from.take()) {}
    Lists(const Lists &) = delete;
    Lists &operator=(const Lists &) = delete;
    ~Lists() { copier.give_back(at); }
    BlockCopier &copier;
    const CUdeviceptr at;
  };
  Lists lists_;
  Lanes::Lease lease_;  // ends before the lists go: with nothing in flight
};

class BlockCopier::Batches final : public Flight {
 public:
  explicit Batches(BlockCopier &copier) : copier_(copier) {}
  ~Batches() override {
    try {
      const Context::Scope scope(copier_.context_);
      batches_.clear();
    } catch (const Error &) {
      // The context is broken, and nothing is in flight in it any more.
    }
  }
  void start(const Kernels &kernels, const tp_blocks &part) {
    if (batches_.size() < kBatches) batches_.emplace_back(copier_);
    batches_[next_++ % kBatches].start(kernels, part);
  }
  void wait() override {
    const Context::Scope scope(copier_.context_, TP_OP_COPY);
    for (Batch &batch : batches_) batch.wait();
  }

 private:
  BlockCopier &copier_;
  std::deque<Batch> batches_;
  size_t next_ = 0;
};

BlockCopier::~BlockCopier() {
  try {
    const Context::Scope scope(context_);
    for (const CUdeviceptr lists : idle_) table().cuMemFree_v2(lists);
  } catch (const Error &) {
    // The context is broken; its memory goes with it.
  }
}

CUdeviceptr BlockCopier::take() {
  std::lock_guard<std::mutex> guard(mutex_);
  idle_.reserve(idle_.size() + lent_ + 1);  // so that giving back needs no memory
  CUdeviceptr lists = 0;
  if (!idle_.empty()) {
    lists = idle_.back();
    idle_.pop_back();
  } else if (const CUresult result = table().cuMemAlloc_v2(&lists, kListBytes); result != kOutOfMemory) {
    check(result, TP_OP_COPY, "cuMemAlloc");
  } else {
    return 0;
  }
  ++lent_;
  return lists;
}

void BlockCopier::give_back(CUdeviceptr lists) {
  if (lists == 0) return;
  std::lock_guard<std::mutex> guard(mutex_);
  --lent_;
  idle_.push_back(lists);
}

std::unique_ptr<Flight> BlockCopier::begin(const Kernels &kernels, const tp_blocks &blocks) {
  if (blocks.count == 0 || blocks.arrays == 0) return nullptr;
  auto batches = std::make_unique<Batches>(*this);
  for_each_part(blocks, [&](const tp_blocks &part) { batches->start(kernels, part); });
  return batches;
}

}  // namespace torpor::cuda
