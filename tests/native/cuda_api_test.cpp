/// What COARSE declares of the CUDA driver is what cuda.h declares; compiled where CUDA's headers are.
#include <gtest/gtest.h>

#if __has_include(<cuda.h>)
// First, since it renames by macros what has newer versions.
#include <cuda.h>

#include <cstddef>

#include "coarse/gpu/cuda_api.hpp"
#include "declarations.hpp"

#pragma GCC diagnostic ignored "-Wenum-compare"

namespace coarse::cuda::cuda_api_test {
namespace {

using test::areCalledAlike;

#define COARSE_CUDA_COMPARE(name, ...)                                        \
  static_assert(areCalledAlike<decltype(Api::name), decltype(&::name)>, #name \
                " differs from "                                              \
                "cuda.h");
COARSE_CUDA_FUNCTIONS(COARSE_CUDA_COMPARE)

// A comparison that holds for everything would say nothing.
static_assert(!areCalledAlike<decltype(Api::cuInit), decltype(&::cuDeviceGetCount)>);
static_assert(!areCalledAlike<decltype(Api::cuEventRecord), decltype(&::cuEventQuery)>);
static_assert(!areCalledAlike<decltype(Api::cuMemUnmap), decltype(&::cuMemMap)>);

static_assert(kSuccess == CUDA_SUCCESS && kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY &&
              kDeviceUnavailable == CUDA_ERROR_DEVICE_UNAVAILABLE &&
              kStubLibrary == CUDA_ERROR_STUB_LIBRARY && kNoDevice == CUDA_ERROR_NO_DEVICE &&
              kInvalidDevice == CUDA_ERROR_INVALID_DEVICE && kNotReady == CUDA_ERROR_NOT_READY &&
              kHostMemoryAlreadyRegistered == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED &&
              kNotPermitted == CUDA_ERROR_NOT_PERMITTED && kNotSupported == CUDA_ERROR_NOT_SUPPORTED &&
              kSystemNotReady == CUDA_ERROR_SYSTEM_NOT_READY &&
              kSystemDriverMismatch == CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING &&
              kEventDisableTiming == CU_EVENT_DISABLE_TIMING &&
              kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE &&
              kHostRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP &&
              kHostRegisterReadOnly == CU_MEMHOSTREGISTER_READ_ONLY &&
              kWaitValueGreaterOrEqual == CU_STREAM_WAIT_VALUE_GEQ &&
              kWriteValueDefault == CU_STREAM_WRITE_VALUE_DEFAULT &&
              kStreamCaptureNone == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(kMemAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED &&
              kMemHandlePosixFd == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
              kMemLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE &&
              kMemAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE &&
              kMemGranularityMinimum == CU_MEM_ALLOC_GRANULARITY_MINIMUM);

constexpr int numberOf(DeviceAttribute attribute) { return static_cast<int>(attribute); }
static_assert(
    numberOf(DeviceAttribute::kPciBusId) == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID &&
    numberOf(DeviceAttribute::kPciDeviceId) == CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID &&
    numberOf(DeviceAttribute::kPciDomainId) == CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID &&
    numberOf(DeviceAttribute::kAsyncEngineCount) == CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT &&
    numberOf(DeviceAttribute::kComputeCapabilityMajor) == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR &&
    numberOf(DeviceAttribute::kComputeCapabilityMinor) == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR &&
    numberOf(DeviceAttribute::kHostRegisterSupported) == CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED &&
    numberOf(DeviceAttribute::kVirtualMemoryManagementSupported) ==
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED &&
    numberOf(DeviceAttribute::kPosixFdSupported) ==
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED &&
    numberOf(DeviceAttribute::kMemoryPoolsSupported) == CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);

static_assert(offsetof(MemAllocationProp, type) == offsetof(CUmemAllocationProp, type) &&
              offsetof(MemAllocationProp, requestedHandleTypes) ==
                  offsetof(CUmemAllocationProp, requestedHandleTypes) &&
              offsetof(MemAllocationProp, location) == offsetof(CUmemAllocationProp, location) &&
              offsetof(MemAllocationProp, win32HandleMetaData) ==
                  offsetof(CUmemAllocationProp, win32HandleMetaData) &&
              offsetof(MemAllocationProp, allocFlags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(offsetof(MemLocation, id) == offsetof(CUmemLocation, id) &&
              offsetof(MemAccessDesc, flags) == offsetof(CUmemAccessDesc, flags));

TEST(CudaApi, IsDeclaredAsInCudaH) { SUCCEED() << "compared while this was compiled"; }

}  // namespace
}  // namespace coarse::cuda::cuda_api_test

#else

TEST(CudaApi, IsDeclaredAsInCudaH) { GTEST_SKIP() << "cuda.h is not installed"; }

#endif
