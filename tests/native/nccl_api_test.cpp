/// What COARSE declares of NCCL is what nccl.h declares; compiled where NCCL's and CUDA's headers are.
#include <gtest/gtest.h>

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <nccl.h>

#include <type_traits>

#include "coarse/gpu/nccl_api.hpp"
#include "declarations.hpp"

#pragma GCC diagnostic ignored "-Wenum-compare"

namespace coarse::nccl::nccl_api_test {
namespace {

using test::areCalledAlike;

#define COARSE_NCCL_COMPARE(name, ...) \
  static_assert(areCalledAlike<decltype(Api::name), decltype(&::name)>, #name " differs from nccl.h");
COARSE_NCCL_FUNCTIONS(COARSE_NCCL_COMPARE)

// A comparison that holds for everything would say nothing.
static_assert(!areCalledAlike<decltype(Api::ncclCommAbort), decltype(&::ncclCommGetAsyncError)>);
static_assert(!areCalledAlike<decltype(Api::ncclGetVersion), decltype(&::ncclGetUniqueId)>);
static_assert(!areCalledAlike<decltype(Api::ncclAllReduce), decltype(&::ncclReduce)>);

static_assert(kSuccess == ncclSuccess && kUnhandledCudaError == ncclUnhandledCudaError &&
              kSystemError == ncclSystemError && kInternalError == ncclInternalError &&
              kInvalidArgument == ncclInvalidArgument && kInvalidUsage == ncclInvalidUsage &&
              kRemoteError == ncclRemoteError && kInProgress == ncclInProgress);
static_assert(kTypeUInt8 == ncclUint8 && kTypeInt32 == ncclInt32 && kTypeInt64 == ncclInt64 &&
              kTypeFloat16 == ncclFloat16 && kTypeFloat32 == ncclFloat32 && kTypeFloat64 == ncclFloat64 &&
              kTypeBFloat16 == ncclBfloat16);
static_assert(kOpSum == ncclSum && kOpMax == ncclMax && kOpAvg == ncclAvg);
static_assert(std::is_same_v<decltype(UniqueIdBytes::bytes), decltype(ncclUniqueId::internal)> &&
              sizeof(UniqueIdBytes) == sizeof(ncclUniqueId) &&
              alignof(UniqueIdBytes) == alignof(ncclUniqueId));

TEST(NcclApi, IsDeclaredAsInNcclH) { SUCCEED() << "compared while this was compiled"; }

}  // namespace
}  // namespace coarse::nccl::nccl_api_test

#else

TEST(NcclApi, IsDeclaredAsInNcclH) { GTEST_SKIP() << "nccl.h or cuda_runtime.h is not installed"; }

#endif
