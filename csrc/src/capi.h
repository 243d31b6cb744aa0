// What every file of C functions shares: the handles, and where exceptions end.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "arena.h"
#include "device.h"
#include "region.h"
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

namespace torpor::capi {

tp_status report(const Error &error, tp_error *out) noexcept;
tp_status report_plain(tp_status status, const char *message, tp_error *out) noexcept;
std::vector<Region *> batch(tp_region *const *regions, uint64_t n);
std::vector<tp_image> image_list(const tp_image *images, uint64_t n);

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

}  // namespace torpor::capi
