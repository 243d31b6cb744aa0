// The C functions of torpor.h that copy, hash, save and restore what regions hold.
#include <cstring>

#include "capi.h"

using namespace torpor::capi;
using torpor::Error;

extern "C" {

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

}  // extern "C"
