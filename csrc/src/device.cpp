#include "device.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "cuda_driver.h"
#include "hash.h"
#include "host_driver.h"
#include "region.h"

namespace torpor {
namespace {

std::unique_ptr<Driver> make_driver(const std::string &name, int32_t ordinal) {
  if (name == "cuda") return make_cuda_driver(ordinal);
  if (name != "host") throw Error::invalid("unknown driver '" + name + "': known are 'host' and 'cuda'");
  if (ordinal != 0) throw Error::invalid("device " + std::to_string(ordinal) + ": the host driver has only device 0");
  return make_host_driver();
}

void check_range(const char *what, Address address, uint64_t bytes) {
  if (address + bytes < address || (address == 0 && bytes > 0)) {
    throw Error::invalid(std::string(what) + " of " + std::to_string(bytes) + " bytes at " + std::to_string(address) +
                         " is no range of memory");
  }
}

// One more than what -1 is without its sign would be none.
uint32_t sane(uint32_t threads) { return std::clamp(threads, 1u, 1024u); }

void check_chunk_bytes(uint64_t chunk_bytes) {
  if (chunk_bytes > 0 && chunk_bytes % 8 == 0) return;
  throw Error::invalid("chunk_bytes is " + std::to_string(chunk_bytes) + ": it must be a positive multiple of 8");
}

// Pins, in every array, the smallest range that holds every block of `ids`, which are below `limit`.
void pin_blocks(AccessTable::Pins &pins, const Address *arrays, const tp_blocks &blocks, const uint64_t *ids, uint64_t limit) {
  const auto [low, high] = std::minmax_element(ids, ids + blocks.count);
  if (*high >= std::min(limit, UINT64_MAX / blocks.block_bytes)) {
    throw Error::invalid("block id " + std::to_string(*high) + " is outside the " + std::to_string(limit) + " blocks of an array");
  }
  for (uint64_t array = 0; array < blocks.arrays; ++array) {
    const Range range{arrays[array] + *low * blocks.block_bytes, (*high - *low + 1) * blocks.block_bytes};
    check_range("a block range", range.address, range.bytes);
    pins.add(range);
  }
}

// Pins the memory of one side, one stretch of neighbours after the other.
template <typename Side>
void pin_side(AccessTable::Pins &pins, const std::vector<ImageChunk> &chunks, const Side &side) {
  for (size_t first = 0, last = 0; first < chunks.size(); first = last) {
    uint64_t bytes = chunks[first].bytes;
    for (last = first + 1; last < chunks.size() && chunks[last].follows(chunks[last - 1]); ++last) bytes += chunks[last].bytes;
    pins.add({side(chunks[first]), bytes});
  }
}

void pin_device(AccessTable::Pins &pins, const std::vector<ImageChunk> &chunks) {
  pin_side(pins, chunks, [](const ImageChunk &chunk) { return chunk.device(); });
}

void pin_host(AccessTable::Pins &pins, const std::vector<ImageChunk> &chunks) {
  pin_side(pins, chunks, [](const ImageChunk &chunk) { return chunk.host(); });
}

void pin(AccessTable::Pins &pins, const std::vector<ImageChunk> &chunks) {
  pin_device(pins, chunks);
  pin_host(pins, chunks);
}

// Which part of the regions that a wake maps has memory already. Of one thread: nobody waits for it.
class Dawn {
 public:
  void expect(Range range) { reached_[range.address] = {range.address, range.end()}; }
  bool expects(Address at) const {
    const auto next = reached_.upper_bound(at);
    return next != reached_.begin() && at < std::prev(next)->second.end;
  }
  // A region has memory up to `end`.
  void reach(Address end) {
    std::prev(reached_.lower_bound(end))->second.there = end;
  }
  // What lies outside the regions that are waited for is nobody's business here.
  bool ready(Range range) const {
    auto next = reached_.upper_bound(range.address);
    if (next != reached_.begin()) --next;
    for (; next != reached_.end() && next->first < range.end(); ++next) {
      const Part &part = next->second;
      if (part.end > range.address && part.there < std::min(range.end(), part.end)) return false;
    }
    return true;
  }

 private:
  struct Part {
    Address there = 0, end = 0;
  };
  std::map<Address, Part> reached_;  // by start
};

std::vector<ImageChunk> checked_chunks(const Images &images) {
  check_chunk_bytes(images.chunk_bytes);
  for (const tp_image &image : images.list) {
    check_range("chunks", image.device_address, image.bytes);
    check_range("an image", image.host_address, image.bytes);
  }
  return wanted_chunks(images);
}

}  // namespace

std::unique_ptr<Device> Device::open(const std::string &driver, int32_t ordinal, bool faults) {
  std::unique_ptr<Driver> real = make_driver(driver, ordinal);
  if (!faults) return std::make_unique<Device>(std::move(real), nullptr);
  auto wrapper = std::make_unique<FaultDriver>(std::move(real));
  FaultDriver *seen = wrapper.get();
  return std::make_unique<Device>(std::move(wrapper), seen);
}

FaultDriver &Device::faults() {
  if (faults_ == nullptr) throw Error::unsupported("the device was opened without TP_DEVICE_FAULTS");
  return *faults_;
}

tp_device_stats Device::stats() const {
  tp_device_stats out{};
  out.granularity = driver_->granularity();
  out.live_regions = counters.regions;
  out.live_extents = counters.extents;
  out.live_imports = counters.imports;
  out.live_arenas = counters.arenas;
  out.reserved_bytes = counters.reserved_bytes;
  out.mapped_bytes = counters.mapped_bytes;
  out.condemned_bytes = counters.condemned_bytes;
  out.imported_bytes = counters.imported_bytes;
  out.committed_bytes = counters.committed_bytes;
  out.spare_bytes = counters.spare_bytes;
  return out;
}

void Device::close() {
  std::lock_guard<std::mutex> lock(structure);
  if (counters.regions + counters.imports + counters.arenas > 0) {
    throw Error::state("the device still has " + std::to_string(counters.regions) + " regions, " +
                       std::to_string(counters.imports) + " imports and " + std::to_string(counters.arenas) + " arenas");
  }
  if (counters.block_copies > 0) throw Error::state("blocks are still being copied on the device");
  orphans.retry(*driver_);
}

void Device::retry_orphans() noexcept {
  try {
    orphans.retry(*driver_);
  } catch (...) {
    // The call that brings us here has its own work to do and to report.
  }
}

void Device::copy(tp_copy_kind kind, const std::vector<tp_span> &spans, uint32_t threads) {
  AccessTable::Pins pins(access);
  for (const tp_span &span : spans) {
    check_range("a copy's target", span.dst, span.bytes);
    check_range("a copy's source", span.src, span.bytes);
    pins.add({span.dst, span.bytes});
    pins.add({span.src, span.bytes});
  }
  driver_->copy(kind, spans, sane(threads));
}

std::unique_ptr<BlockCopy> Device::begin_blocks(const tp_blocks &blocks, uint32_t threads) {
  if (blocks.block_bytes == 0) throw Error::invalid("block_bytes is 0");
  auto copy = std::make_unique<BlockCopy>(access, counters.block_copies);
  if (blocks.count == 0 || blocks.arrays == 0) return copy;
  pin_blocks(copy->pins, blocks.dst, blocks, blocks.dst_ids, blocks.dst_limit);
  pin_blocks(copy->pins, blocks.src, blocks, blocks.src_ids, blocks.src_limit);
  copy->flight = driver_->begin_blocks(blocks, sane(threads));
  return copy;
}

void Device::hash(Range range, uint64_t chunk_bytes, bool on_host, uint64_t *out, uint32_t threads) {
  check_chunk_bytes(chunk_bytes);
  check_range("a hash", range.address, range.bytes);
  AccessTable::Pins pins(access);
  pins.add(range);
  std::vector<HashItem> chunks;
  for (uint64_t offset = 0, bytes = 0; offset < range.bytes; offset += bytes) {
    bytes = std::min(chunk_bytes, range.bytes - offset);
    chunks.push_back({range.address + offset, bytes, out + chunks.size()});
  }
  if (on_host) {
    hash_chunks(chunks, sane(threads));
  } else {
    driver_->hash(chunks, sane(threads));
  }
}

void Device::save(const Images &images, uint32_t threads) {
  const std::vector<ImageChunk> chunks = checked_chunks(images);
  AccessTable::Pins pins(access);
  pin(pins, chunks);
  save_chunks(*driver_, chunks, sane(threads));
}

void Device::restore(const Images &images, uint32_t threads) {
  const std::vector<ImageChunk> chunks = checked_chunks(images);
  AccessTable::Pins pins(access);
  pin(pins, chunks);
  restore_chunks(*driver_, chunks, sane(threads), {});
}

void Device::wake(const std::vector<Region *> &regions, const Images &images, uint32_t threads, const std::function<void()> &mapped) {
  if (driver_->chunk_by_chunk()) {
    map_regions(regions);
    if (mapped) mapped();
    return restore(images, threads);
  }
  const std::vector<ImageChunk> chunks = checked_chunks(images);
  AccessTable::Pins pins(access);
  Dawn dawn;
  Beside beside;
  for (Region *region : regions) {
    if (!region->space.mapped()) dawn.expect(region->space.range());
  }
  const auto expected = [&](const ImageChunk &chunk) { return dawn.expects(chunk.device()); };
  std::vector<ImageChunk> there;
  std::copy_if(chunks.begin(), chunks.end(), std::back_inserter(there), [&](const auto &chunk) { return !expected(chunk); });
  pin_host(pins, chunks);
  Rising rising(regions);
  beside.ready = [&](Range range) { return dawn.ready(range); };
  beside.work = [&](const std::function<void()> &more) {
    const auto usable = [&](Range range) {
      dawn.reach(range.end());
      more();
    };
    // Under the lock of the device's structure: whoever unmaps waits for pins with it.
    rising.run(usable, [&] { pin_device(pins, there); }, [&] { pin_device(pins, chunks); });
  };
  beside.meanwhile = mapped;
  restore_chunks(*driver_, chunks, sane(threads), beside);
}

std::vector<tp_span> spans_of(const tp_blocks &blocks) {
  std::vector<tp_span> spans;
  const uint64_t bytes = blocks.block_bytes;
  for (uint64_t item = 0; item < blocks.arrays * blocks.count; ++item) {
    const uint64_t array = item / blocks.count, i = item % blocks.count;
    const tp_span next{blocks.dst[array] + blocks.dst_ids[i] * bytes, blocks.src[array] + blocks.src_ids[i] * bytes, bytes};
    if (!spans.empty()) {
      tp_span &last = spans.back();
      if (last.dst + last.bytes == next.dst && last.src + last.bytes == next.src) {
        last.bytes += bytes;
        continue;
      }
    }
    spans.push_back(next);
  }
  return spans;
}

}  // namespace torpor
