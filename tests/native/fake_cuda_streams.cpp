// Copies, streams, events and kernels of the stand-in for the CUDA driver: all is done at once, by the caller.
#include <cstring>

#include "fake_cuda_state.h"
#include "fake_kernels.h"

using namespace fake;

namespace {

// A copy may touch one page-locked range or none.
bool crosses_locks(const void *host, size_t bytes) {
  const auto start = reinterpret_cast<CUdeviceptr>(host), end = start + bytes;
  for (const auto &[at, size] : registered) {
    if (at < end && at + size > start && (start < at || end > at + size)) return true;
  }
  return false;
}

CUresult copy(void *dst, const void *src, size_t bytes, CUstream stream, bool dst_device, bool src_device) {
  {
    Lock lock(mutex);
    if (!dst_device && crosses_locks(dst, bytes)) return bad(kInvalid);
    if (!src_device && crosses_locks(src, bytes)) return bad(kInvalid);
    if (dst_device && !in_one_range(reinterpret_cast<CUdeviceptr>(dst), bytes)) return bad(kInvalid);
    if (src_device && !in_one_range(reinterpret_cast<CUdeviceptr>(src), bytes)) return bad(kInvalid);
    if (!streams.count(stream)) return bad(kInvalidHandle);
  }
  std::memcpy(dst, src, bytes);
  return check_context();
}

}  // namespace

FAKE CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream) {
  MAY_REFUSE;
  return copy(pointer(dst), src, bytes, stream, true, false);
}
FAKE CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  MAY_REFUSE;
  return copy(dst, pointer(src), bytes, stream, false, true);
}
FAKE CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  return copy(pointer(dst), pointer(src), bytes, stream, true, true);
}
FAKE CUresult cuStreamCreate(CUstream *stream, unsigned) {
  MAY_REFUSE;
  Lock lock(mutex);
  *stream = reinterpret_cast<CUstream>(new char);
  streams.insert(*stream);
  return check_context();
}
FAKE CUresult cuStreamDestroy_v2(CUstream stream) {
  Lock lock(mutex);
  if (streams.erase(stream) != 1) return bad(kInvalidHandle);
  delete reinterpret_cast<char *>(stream);
  return check_context();
}
FAKE CUresult cuStreamSynchronize(CUstream stream) {
  MAY_REFUSE;
  Lock lock(mutex);
  return streams.count(stream) ? check_context() : bad(kInvalidHandle);
}
FAKE CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  MAY_REFUSE;
  Lock lock(mutex);
  return streams.count(stream) && events.count(event) ? check_context() : bad(kInvalidHandle);
}
FAKE CUresult cuEventCreate(CUevent *event, unsigned) {
  MAY_REFUSE;
  Lock lock(mutex);
  *event = reinterpret_cast<CUevent>(new char);
  events.insert(*event);
  return check_context();
}
FAKE CUresult cuEventDestroy_v2(CUevent event) {
  Lock lock(mutex);
  if (events.erase(event) != 1) return bad(kInvalidHandle);
  delete reinterpret_cast<char *>(event);
  return kSuccess;
}
FAKE CUresult cuEventRecord(CUevent event, CUstream stream) {
  MAY_REFUSE;
  Lock lock(mutex);
  return events.count(event) && streams.count(stream) ? check_context() : bad(kInvalidHandle);
}
FAKE CUresult cuEventSynchronize(CUevent event) {
  MAY_REFUSE;
  Lock lock(mutex);
  return events.count(event) ? check_context() : bad(kInvalidHandle);
}

// The stand-in for NVRTC gives the source text back as code, and the kernels, compiled as C++, are run here.
FAKE CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  MAY_REFUSE;
  if (std::strstr(static_cast<const char *>(image), "torpor_sum") == nullptr) return kInvalid;
  Lock lock(mutex);
  *module = reinterpret_cast<CUmodule>(new char(std::strncmp(static_cast<const char *>(image), "compute_75", 10) == 0));
  modules.insert(*module);
  return check_context();
}
FAKE CUresult cuModuleUnload(CUmodule module) {
  Lock lock(mutex);
  if (modules.erase(module) != 1) return bad(kInvalidHandle);
  delete reinterpret_cast<char *>(module);
  return check_context();
}
FAKE CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  const bool old = *reinterpret_cast<const char *>(module) != 0;
  if (old && std::strcmp(name, "torpor_move_blocks") == 0) return kNotFound;  // not in code for older devices
  *function = reinterpret_cast<CUfunction>(fake_kernel(name));
  return *function != nullptr ? kSuccess : bad(kInvalid);
}
FAKE CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                             unsigned, CUstream stream, void **arguments, void **) {
  MAY_REFUSE;
  {
    Lock lock(mutex);
    if (!streams.count(stream) || gx == 0 || gy != 1 || gz != 1 || by != 1 || bz != 1) return bad(kInvalid);
  }
  const auto kernel = reinterpret_cast<FakeKernel>(function);
  kernel(gx, bx, arguments);
  if (kernel == fake_kernel("torpor_pull")) {
    Lock lock(mutex);
    ++pulls;
  }
  return check_context();
}
