// Chunks that are copied in one go.
#pragma once

#include <algorithm>
#include <vector>

#include "driver.h"

namespace torpor::cuda {

// Chunks of one image in a row. Never of two: their regions come to memory one after the other, and the driver refuses a copy over
// the border of two reservations, however close they lie.
struct Piece {
  tp_span span;
  uint64_t first, last;  // of the chunks
};

inline std::vector<Piece> pieces_of(const std::vector<CheckedCopy> &chunks, uint64_t most) {
  std::vector<Piece> out;
  for (uint64_t i = 0; i < chunks.size(); ++i) {
    const tp_span &next = chunks[i].span;
    if (!out.empty() && chunks[i].follows && out.back().span.bytes + next.bytes <= most) {
      out.back().span.bytes += next.bytes, out.back().last = i + 1;
    } else {
      out.push_back({next, i, i + 1});
    }
  }
  return out;
}

}  // namespace torpor::cuda
