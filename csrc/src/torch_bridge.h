// Memory for torch's pluggable allocator, which calls plain functions that carry no pointer of ours and may call them at any time: from
// any thread, inside a graph capture, inside a garbage collection, at exit. So each pool has a slot of its own, with its own pair of
// functions, and nothing here depends on which thread calls or on what is entered there. No Python, no torch, no lock of Python's.
//
//     unbound --open--> held <--> open          open: torch allocates, and what it frees is unmapped at once
//        ^                \      /              held: its owner is at work: torch allocates, what it frees waits
//        |                 v    v               shut: the pool sleeps or moves: torch gets nothing, what it frees waits
//        +--the last free-- disowned <-- shut   disowned: the owner is gone: torch gets nothing, what it frees is destroyed
//
// A slot's mutex is held for a few instructions only, never through a call of the core: so freeing waits for nobody while the owner is
// at work, and the owner waits only for calls that were under way when it changed the mode.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "error.h"
#include "torpor/torpor.h"

namespace torpor {

class TorchSlot {
 public:
  struct Settings {
    tp_device *device = nullptr;
    int32_t ordinal = 0;  // as torch counts
    uint64_t extent_bytes = 0;
    uint32_t region_flags = 0;
    std::string name;
  };

  // False when somebody has it.
  bool try_bind(const Settings &settings);
  // Returns when no call is under way that the mode does not allow.
  void set_mode(tp_torch_mode mode);
  // Moves at most as many as there is room for out of the lists; 0 and 0 when nothing has happened.
  void take(tp_region **born, uint64_t born_cap, uint64_t *born_count, uint64_t *dead, uint64_t dead_cap, uint64_t *dead_count);
  tp_torch_refusal refusal();
  void disown();
  // How many regions of this device it has to destroy by itself: none before it is disowned.
  uint64_t inherited(const tp_device *device);

  // For torch. Never throws; nullptr: refused, and `refusal` says why.
  void *allocate(int64_t bytes, int device) noexcept;
  void free(void *address) noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;
  enum class Mode { unbound, held, open, shut, disowned };

  Mode owned_mode() const;  // TP_STATE when nobody owns the slot
  void admit(int64_t bytes, int device) const;
  void *keep(tp_region *region);
  void refuse(const tp_error &error) noexcept;
  void unmap(Lock &lock, tp_region *const *regions, uint64_t count) noexcept;
  tp_device *destroy_dead(Lock &lock) noexcept;  // the device, when the slot has nothing left of it

  std::mutex mutex_;
  std::condition_variable idle_;
  Mode mode_ = Mode::unbound;
  Settings settings_;
  std::unordered_map<uint64_t, tp_region *> live_;  // by address
  std::vector<tp_region *> born_;                   // not taken yet, living or dead
  // Freed by torch, not taken yet. It always has room for all of live_, so that freeing needs no memory.
  std::vector<std::pair<uint64_t, tp_region *>> dead_;
  int allocating_ = 0, freeing_ = 0;  // calls under way without the mutex
  uint64_t destroying_ = 0;           // regions that they destroy
  tp_torch_refusal refusal_{};
};

// TP_INVALID when there is no such slot.
TorchSlot &torch_slot(uint32_t index);
uint32_t bind_torch_slot(const TorchSlot::Settings &settings);
// True: the device has no memory left but what torch still has of disowned slots, and goes with the last of that.
bool torch_closes(tp_device *device);

}  // namespace torpor
