// The C functions of torpor.h for devices, their faults, regions and imports. Arguments are checked here.
#include "capi.h"

#include <cstring>

#include "torch_bridge.h"

namespace torpor::capi {

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
    out->op = kNoOp;
    std::strncpy(out->message, message, sizeof out->message - 1);
  }
  return status;
}

std::vector<Region *> batch(tp_region *const *regions, uint64_t n) {
  if (n > 0) require("regions", regions);
  std::vector<Region *> out;
  out.reserve(n);
  for (uint64_t i = 0; i < n; ++i) {
    require("regions[i]", regions[i]);
    out.push_back(regions[i]->region.get());
    if (&out.back()->device() != &out.front()->device()) throw Error::invalid("the regions belong to different devices");
  }
  std::vector<Region *> sorted = out;
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

}  // namespace torpor::capi

using namespace torpor::capi;
using torpor::Error;

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

}  // extern "C"
