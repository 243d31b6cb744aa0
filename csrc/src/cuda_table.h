// The part of the CUDA driver that torpor uses, declared here so that neither building nor loading needs CUDA. Types, numbers and
// layouts are those of cuda.h; the library is opened at first use.
#pragma once

#include <cstddef>
#include <cstdint>

#include "error.h"

namespace torpor::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st *;
using CUstream = struct CUstream_st *;
using CUevent = struct CUevent_st *;
using CUmodule = struct CUmod_st *;
using CUfunction = struct CUfunc_st *;
using CUmemGenericAllocationHandle = unsigned long long;

inline constexpr CUresult kSuccess = 0;
inline constexpr CUresult kOutOfMemory = 2;

inline constexpr int kAttributeProcessors = 16;
inline constexpr int kAttributeComputeMajor = 75;
inline constexpr int kAttributeComputeMinor = 76;
inline constexpr int kAttributeHostPageTables = 100;  // the device reads host memory through the processor's page tables
inline constexpr int kAttributeVmm = 102;
inline constexpr int kAttributePosixFd = 103;
inline constexpr int kAttributeRdmaVmm = 110;

inline constexpr int kAllocationPinned = 1;
inline constexpr int kHandlePosixFd = 1;
inline constexpr int kLocationDevice = 1;
inline constexpr int kAccessRead = 1;
inline constexpr int kAccessReadWrite = 3;
inline constexpr int kGranularityMinimum = 0;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kHostPortable = 1;
inline constexpr unsigned kHostDeviceMap = 2;
inline constexpr unsigned kHostReadOnly = 8;  // for pages that this process may only read
inline constexpr unsigned kEventBlockingSync = 1;
inline constexpr unsigned kEventDisableTiming = 2;

struct CUmemLocation {
  int type;
  int id;
};
struct CUmemAllocationProp {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void *win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};
static_assert(sizeof(CUmemAllocationProp) == 32);
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};
static_assert(sizeof(CUmemAccessDesc) == 12);

// Names carry the version whose signature is declared: the driver keeps old versions under their names for ever.
#define TORPOR_CUDA_FUNCTIONS(F)                                                                                  \
  F(cuInit, (unsigned flags))                                                                                     \
  F(cuGetErrorName, (CUresult result, const char **name))                                                         \
  F(cuDeviceGetCount, (int *count))                                                                               \
  F(cuDeviceGet, (CUdevice * device, int ordinal))                                                                \
  F(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))                                           \
  F(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                                             \
  F(cuDevicePrimaryCtxRelease_v2, (CUdevice device))                                                              \
  F(cuCtxPushCurrent_v2, (CUcontext context))                                                                     \
  F(cuCtxPopCurrent_v2, (CUcontext * context))                                                                    \
  F(cuCtxSynchronize, (void))                                                                                     \
  F(cuMemGetInfo_v2, (size_t * free, size_t *total))                                                              \
  F(cuMemGetAllocationGranularity, (size_t * granularity, const CUmemAllocationProp *prop, int option))           \
  F(cuMemAddressReserve, (CUdeviceptr * at, size_t bytes, size_t align, CUdeviceptr hint, unsigned long long flags)) \
  F(cuMemAddressFree, (CUdeviceptr at, size_t bytes))                                                             \
  F(cuMemCreate, (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags)) \
  F(cuMemRelease, (CUmemGenericAllocationHandle handle))                                                          \
  F(cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp * prop, CUmemGenericAllocationHandle handle))    \
  F(cuMemMap, (CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)) \
  F(cuMemUnmap, (CUdeviceptr at, size_t bytes))                                                                   \
  F(cuMemSetAccess, (CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count))                  \
  F(cuMemExportToShareableHandle, (void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)) \
  F(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle * handle, void *shareable, int type))           \
  F(cuMemHostRegister_v2, (void *at, size_t bytes, unsigned flags))                                               \
  F(cuMemHostUnregister, (void *at))                                                                              \
  F(cuMemAlloc_v2, (CUdeviceptr * at, size_t bytes))                                                              \
  F(cuMemFree_v2, (CUdeviceptr at))                                                                               \
  F(cuMemHostAlloc, (void **at, size_t bytes, unsigned flags))                                                    \
  F(cuMemFreeHost, (void *at))                                                                                    \
  F(cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t bytes, CUstream stream))                      \
  F(cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t bytes, CUstream stream))                            \
  F(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream))                             \
  F(cuStreamCreate, (CUstream * stream, unsigned flags))                                                          \
  F(cuStreamDestroy_v2, (CUstream stream))                                                                        \
  F(cuStreamSynchronize, (CUstream stream))                                                                       \
  F(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))                                          \
  F(cuEventCreate, (CUevent * event, unsigned flags))                                                             \
  F(cuEventDestroy_v2, (CUevent event))                                                                           \
  F(cuEventRecord, (CUevent event, CUstream stream))                                                              \
  F(cuEventSynchronize, (CUevent event))                                                                          \
  F(cuModuleLoadData, (CUmodule * module, const void *image))                                                     \
  F(cuModuleUnload, (CUmodule module))                                                                            \
  F(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name))                              \
  F(cuLaunchKernel, (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
                     unsigned shared_bytes, CUstream stream, void **arguments, void **extra))

struct Table {
#define TORPOR_CUDA_MEMBER(name, arguments) CUresult(*name) arguments = nullptr;
  TORPOR_CUDA_FUNCTIONS(TORPOR_CUDA_MEMBER)
#undef TORPOR_CUDA_MEMBER
};

// Opens the driver and initialises it, once per process. TP_UNSUPPORTED, with the reason, when it cannot; the next call tries
// again.
const Table &table();

// Throws unless `result` is success; out of memory becomes the memory error of `op`.
void check(CUresult result, int op, const char *function);

}  // namespace torpor::cuda
