// The C functions of torpor.h: arguments are checked here, exceptions end here.
#include <algorithm>
#include <cstring>
#include <new>

#include "arena.h"
#include "device.h"
#include "host_memory.h"
#include "region.h"
#include "torch_bridge.h"
#include "torpor/torpor.h"

#define TORPOR_API __attribute__((visibility("default")))

struct tp_device {
  std::unique_ptr<torpor::Device> device;
};
struct tp_region {
  std::unique_ptr<torpor::Region> region;
};
struct tp_import {
  std::unique_ptr<torpor::Import> import;
};
struct tp_arena {
  std::unique_ptr<torpor::Arena> arena;
};
struct tp_block_copy {
  std::unique_ptr<torpor::BlockCopy> copy;
};

namespace {

using torpor::Error;

tp_status report(const Error &error, tp_error *out) noexcept {
  if (out != nullptr) {
    *out = {};
    out->status = error.status;
    out->op = error.op;
    out->code = error.code;
    out->bytes_needed = error.bytes_needed;
    out->bytes_free = error.bytes_free;
    const size_t length = std::min(error.message.size(), sizeof out->message - 1);
    std::memcpy(out->message, error.message.data(), length);
  }
  return error.status;
}

tp_status report_plain(tp_status status, const char *message, tp_error *out) noexcept {
  if (out != nullptr) {
    *out = {};
    out->status = status;
    out->op = torpor::kNoOp;
    std::strncpy(out->message, message, sizeof out->message - 1);
  }
  return status;
}

template <typename Body>
tp_status guarded(tp_error *err, const Body &body) noexcept {
  try {
    body();
    return TP_OK;
  } catch (const Error &error) {
    return report(error, err);
  } catch (const std::bad_alloc &) {
    return report_plain(TP_HOST_MEMORY, "no memory for the core's own records", err);
  } catch (const std::exception &error) {
    return report_plain(TP_INTERNAL, error.what(), err);
  } catch (...) {
    return report_plain(TP_INTERNAL, "an exception of unknown type", err);
  }
}

template <typename... Pointers>
void require(const char *names, Pointers... pointers) {
  if (((pointers == nullptr) || ...)) throw Error::invalid(std::string("NULL given for one of: ") + names);
}

std::vector<torpor::Region *> batch(tp_region *const *regions, uint64_t n) {
  if (n > 0) require("regions", regions);
  std::vector<torpor::Region *> out;
  out.reserve(n);
  for (uint64_t i = 0; i < n; ++i) {
    require("regions[i]", regions[i]);
    out.push_back(regions[i]->region.get());
    if (&out.back()->device() != &out.front()->device()) throw Error::invalid("the regions belong to different devices");
  }
  std::vector<torpor::Region *> sorted = out;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) throw Error::invalid("a region is named twice");
  return out;
}

std::vector<tp_image> image_list(const tp_image *images, uint64_t n) {
  if (n > 0) require("images", images);
  for (uint64_t i = 0; i < n; ++i) {
    if (images[i].bytes > 0) require("wanted, checked", images[i].wanted, images[i].checked);
  }
  return {images, images + n};
}

}  // namespace

extern "C" {

TORPOR_API int32_t tp_abi_version(void) { return TP_ABI_VERSION; }

TORPOR_API tp_status tp_device_open(const char *driver, int32_t ordinal, uint32_t flags, tp_device **out, tp_error *err) {
  return guarded(err, [&] {
    require("driver, out", driver, out);
    if ((flags & ~TP_DEVICE_FAULTS) != 0) throw Error::invalid("unknown device flags " + std::to_string(flags));
    auto handle = std::make_unique<tp_device>();
    handle->device = torpor::Device::open(driver, ordinal, (flags & TP_DEVICE_FAULTS) != 0);
    *out = handle.release();
  });
}

TORPOR_API tp_status tp_device_close(tp_device *device, tp_error *err) {
  return guarded(err, [&] {
    require("device", device);
    if (torpor::torch_closes(device)) return;
    device->device->close();
    delete device;
  });
}

TORPOR_API tp_status tp_device_synchronize(tp_device *device, tp_error *err) {
  return guarded(err, [&] {
    require("device", device);
    device->device->driver().quiesce();
  });
}

TORPOR_API tp_status tp_device_get_stats(tp_device *device, tp_device_stats *out, tp_error *err) {
  return guarded(err, [&] {
    require("device, out", device, out);
    *out = device->device->stats();
  });
}

TORPOR_API tp_status tp_device_free_bytes(tp_device *device, uint64_t *bytes, tp_error *err) {
  return guarded(err, [&] {
    require("device, bytes", device, bytes);
    *bytes = device->device->driver().free_bytes();
  });
}

TORPOR_API tp_status tp_fault_arm(tp_device *device, tp_op op, uint64_t nth, uint64_t count, tp_error *err) {
  return guarded(err, [&] {
    require("device", device);
    device->device->faults().arm(op, nth, count);
  });
}

TORPOR_API tp_status tp_fault_clear(tp_device *device, tp_error *err) {
  return guarded(err, [&] {
    require("device", device);
    device->device->faults().clear();
  });
}

TORPOR_API tp_status tp_fault_calls(tp_device *device, tp_op op, uint64_t *calls, tp_error *err) {
  return guarded(err, [&] {
    require("device, calls", device, calls);
    *calls = device->device->faults().calls(op);
  });
}

TORPOR_API tp_status tp_region_create(tp_device *device, uint64_t bytes, uint64_t extent_bytes, uint32_t flags, const char *name,
                                      tp_region **out, tp_error *err) {
  return guarded(err, [&] {
    require("device, out", device, out);
    if ((flags & ~(TP_REGION_EXPORTABLE | TP_REGION_GUARDED)) != 0) {
      throw Error::invalid("unknown region flags " + std::to_string(flags));
    }
    torpor::RegionOptions options;
    options.bytes = bytes;
    options.extent_bytes = extent_bytes;
    options.exportable = (flags & TP_REGION_EXPORTABLE) != 0;
    options.guarded = (flags & TP_REGION_GUARDED) != 0;
    if (name != nullptr) options.name = name;
    auto handle = std::make_unique<tp_region>();
    handle->region = torpor::create_region(*device->device, options);
    *out = handle.release();
  });
}

TORPOR_API tp_status tp_region_destroy(tp_region *region, tp_error *err) {
  return guarded(err, [&] {
    require("region", region);
    torpor::destroy_region(region->region);
    delete region;
  });
}

TORPOR_API tp_status tp_region_get_stats(tp_region *region, tp_region_stats *out, tp_error *err) {
  return guarded(err, [&] {
    require("region, out", region, out);
    const torpor::Region &r = *region->region;
    *out = {};
    out->address = r.space.range().address;
    out->bytes = r.space.range().bytes;
    out->extent_bytes = r.extent_bytes;
    out->extents = r.extent_count();
    out->mapped = r.space.mapped() ? 1 : 0;
    out->condemned_bytes = r.space.condemned_bytes();
  });
}

TORPOR_API tp_status tp_regions_unmap(tp_region *const *regions, uint64_t n, uint64_t *done, tp_error *err) {
  return guarded(err, [&] {
    uint64_t unmapped = 0;
    if (done != nullptr) *done = 0;
    const std::exception_ptr failure = torpor::unmap_regions(batch(regions, n), unmapped);
    if (done != nullptr) *done = unmapped;
    if (failure) std::rethrow_exception(failure);
  });
}

TORPOR_API tp_status tp_regions_map(tp_region *const *regions, uint64_t n, tp_error *err) {
  return guarded(err, [&] { torpor::map_regions(batch(regions, n)); });
}

TORPOR_API tp_status tp_region_extents(tp_region *region, tp_extent *out, uint64_t cap, uint64_t *n, tp_error *err) {
  return guarded(err, [&] {
    require("region, n", region, n);
    if (cap > 0) require("out", out);
    const std::vector<torpor::Physical> extents = region->region->extents();
    for (uint64_t i = 0; i < std::min<uint64_t>(cap, extents.size()); ++i) {
      out[i] = {extents[i].bytes, extents[i].device_id, extents[i].inode, extents[i].rdma ? TP_EXTENT_RDMA : 0u};
    }
    *n = extents.size();
  });
}

TORPOR_API tp_status tp_region_export(tp_region *region, int32_t *fds, uint64_t cap, uint64_t *n, tp_error *err) {
  return guarded(err, [&] {
    require("region, fds, n", region, fds, n);
    if (cap < region->region->extent_count()) {
      throw Error::invalid("room for " + std::to_string(cap) + " descriptors, " +
                           std::to_string(region->region->extent_count()) + " needed");
    }
    const std::vector<int> exported = region->region->export_fds();
    std::copy(exported.begin(), exported.end(), fds);
    *n = exported.size();
  });
}

TORPOR_API tp_status tp_import_open(tp_device *device, const int32_t *fds, const uint64_t *sizes, uint64_t n, int32_t writable,
                                    tp_import **out, uint64_t *address, tp_error *err) {
  return guarded(err, [&] {
    require("device, fds, sizes, out, address", device, fds, sizes, out, address);
    auto handle = std::make_unique<tp_import>();
    handle->import = torpor::open_import(*device->device, {fds, fds + n}, {sizes, sizes + n}, writable != 0);
    *address = handle->import->space.range().address;
    *out = handle.release();
  });
}

TORPOR_API tp_status tp_import_close(tp_import *import_, tp_error *err) {
  return guarded(err, [&] {
    require("import", import_);
    torpor::close_import(import_->import);
    delete import_;
  });
}

TORPOR_API tp_status tp_copy(tp_device *device, tp_copy_kind kind, const tp_span *spans, uint64_t n, uint32_t threads,
                             tp_error *err) {
  return guarded(err, [&] {
    require("device", device);
    if (n > 0) require("spans", spans);
    if (kind < TP_COPY_TO_HOST || kind > TP_COPY_DEVICE) throw Error::invalid("unknown copy kind " + std::to_string(kind));
    device->device->copy(kind, {spans, spans + n}, threads);
  });
}

TORPOR_API tp_status tp_block_copy_begin(tp_device *device, const tp_blocks *blocks, uint32_t threads, tp_block_copy **out,
                                         tp_error *err) {
  return guarded(err, [&] {
    require("device, blocks, out", device, blocks, out);
    if (blocks->arrays > 0) require("dst, src", blocks->dst, blocks->src);
    if (blocks->count > 0) require("dst_ids, src_ids", blocks->dst_ids, blocks->src_ids);
    auto handle = std::make_unique<tp_block_copy>();
    handle->copy = device->device->begin_blocks(*blocks, threads);
    *out = handle.release();
  });
}

TORPOR_API tp_status tp_block_copy_end(tp_block_copy *copy, tp_error *err) {
  return guarded(err, [&] {
    require("copy", copy);
    const std::unique_ptr<tp_block_copy> ended(copy);
    ended->copy->wait();
  });
}

TORPOR_API tp_status tp_hash(tp_device *device, uint64_t address, uint64_t bytes, uint64_t chunk_bytes, int32_t on_host,
                             uint64_t *out, uint32_t threads, tp_error *err) {
  return guarded(err, [&] {
    require("device", device);
    if (bytes > 0) require("out", out);
    device->device->hash({address, bytes}, chunk_bytes, on_host != 0, out, threads);
  });
}

TORPOR_API tp_status tp_hash_path(tp_device *device, char *out, uint64_t cap, tp_error *err) {
  return guarded(err, [&] {
    require("device, out", device, out);
    if (cap == 0) throw Error::invalid("no room for a text");
    const std::string text = device->device->driver().hash_path();
    const size_t length = std::min<size_t>(text.size(), cap - 1);
    std::memcpy(out, text.data(), length);
    out[length] = '\0';
  });
}

TORPOR_API tp_status tp_save(tp_device *device, const tp_image *images, uint64_t n, uint64_t chunk_bytes, uint32_t threads,
                             tp_error *err) {
  return guarded(err, [&] {
    require("device", device);
    for (const tp_image &image : image_list(images, n)) {
      if (image.bytes > 0) require("valid, known, source", image.valid, image.known, image.source);
    }
    device->device->save({{images, images + n}, chunk_bytes}, threads);
  });
}

TORPOR_API tp_status tp_restore(tp_device *device, const tp_image *images, uint64_t n, uint64_t chunk_bytes, uint32_t threads,
                                tp_error *err) {
  return guarded(err, [&] {
    require("device", device);
    device->device->restore({image_list(images, n), chunk_bytes}, threads);
  });
}

TORPOR_API tp_status tp_wake(tp_device *device, tp_region *const *regions, uint64_t n, const tp_image *images, uint64_t m,
                             uint64_t chunk_bytes, uint32_t threads, tp_mapped mapped, void *context, tp_error *err) {
  return guarded(err, [&] {
    require("device", device);
    std::function<void()> tell;
    if (mapped != nullptr) tell = [&] { mapped(context); };
    device->device->wake(batch(regions, n), {image_list(images, m), chunk_bytes}, threads, tell);
  });
}

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
