// The C functions of torpor.h for host memory, and for what torch allocates.
#include "capi.h"
#include "host_memory.h"
#include "torch_bridge.h"

using namespace torpor::capi;
using torpor::Error;

extern "C" {

TORPOR_API tp_status tp_arena_create(tp_device *device, uint64_t bytes, tp_arena **out, uint64_t *address, tp_error *err) {
  return guarded(err, [&] {
    require("device, out, address", device, out, address);
    auto handle = std::make_unique<tp_arena>();
    handle->arena = std::make_unique<torpor::Arena>(*device->device, bytes);
    *address = handle->arena->range().address;
    *out = handle.release();
  });
}

TORPOR_API tp_status tp_arena_destroy(tp_arena *arena, tp_error *err) {
  return guarded(err, [&] {
    require("arena", arena);
    arena->arena->clear();
    delete arena;
  });
}

TORPOR_API tp_status tp_arena_commit(tp_arena *arena, uint64_t offset, uint64_t bytes, uint32_t threads, tp_error *err) {
  return guarded(err, [&] {
    require("arena", arena);
    arena->arena->commit(offset, bytes, threads);
  });
}

TORPOR_API tp_status tp_arena_commit_ahead(tp_arena *arena, uint64_t offset, uint64_t bytes, uint64_t part_bytes, uint32_t threads,
                                          tp_error *err) {
  return guarded(err, [&] {
    require("arena", arena);
    arena->arena->commit_ahead(offset, bytes, part_bytes, threads);
  });
}

TORPOR_API tp_status tp_arena_end_ahead(tp_arena *arena, uint64_t *unused, tp_error *err) {
  return guarded(err, [&] {
    require("arena, unused", arena, unused);
    *unused = arena->arena->end_ahead();
  });
}

TORPOR_API tp_status tp_arena_get_ahead(tp_arena *arena, tp_ahead *out, tp_error *err) {
  return guarded(err, [&] {
    require("arena, out", arena, out);
    const torpor::AheadProgress found = arena->arena->ahead_progress();
    *out = {found.asked_bytes, found.taken_bytes, found.seconds, found.active, found.failure.has_value(), {}};
    if (found.failure) report(*found.failure, &out->failure);
  });
}

TORPOR_API tp_status tp_arena_decommit(tp_arena *arena, uint64_t offset, uint64_t bytes, tp_error *err) {
  return guarded(err, [&] {
    require("arena", arena);
    arena->arena->decommit(offset, bytes);
  });
}

TORPOR_API tp_status tp_arena_adopt(tp_arena *arena, uint64_t offset, uint64_t bytes, int32_t fd, uint64_t file_offset,
                                    uint32_t threads, tp_error *err) {
  return guarded(err, [&] {
    require("arena", arena);
    arena->arena->adopt(offset, bytes, {fd, file_offset}, threads);
  });
}

TORPOR_API tp_status tp_host_free_bytes(uint64_t *bytes, tp_error *err) {
  return guarded(err, [&] {
    require("bytes", bytes);
    *bytes = torpor::free_host_memory();
  });
}

TORPOR_API tp_status tp_torch_open(tp_device *device, int32_t ordinal, uint64_t extent_bytes, uint32_t flags, const char *name,
                                   uint32_t *slot, tp_error *err) {
  return guarded(err, [&] {
    require("device, name, slot", device, name, slot);
    *slot = torpor::bind_torch_slot({device, ordinal, extent_bytes, flags, name});
  });
}

TORPOR_API tp_status tp_torch_set_mode(uint32_t slot, tp_torch_mode mode, tp_error *err) {
  return guarded(err, [&] { torpor::torch_slot(slot).set_mode(mode); });
}

TORPOR_API tp_status tp_torch_take(uint32_t slot, tp_region **born, uint64_t born_cap, uint64_t *born_count, uint64_t *dead,
                                   uint64_t dead_cap, uint64_t *dead_count, tp_error *err) {
  return guarded(err, [&] {
    require("born, born_count, dead, dead_count", born, born_count, dead, dead_count);
    torpor::torch_slot(slot).take(born, born_cap, born_count, dead, dead_cap, dead_count);
  });
}

TORPOR_API tp_status tp_torch_get_refusal(uint32_t slot, tp_torch_refusal *out, tp_error *err) {
  return guarded(err, [&] {
    require("out", out);
    *out = torpor::torch_slot(slot).refusal();
  });
}

TORPOR_API tp_status tp_torch_disown(uint32_t slot, tp_error *err) {
  return guarded(err, [&] { torpor::torch_slot(slot).disown(); });
}

}  // extern "C"
