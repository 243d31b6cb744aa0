// Images by chunks: what has changed goes to the host, what was kept comes back, each with the hashes that prove it. torpor.h says
// what tp_save and tp_restore promise; no rule about whom to believe is here.
#pragma once

#include "driver.h"

namespace torpor {

// A range of device memory and its image; chunk i counts where wanted[i] is not 0.
struct Chunks {
  Address device = 0;
  Address host = 0;
  uint64_t bytes = 0;
  uint64_t chunk_bytes = 0;
  const uint8_t *wanted = nullptr;

  uint64_t count() const { return (bytes + chunk_bytes - 1) / chunk_bytes; }
  uint64_t offset(uint64_t i) const { return i * chunk_bytes; }
  uint64_t size(uint64_t i) const { return i + 1 == count() ? bytes - offset(i) : chunk_bytes; }
};

struct SaveHashes {
  uint8_t *valid = nullptr;
  const uint64_t *known = nullptr;
  uint64_t *source = nullptr;
  uint64_t *copied = nullptr;
};

void save_chunks(Driver &driver, const Chunks &chunks, const SaveHashes &hashes, uint32_t threads);
void restore_chunks(Driver &driver, const Chunks &chunks, uint64_t *arrived, uint32_t threads);

}  // namespace torpor
