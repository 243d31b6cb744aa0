// Copies and hashes of the cuda driver: the link kept full, and everything checked beside it.
#pragma once

#include <atomic>
#include <chrono>
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
  void save(const std::vector<CheckedCopy> &chunks, uint32_t threads, const std::function<bool(uint64_t)> &wanted);
  void restore(const std::vector<CheckedCopy> &chunks, uint32_t threads, const Beside &beside);
  void hash(const std::vector<HashItem> &chunks, uint32_t threads);
  std::string hash_path();
  // The device clears released memory, with its copy engines; until about when, on a device like those that were measured.
  std::chrono::steady_clock::time_point note_released(uint64_t bytes);

 private:
  class Restore;
  class Arrivals;

  // Compiled at first use; null where that cannot be, which is not tried again, or fails now.
  const Kernels *kernels();
  void start(tp_copy_kind kind, tp_span span, CUstream stream);
  bool can_pull(const tp_span &span);
  // How much of a restore that begins now is better moved by a kernel.
  uint64_t bytes_to_pull() const;
  void hash_by_kernel(const Kernels &kernels, const std::vector<HashItem> &chunks);
  void hash_staged(const HashItem &chunk);
  void restore_by_kernel(const Kernels &kernels, const std::vector<CheckedCopy> &chunks, const Beside &beside);
  void save_pieces(Cutter &pieces, Piece first, Arrivals &arrivals);

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
