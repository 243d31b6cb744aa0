// Scattered blocks copied by a kernel, and the lists that say which, brought to the device beside it.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "cuda_host.h"
#include "cuda_kernels.h"

namespace torpor::cuda {

class BlockCopier {
 public:
  BlockCopier(const Context &context, Lanes &lanes) : context_(context), lanes_(lanes) {}
  BlockCopier(const BlockCopier &) = delete;
  BlockCopier &operator=(const BlockCopier &) = delete;
  ~BlockCopier();

  // Needs a current context, and lists that Kernels::can_copy. Waits where they are too long for the batches that go at once.
  std::unique_ptr<Flight> begin(const Kernels &kernels, const tp_blocks &blocks);

 private:
  class Batch;
  class Batches;
  // Device memory for the lists of one batch; 0 when the device has none left.
  CUdeviceptr take();
  void give_back(CUdeviceptr lists);

  const Context &context_;
  Lanes &lanes_;
  std::mutex mutex_;
  std::vector<CUdeviceptr> idle_;
  size_t lent_ = 0;
};

}  // namespace torpor::cuda
