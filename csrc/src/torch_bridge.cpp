#include "torch_bridge.h"

#include <sys/types.h>

#include <algorithm>
#include <array>

namespace torpor {
namespace {

// Leaked on purpose: torch frees memory when the static objects of this library would be gone.
std::array<TorchSlot, TP_TORCH_SLOTS> &slots() {
  static auto *all = new std::array<TorchSlot, TP_TORCH_SLOTS>;
  return *all;
}

// Devices that close with the last memory torch has of them. Taken before a slot's mutex, never after.
struct Closing {
  std::mutex mutex;
  std::vector<tp_device *> devices;
};
Closing &closing() {
  static auto *all = new Closing;
  return *all;
}

uint64_t inherited_of(const tp_device *device) {
  uint64_t regions = 0;
  for (TorchSlot &slot : slots()) regions += slot.inherited(device);
  return regions;
}

void close_if_last(tp_device *device) noexcept {
  {
    Closing &all = closing();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = std::find(all.devices.begin(), all.devices.end(), device);
    if (found == all.devices.end() || inherited_of(device) > 0) return;
    all.devices.erase(found);
  }
  tp_device_close(device, nullptr);  // nobody is left who could be told of a failure
}

tp_error plain_error(const Error &error) {
  tp_error out{};
  out.status = error.status;
  out.op = kNoOp;
  error.message.copy(out.message, sizeof out.message - 1);
  return out;
}

uint64_t address_of(tp_region *region) {
  tp_region_stats stats{};
  tp_region_get_stats(region, &stats, nullptr);
  return stats.address;
}

}  // namespace

TorchSlot &torch_slot(uint32_t index) {
  if (index >= TP_TORCH_SLOTS) throw Error::invalid("torch slot " + std::to_string(index) + " does not exist");
  return slots()[index];
}

uint32_t bind_torch_slot(const TorchSlot::Settings &settings) {
  for (uint32_t i = 0; i < TP_TORCH_SLOTS; ++i) {
    if (slots()[i].try_bind(settings)) return i;
  }
  throw Error::state("all " + std::to_string(TP_TORCH_SLOTS) + " pools that torch can allocate in are taken, by pools that live or by " +
                     "tensors that outlived theirs");
}

bool torch_closes(tp_device *device) {
  Closing &all = closing();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const uint64_t inherited = inherited_of(device);
  tp_device_stats stats{};
  tp_device_get_stats(device, &stats, nullptr);
  if (inherited == 0 || stats.live_regions > inherited ||  // fewer: one was freed between the two looks
       stats.live_imports + stats.live_arenas > 0) return false;
  all.devices.push_back(device);
  return true;
}

bool TorchSlot::try_bind(const Settings &settings) {
  const Lock lock(mutex_);
  if (mode_ != Mode::unbound) return false;
  settings_ = settings;
  refusal_ = {};
  mode_ = Mode::held;
  return true;
}

TorchSlot::Mode TorchSlot::owned_mode() const {
  if (mode_ == Mode::unbound || mode_ == Mode::disowned) throw Error::state("nobody owns this torch slot");
  return mode_;
}

void TorchSlot::set_mode(tp_torch_mode mode) {
  Lock lock(mutex_);
  owned_mode();
  switch (mode) {
    case TP_TORCH_HELD:
      mode_ = Mode::held;
      return idle_.wait(lock, [&] { return freeing_ == 0; });
    case TP_TORCH_SHUT:
      mode_ = Mode::shut;
      return idle_.wait(lock, [&] { return freeing_ + allocating_ == 0; });
    case TP_TORCH_OPEN: {
      mode_ = Mode::open;
      std::vector<tp_region *> waiting;
      for (const auto &item : dead_) waiting.push_back(item.second);
      if (!waiting.empty()) unmap(lock, waiting.data(), waiting.size());
      return;
    }
  }
  throw Error::invalid("unknown torch mode " + std::to_string(mode));
}

void TorchSlot::take(tp_region **born, uint64_t born_cap, uint64_t *born_count, uint64_t *dead, uint64_t dead_cap,
                     uint64_t *dead_count) {
  const Lock lock(mutex_);
  owned_mode();
  *born_count = std::min<uint64_t>(born_cap, born_.size());
  std::copy_n(born_.begin(), *born_count, born);
  born_.erase(born_.begin(), born_.begin() + static_cast<std::ptrdiff_t>(*born_count));
  *dead_count = 0;
  if (!born_.empty()) return;  // a region comes before its address
  *dead_count = std::min<uint64_t>(dead_cap, dead_.size());
  for (uint64_t i = 0; i < *dead_count; ++i) dead[i] = dead_[i].first;
  dead_.erase(dead_.begin(), dead_.begin() + static_cast<std::ptrdiff_t>(*dead_count));
}

tp_torch_refusal TorchSlot::refusal() {
  const Lock lock(mutex_);
  return refusal_;
}

void TorchSlot::disown() {
  tp_device *finished = nullptr;
  {
    Lock lock(mutex_);
    owned_mode();
    mode_ = Mode::shut;
    idle_.wait(lock, [&] { return freeing_ + allocating_ == 0; });
    mode_ = Mode::disowned;
    born_.clear();
    finished = destroy_dead(lock);
  }
  if (finished != nullptr) close_if_last(finished);
}

uint64_t TorchSlot::inherited(const tp_device *device) {
  const Lock lock(mutex_);
  if (mode_ != Mode::disowned || settings_.device != device) return 0;
  return live_.size() + dead_.size() + destroying_;
}

void TorchSlot::admit(int64_t bytes, int device) const {
  if (mode_ == Mode::shut) throw Error::state("pool '" + settings_.name + "' sleeps or is on its way: wake it before allocating in it");
  if (mode_ != Mode::held && mode_ != Mode::open) throw Error::state("the memory of pool '" + settings_.name + "' is closed");
  if (bytes <= 0) throw Error::invalid(std::to_string(bytes) + " bytes asked for");
  if (device != settings_.ordinal) {
    throw Error::invalid("pool '" + settings_.name + "' is on device " + std::to_string(settings_.ordinal) + ", not on " +
                         std::to_string(device));
  }
}

void TorchSlot::refuse(const tp_error &error) noexcept {
  ++refusal_.count;
  refusal_.last = error;
}

// All that can fail comes before anything is changed.
void *TorchSlot::keep(tp_region *region) {
  const uint64_t address = address_of(region);
  born_.reserve(born_.size() + 1);
  dead_.reserve(dead_.size() + live_.size() + 1);
  live_.emplace(address, region);
  born_.push_back(region);
  return reinterpret_cast<void *>(address);
}

void *TorchSlot::allocate(int64_t bytes, int device) noexcept {
  Lock lock(mutex_);
  try {
    admit(bytes, device);
  } catch (const Error &error) {
    refuse(plain_error(error));
    return nullptr;
  } catch (...) {  // no memory for the message
    refuse({});
    return nullptr;
  }
  ++allocating_;
  lock.unlock();
  tp_region *region = nullptr;
  tp_error error{};
  const tp_status status = tp_region_create(settings_.device, static_cast<uint64_t>(bytes), settings_.extent_bytes,
                                            settings_.region_flags, settings_.name.c_str(), &region, &error);
  lock.lock();
  void *address = nullptr;
  try {
    if (status == TP_OK) address = keep(region);
  } catch (...) {
    error.status = TP_HOST_MEMORY;
    tp_region_destroy(region, nullptr);
  }
  if (address == nullptr) refuse(error);
  --allocating_;
  idle_.notify_all();
  return address;
}

void TorchSlot::free(void *address) noexcept {
  tp_device *finished = nullptr;
  {
    Lock lock(mutex_);
    const auto found = live_.find(reinterpret_cast<uint64_t>(address));
    if (found == live_.end()) return;  // not of this slot
    dead_.emplace_back(found->first, found->second);
    live_.erase(found);
    if (mode_ == Mode::open) unmap(lock, &dead_.back().second, 1);
    if (mode_ == Mode::disowned) finished = destroy_dead(lock);
  }
  if (finished != nullptr) close_if_last(finished);
}

// Kernels may still use what torch has freed, and unmapping waits for them. Where that is impossible, as in a graph capture, the memory
// stays until the owner takes it.
void TorchSlot::unmap(Lock &lock, tp_region *const *regions, uint64_t count) noexcept {
  std::vector<tp_region *> batch;
  try {
    batch.assign(regions, regions + count);
  } catch (...) {
    return;
  }
  ++freeing_;
  lock.unlock();
  uint64_t done = 0;
  tp_regions_unmap(batch.data(), batch.size(), &done, nullptr);
  lock.lock();
  --freeing_;
  idle_.notify_all();
}

// What the driver refuses to take back stays in the list, and is tried again with the next that torch frees.
tp_device *TorchSlot::destroy_dead(Lock &lock) noexcept {
  for (bool going_on = true; going_on && !dead_.empty();) {
    const auto item = dead_.back();
    dead_.pop_back();
    ++destroying_;
    lock.unlock();
    going_on = tp_device_synchronize(settings_.device, nullptr) == TP_OK && tp_region_destroy(item.second, nullptr) == TP_OK;
    lock.lock();
    --destroying_;
    if (!going_on) dead_.push_back(item);  // there is room: no more regions are made, and it had room for all
  }
  if (live_.size() + dead_.size() + destroying_ > 0) return nullptr;
  mode_ = Mode::unbound;
  return settings_.device;
}

}  // namespace torpor

extern "C" {

#define TORPOR_TORCH_SLOT(i)                                                                                    \
  __attribute__((visibility("default"))) void *tp_torch_alloc_##i(ssize_t bytes, int device, void *) {          \
    return torpor::torch_slot(i).allocate(bytes, device);                                                       \
  }                                                                                                             \
  __attribute__((visibility("default"))) void tp_torch_free_##i(void *address, ssize_t, int, void *) {          \
    torpor::torch_slot(i).free(address);                                                                        \
  }

TORPOR_TORCH_SLOT(0)
TORPOR_TORCH_SLOT(1)
TORPOR_TORCH_SLOT(2)
TORPOR_TORCH_SLOT(3)
TORPOR_TORCH_SLOT(4)
TORPOR_TORCH_SLOT(5)
TORPOR_TORCH_SLOT(6)
TORPOR_TORCH_SLOT(7)
TORPOR_TORCH_SLOT(8)
TORPOR_TORCH_SLOT(9)
TORPOR_TORCH_SLOT(10)
TORPOR_TORCH_SLOT(11)
TORPOR_TORCH_SLOT(12)
TORPOR_TORCH_SLOT(13)
TORPOR_TORCH_SLOT(14)
TORPOR_TORCH_SLOT(15)
TORPOR_TORCH_SLOT(16)
TORPOR_TORCH_SLOT(17)
TORPOR_TORCH_SLOT(18)
TORPOR_TORCH_SLOT(19)
TORPOR_TORCH_SLOT(20)
TORPOR_TORCH_SLOT(21)
TORPOR_TORCH_SLOT(22)
TORPOR_TORCH_SLOT(23)
TORPOR_TORCH_SLOT(24)
TORPOR_TORCH_SLOT(25)
TORPOR_TORCH_SLOT(26)
TORPOR_TORCH_SLOT(27)
TORPOR_TORCH_SLOT(28)
TORPOR_TORCH_SLOT(29)
TORPOR_TORCH_SLOT(30)
TORPOR_TORCH_SLOT(31)
static_assert(TP_TORCH_SLOTS == 32, "a pair of functions for each slot");

}  // extern "C"
