#include "cuda_driver.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>

#include "cuda_clerk.h"
#include "cuda_copies.h"
#include "cuda_host.h"
#include "cuda_table.h"
#include "host_pages.h"

namespace torpor {
namespace {

using namespace cuda;

// Less than this is taken back in no time worth a thread.
constexpr uint64_t kMuch = uint64_t{1} << 30;

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(int32_t ordinal) : context_(ordinal), copies_(context_, locks_) {
    if (context_.attribute(kAttributeVmm) == 0) throw Error::unsupported("the CUDA device has no virtual memory management");
    exports_ = context_.attribute(kAttributePosixFd) != 0;
    rdma_ = context_.attribute(kAttributeRdmaVmm) != 0;
    const CUmemAllocationProp prop = properties(exports_);
    size_t granularity = 0;
    check(cu_.cuMemGetAllocationGranularity(&granularity, &prop, kGranularityMinimum), kNoOp, "cuMemGetAllocationGranularity");
    granularity_ = granularity;
  }

  uint64_t granularity() const override { return granularity_; }

  Address reserve(uint64_t bytes) override {
    const Context::Scope scope(context_, TP_OP_RESERVE);
    CUdeviceptr at = 0;
    check(cu_.cuMemAddressReserve(&at, bytes, granularity_, 0, 0), TP_OP_RESERVE, "cuMemAddressReserve");
    return at;
  }

  void free_address(Range range) override {
    const Context::Scope scope(context_, TP_OP_FREE_ADDRESS);
    check(cu_.cuMemAddressFree(range.address, range.bytes), TP_OP_FREE_ADDRESS, "cuMemAddressFree");
  }

  // Only creating tells: what others released a moment ago may not be counted as free yet.
  void admit(uint64_t) override {}

  uint64_t free_bytes() override {
    const Context::Scope scope(context_);
    size_t free = 0, total = 0;
    check(cu_.cuMemGetInfo_v2(&free, &total), kNoOp, "cuMemGetInfo");
    return free;
  }

  // The driver takes one at a time: four threads give 48 GiB back no faster than one.
  uint32_t concurrency(uint64_t) const override { return 1; }

  Physical create(uint64_t bytes, bool exportable, Vacancy) override {
    if (exportable && !exports_) throw Error::unsupported("the CUDA device cannot export memory as file descriptors");
    const Context::Scope scope(context_, TP_OP_CREATE);
    clerk_.cancel();
    released_ = 0;
    const CUmemAllocationProp prop = properties(exportable);
    CUmemGenericAllocationHandle handle = 0;
    check(cu_.cuMemCreate(&handle, bytes, &prop, 0), TP_OP_CREATE, "cuMemCreate");
    Physical physical{handle, bytes, 0, 0, false};
    // Asked for is not granted: the driver may hand out memory without it, and says so only here.
    CUmemAllocationProp given{};
    const CUresult asked = cu_.cuMemGetAllocationPropertiesFromHandle(&given, handle);
    physical.rdma = asked == kSuccess && given.allocFlags.gpuDirectRDMACapable != 0;
    return physical;
  }

  void release(const Physical &physical) override {
    const Context::Scope scope(context_, TP_OP_RELEASE);
    check(cu_.cuMemRelease(physical.handle), TP_OP_RELEASE, "cuMemRelease");
    const auto now = std::chrono::steady_clock::now(), cleared = copies_.note_released(physical.bytes);
    if ((released_ += physical.bytes) >= kMuch) clerk_.expect(cleared + (cleared - now) + std::chrono::milliseconds(50));
  }

  void map(Address address, const Physical &physical, bool) override {
    const Context::Scope scope(context_, TP_OP_MAP);
    check(cu_.cuMemMap(address, physical.bytes, 0, physical.handle, 0), TP_OP_MAP, "cuMemMap");
  }

  void set_access(Range range, bool writable) override {
    const Context::Scope scope(context_, TP_OP_SET_ACCESS);
    const CUmemAccessDesc access{{kLocationDevice, context_.device()}, writable ? kAccessReadWrite : kAccessRead};
    check(cu_.cuMemSetAccess(range.address, range.bytes, &access, 1), TP_OP_SET_ACCESS, "cuMemSetAccess");
  }

  // The device has no zero pages to guard with: an access to a range that sleeps faults.
  void unmap(Range range, Vacancy) override {
    const Context::Scope scope(context_, TP_OP_UNMAP);
    check(cu_.cuMemUnmap(range.address, range.bytes), TP_OP_UNMAP, "cuMemUnmap");
  }

  int export_fd(const Physical &physical) override {
    const Context::Scope scope(context_, TP_OP_EXPORT);
    int fd = -1;
    check(cu_.cuMemExportToShareableHandle(&fd, physical.handle, kHandlePosixFd, 0), TP_OP_EXPORT, "cuMemExportToShareableHandle");
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) == 0) return fd;
    const int failed = errno;
    close(fd);
    throw Error::system(TP_OP_EXPORT, failed, "setting close-on-exec");
  }

  Physical import_fd(int fd, uint64_t bytes) override {
    const Context::Scope scope(context_, TP_OP_IMPORT);
    CUmemGenericAllocationHandle handle = 0;
    void *shareable = reinterpret_cast<void *>(static_cast<intptr_t>(fd));
    check(cu_.cuMemImportFromShareableHandle(&handle, shareable, kHandlePosixFd), TP_OP_IMPORT, "cuMemImportFromShareableHandle");
    return {handle, bytes, 0, 0, false};
  }

  void quiesce() override {
    const Context::Scope scope(context_);
    check(cu_.cuCtxSynchronize(), kNoOp, "cuCtxSynchronize");
  }

  bool chunk_by_chunk() const override { return false; }
  void copy(tp_copy_kind kind, const std::vector<tp_span> &spans, uint32_t threads) override { copies_.copy(kind, spans, threads); }
  std::unique_ptr<Flight> begin_blocks(const tp_blocks &blocks, uint32_t threads) override {
    return copies_.begin_blocks(blocks, threads);
  }
  void save(const std::vector<CheckedCopy> &chunks, uint32_t threads, const std::function<bool(uint64_t)> &wanted) override {
    copies_.save(chunks, threads, wanted);
  }
  void restore(const std::vector<CheckedCopy> &chunks, uint32_t threads, const Beside &beside) override {
    copies_.restore(chunks, threads, beside);
  }
  void hash(const std::vector<HashItem> &chunks, uint32_t threads) override { copies_.hash(chunks, threads); }
  std::string hash_path() override { return copies_.hash_path(); }

  void commit(Range range, uint32_t threads) override {
    const Context::Scope scope(context_, TP_OP_COMMIT);
    host::commit(range, threads);
    try {
      locks_.lock(range);
    } catch (...) {
      host::decommit(range);
      throw;
    }
  }

  void decommit(Range range) override {
    const Context::Scope scope(context_, TP_OP_COMMIT);
    locks_.unlock(range);
    host::decommit(range);
  }

  void adopt(Range range, const FilePart &file, uint32_t threads) override {
    const Context::Scope scope(context_, TP_OP_COMMIT);
    host::adopt(range, file, threads);
    try {
      locks_.lock(range, kHostReadOnly);
    } catch (...) {
      host::decommit(range);
      throw;
    }
  }

 private:
  // Whoever creates memory first, once what was released has been cleared, waits while the driver takes all of it back: 9 to 14 ms for
  // 48 to 64 GiB on an H200, whatever is created. Nobody's wake need be the first.
  void take_back() noexcept {
    try {
      const Context::Scope scope(context_);
      const CUmemAllocationProp prop = properties(false);
      CUmemGenericAllocationHandle handle = 0;
      if (cu_.cuMemCreate(&handle, granularity_, &prop, 0) == kSuccess) cu_.cuMemRelease(handle);
    } catch (const Error &) {
      // The context is broken: the next call that needs it says so.
    }
  }

  CUmemAllocationProp properties(bool exportable) const {
    CUmemAllocationProp prop{};
    prop.type = kAllocationPinned;
    prop.location = {kLocationDevice, context_.device()};
    prop.requestedHandleTypes = exportable ? kHandlePosixFd : 0;
    prop.allocFlags.gpuDirectRDMACapable = exportable && rdma_ ? 1 : 0;
    return prop;
  }

  const Table &cu_ = table();
  Context context_;
  HostLocks locks_;
  Copies copies_;
  bool exports_ = false;
  bool rdma_ = false;
  uint64_t granularity_ = 0;
  std::atomic<uint64_t> released_{0};  // since memory was last created
  Clerk clerk_{[this] { take_back(); }};
};

}  // namespace

std::unique_ptr<Driver> make_cuda_driver(int32_t ordinal) { return std::make_unique<CudaDriver>(ordinal); }

}  // namespace torpor
