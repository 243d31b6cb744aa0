// Images by chunks: what has changed goes to the host, what was kept comes back, each with the hashes that prove it. torpor.h says
// what tp_save and tp_restore promise; no rule about whom to believe is here.
#pragma once

#include <vector>

#include "driver.h"

namespace torpor {

// Ranges of device memory and their images, all cut into chunks of one size; a chunk counts where its `wanted` is not 0.
struct Images {
  std::vector<tp_image> list;
  uint64_t chunk_bytes = 0;
};

// One chunk that counts.
struct ImageChunk {
  const tp_image *image = nullptr;
  uint64_t index = 0;
  uint64_t offset = 0, bytes = 0;

  Address device() const { return image->device_address + offset; }
  Address host() const { return image->host_address + offset; }
  bool follows(const ImageChunk &before) const { return image == before.image && index == before.index + 1; }
};

std::vector<ImageChunk> wanted_chunks(const Images &images);

void save_chunks(Driver &driver, const std::vector<ImageChunk> &chunks, uint32_t threads);
void restore_chunks(Driver &driver, const std::vector<ImageChunk> &chunks, uint32_t threads, const Beside &beside);

}  // namespace torpor
