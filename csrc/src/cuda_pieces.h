// Chunks that are copied in one go.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "driver.h"

namespace torpor::cuda {

// Chunks of one image in a row. Never of two: their regions come to memory one after the other, and the driver refuses a copy over
// the border of two reservations, however close they lie.
struct Piece {
  tp_span span{};
  uint64_t first = 0, last = 0;  // of the chunks

  bool takes(const CheckedCopy &next, uint64_t most) const {
    return first == last || (next.follows && span.bytes + next.span.bytes <= most);
  }
  void add(const CheckedCopy &next, uint64_t i) {
    if (first == last) {
      span = {next.span.dst, next.span.src, 0};
      first = i;
    }
    span.bytes += next.span.bytes;
    last = i + 1;
  }
};

inline std::vector<Piece> pieces_of(const std::vector<CheckedCopy> &chunks, uint64_t most) {
  std::vector<Piece> out;
  for (uint64_t i = 0; i < chunks.size(); ++i) {
    if (out.empty() || !out.back().takes(chunks[i], most)) out.emplace_back();
    out.back().add(chunks[i], i);
  }
  return out;
}

// Pieces of what is wanted, while it becomes known, a stretch of chunks after the other, what there is to ask about.
class Cutter {
 public:
  // known: waits, and says how many chunks, from the first on, can be asked about.
  Cutter(const std::vector<CheckedCopy> &chunks, uint64_t most, std::function<uint64_t()> known, std::function<bool(uint64_t)> wanted)
      : chunks_(chunks), most_(most), known_(std::move(known)), wanted_(std::move(wanted)) {}

  // Nothing after the last one. A piece that has begun does not wait for what is not known yet.
  std::optional<Piece> next() {
    Piece piece;
    while (at_ < chunks_.size()) {
      if (at_ == end_) {
        if (piece.last > 0) break;
        end_ = known_();
      }
      if (!piece.takes(chunks_[at_], most_)) break;
      const uint64_t i = at_++;
      if (wanted_(i)) {
        piece.add(chunks_[i], i);
      } else if (piece.last > 0) {
        break;
      }
    }
    return piece.last > 0 ? std::optional<Piece>(piece) : std::nullopt;
  }

 private:
  const std::vector<CheckedCopy> &chunks_;
  const uint64_t most_;
  const std::function<uint64_t()> known_;
  const std::function<bool(uint64_t)> wanted_;
  uint64_t at_ = 0, end_ = 0;
};

inline uint64_t largest(const std::vector<CheckedCopy> &chunks) {
  uint64_t most = 0;
  for (const CheckedCopy &chunk : chunks) most = std::max(most, chunk.span.bytes);
  return most;
}

}  // namespace torpor::cuda
