#pragma once

#include <cstddef>
#include <cstdint>

// CUDA's own names for the targets of its handles.
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUfunc_st;
struct CUmod_st;

/// The part of the CUDA driver API that COARSE calls, declared here so that COARSE builds without CUDA.
/// tests/native/cuda_api_test.cpp compares every declaration with cuda.h, if that is installed.
namespace coarse::cuda {

using Result = int;
using DeviceOrdinal = int;
using DeviceAddress = unsigned long long;
using MemoryHandle = unsigned long long;
using ContextHandle = ::CUctx_st*;
using StreamHandle = ::CUstream_st*;
using EventHandle = ::CUevent_st*;
using FunctionHandle = ::CUfunc_st*;
using ModuleHandle = ::CUmod_st*;
using HostFunction = void (*)(void*);

enum : Result {
  kSuccess = 0,
  kOutOfMemory = 2,
  kStubLibrary = 34,
  kDeviceUnavailable = 46,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kNotReady = 600,
  kHostMemoryAlreadyRegistered = 712,
  kNotPermitted = 800,
  kNotSupported = 801,
  kSystemNotReady = 802,
  kSystemDriverMismatch = 803,
  kStreamCaptureUnsupported = 900,
  kStreamCaptureInvalidated = 901,
  kStreamCaptureImplicit = 906,
};

enum : unsigned int {
  kStreamNonBlocking = 1,
  kEventDisableTiming = 2,
  kHostRegisterPortable = 1,
  kHostRegisterDeviceMap = 2,
  kHostRegisterReadOnly = 8,
  kWaitValueGreaterOrEqual = 0,
  kWriteValueDefault = 0,
};

enum : int {
  kMemAllocationPinned = 1,
  kMemHandlePosixFd = 1,
  kMemLocationDevice = 1,
  kMemAccessReadWrite = 3,
  kMemGranularityMinimum = 0,
  kStreamCaptureNone = 0,
};

/// Device attributes that COARSE reads.
enum class DeviceAttribute : int {
  kPciBusId = 33,
  kPciDeviceId = 34,
  kAsyncEngineCount = 40,
  kPciDomainId = 50,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kHostRegisterSupported = 99,
  kVirtualMemoryManagementSupported = 102,
  kPosixFdSupported = 103,
  kMemoryPoolsSupported = 115,
};

struct Uuid {
  char bytes[16];
};

struct MemLocation {
  int type;
  int id;
};

struct MemAllocationProp {
  int type;
  int requestedHandleTypes;
  MemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};

struct MemAccessDesc {
  MemLocation location;
  int flags;
};

/// Each function by the name under which the driver exports it, with its parameters. Names without a suffix
/// belong to the legacy default stream.
#define COARSE_CUDA_FUNCTIONS(F)                                                                          \
  F(cuInit, unsigned int)                                                                                 \
  F(cuDriverGetVersion, int*)                                                                             \
  F(cuGetErrorName, Result, const char**)                                                                 \
  F(cuGetErrorString, Result, const char**)                                                               \
  F(cuDeviceGetCount, int*)                                                                               \
  F(cuDeviceGet, DeviceOrdinal*, int)                                                                     \
  F(cuDeviceGetName, char*, int, DeviceOrdinal)                                                           \
  F(cuDeviceGetUuid_v2, Uuid*, DeviceOrdinal)                                                             \
  F(cuDeviceGetAttribute, int*, DeviceAttribute, DeviceOrdinal)                                           \
  F(cuDeviceCanAccessPeer, int*, DeviceOrdinal, DeviceOrdinal)                                            \
  F(cuDevicePrimaryCtxRetain, ContextHandle*, DeviceOrdinal)                                              \
  F(cuDevicePrimaryCtxRelease_v2, DeviceOrdinal)                                                          \
  F(cuCtxPushCurrent_v2, ContextHandle)                                                                   \
  F(cuCtxPopCurrent_v2, ContextHandle*)                                                                   \
  F(cuCtxSynchronize, void)                                                                               \
  F(cuCtxGetStreamPriorityRange, int*, int*)                                                              \
  F(cuMemGetInfo_v2, std::size_t*, std::size_t*)                                                          \
  F(cuMemHostRegister_v2, void*, std::size_t, unsigned int)                                               \
  F(cuMemHostUnregister, void*)                                                                           \
  F(cuMemHostGetDevicePointer_v2, DeviceAddress*, void*, unsigned int)                                    \
  F(cuMemcpyHtoDAsync_v2, DeviceAddress, const void*, std::size_t, StreamHandle)                          \
  F(cuMemcpyDtoHAsync_v2, void*, DeviceAddress, std::size_t, StreamHandle)                                \
  F(cuMemcpyDtoDAsync_v2, DeviceAddress, DeviceAddress, std::size_t, StreamHandle)                        \
  F(cuMemcpyPeerAsync, DeviceAddress, ContextHandle, DeviceAddress, ContextHandle, std::size_t,           \
    StreamHandle)                                                                                         \
  F(cuMemAllocAsync, DeviceAddress*, std::size_t, StreamHandle)                                           \
  F(cuMemFreeAsync, DeviceAddress, StreamHandle)                                                          \
  F(cuMemsetD8Async, DeviceAddress, unsigned char, std::size_t, StreamHandle)                             \
  F(cuStreamCreateWithPriority, StreamHandle*, unsigned int, int)                                         \
  F(cuStreamDestroy_v2, StreamHandle)                                                                     \
  F(cuStreamSynchronize, StreamHandle)                                                                    \
  F(cuStreamQuery, StreamHandle)                                                                          \
  F(cuStreamIsCapturing, StreamHandle, int*)                                                              \
  F(cuStreamWaitEvent, StreamHandle, EventHandle, unsigned int)                                           \
  F(cuStreamWaitValue32_v2, StreamHandle, DeviceAddress, std::uint32_t, unsigned int)                     \
  F(cuStreamWriteValue32_v2, StreamHandle, DeviceAddress, std::uint32_t, unsigned int)                    \
  F(cuEventCreate, EventHandle*, unsigned int)                                                            \
  F(cuEventDestroy_v2, EventHandle)                                                                       \
  F(cuEventRecord, EventHandle, StreamHandle)                                                             \
  F(cuEventQuery, EventHandle)                                                                            \
  F(cuEventSynchronize, EventHandle)                                                                      \
  F(cuEventElapsedTime, float*, EventHandle, EventHandle)                                                 \
  F(cuLaunchHostFunc, StreamHandle, HostFunction, void*)                                                  \
  F(cuModuleLoadData, ModuleHandle*, const void*)                                                         \
  F(cuModuleGetFunction, FunctionHandle*, ModuleHandle, const char*)                                      \
  F(cuLaunchKernel, FunctionHandle, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, \
    unsigned int, unsigned int, StreamHandle, void**, void**)                                             \
  F(cuMemGetAllocationGranularity, std::size_t*, const MemAllocationProp*, int)                           \
  F(cuMemCreate, MemoryHandle*, std::size_t, const MemAllocationProp*, unsigned long long)                \
  F(cuMemRelease, MemoryHandle)                                                                           \
  F(cuMemExportToShareableHandle, void*, MemoryHandle, int, unsigned long long)                           \
  F(cuMemImportFromShareableHandle, MemoryHandle*, void*, int)                                            \
  F(cuMemAddressReserve, DeviceAddress*, std::size_t, std::size_t, DeviceAddress, unsigned long long)     \
  F(cuMemAddressFree, DeviceAddress, std::size_t)                                                         \
  F(cuMemMap, DeviceAddress, std::size_t, std::size_t, MemoryHandle, unsigned long long)                  \
  F(cuMemUnmap, DeviceAddress, std::size_t)                                                               \
  F(cuMemSetAccess, DeviceAddress, std::size_t, const MemAccessDesc*, std::size_t)

/// The driver's functions, once it is loaded.
struct Api {
#define COARSE_CUDA_MEMBER(name, ...) Result (*name)(__VA_ARGS__) = nullptr;
  COARSE_CUDA_FUNCTIONS(COARSE_CUDA_MEMBER)
#undef COARSE_CUDA_MEMBER
};

}  // namespace coarse::cuda
