// Copies and hashes of the cuda driver: the link kept full, and everything checked beside it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_blocks.h"
#include "cuda_host.h"
#include "cuda_kernels.h"
#include "cuda_pieces.h"

namespace torpor::cuda {

class Copies {
 public:
  Copies(const Context &context, HostLocks &locks) : context_(context), locks_(locks), lanes_(context), blocks_(context, lanes_) {}
  Copies(const Copies &) = delete;
  Copies &operator=(const Copies &) = delete;
  ~Copies();

  // What Driver promises of each.
  void copy(tp_copy_kind kind, const std::vector<tp_span> &spans, uint32_t threads);
  std::unique_ptr<Flight> begin_blocks(const tp_blocks &blocks, uint32_t threads);
  void copy_checked(tp_copy_kind kind, const std::vector<CheckedCopy> &chunks, uint32_t threads, const Beside &beside);
  void hash(const std::vector<HashItem> &chunks, uint32_t threads);
  std::string hash_path();
  // The device clears released memory, with its copy engines.
  void note_released(uint64_t bytes);

 private:
  class Restore;

  // Compiled at first use; null where that cannot be, which is not tried again.
  const Kernels *kernels();
  void start(tp_copy_kind kind, tp_span span, CUstream stream);
  bool can_pull(const tp_span &span);
  // How much of a restore that begins now, beside the making of so much memory, is better moved by a kernel.
  uint64_t bytes_to_pull(uint64_t made) const;
  void hash_by_kernel(const Kernels &kernels, const std::vector<HashItem> &chunks);
  void hash_staged(const HashItem &chunk);
  void restore(const Kernels &kernels, const std::vector<CheckedCopy> &chunks, const Beside &beside);
  void save(const std::vector<CheckedCopy> &chunks, uint32_t threads);
  void save_pieces(const std::vector<Piece> &pieces, const std::function<void()> &landed);

  const Context &context_;
  HostLocks &locks_;
  Lanes lanes_;
  BlockCopier blocks_;
  std::atomic<int64_t> cleared_ns_{0};  // when what was released will have been cleared, as the steady clock counts
  std::mutex mutex_;                    // of the next three
  bool asked_ = false;
  std::unique_ptr<Kernels> kernels_;
  std::string why_staged_;
};

}  // namespace torpor::cuda
