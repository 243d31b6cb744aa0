// The kernels of cuda_kernels.cu on one device.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_host.h"
#include "cuda_table.h"
#include "driver.h"

namespace torpor::cuda {

// As the kernels read it.
struct SumChunk {
  uint64_t address = 0;
  uint64_t bytes = 0;
};

// What a launch of torpor_sum reads and writes: the chunks, and one sum per piece of each.
class SumTable {
 public:
  // How many bytes of page-locked memory the table of `chunks` chunks of at most `chunk_bytes` bytes takes.
  static uint64_t bytes(uint64_t chunks, uint64_t chunk_bytes);
  SumTable(void *memory, uint64_t chunks, uint64_t chunk_bytes);
  void set(uint64_t i, SumChunk chunk) { chunks_[i] = chunk; }
  // After the launch has ended.
  uint64_t hash(uint64_t i) const;

 private:
  friend class Kernels;
  SumChunk *chunks_;
  uint64_t *sums_;
  uint32_t pieces_;
};

class Kernels {
 public:
  // Needs a current context. TP_UNSUPPORTED, with the reason, without a compiler.
  explicit Kernels(const Context &context);
  Kernels(const Kernels &) = delete;
  Kernels &operator=(const Kernels &) = delete;
  ~Kernels();  // with a current context

  // Sums the chunks [first, last) of the table, wherever the device can read them.
  void sum(const SumTable &table, uint64_t first, uint64_t last, CUstream stream) const;
  static bool can_copy(const tp_blocks &blocks);  // addresses and sizes in multiples of 16 bytes, up to 2 GiB
  static uint64_t most_blocks(uint64_t block_bytes);  // of one launch, all arrays together
  // The lists where the device can read them: in its own memory, or as slowly as every thread's wait for the bus.
  void copy(const tp_blocks &blocks, CUstream stream) const;
  // Copies from page-locked memory, which the device reads; addresses and bytes in multiples of 16.
  void pull(const tp_span &span, CUstream stream) const;

 private:
  CUmodule module_ = nullptr;
  CUfunction sum_ = nullptr, copy_ = nullptr, pull_ = nullptr;
  CUfunction move_ = nullptr;  // where the device moves blocks by itself
  uint32_t processors_ = 1;
};

}  // namespace torpor::cuda
