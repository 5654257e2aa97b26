#pragma once

#include <cstddef>

#include "coarse/gpu/cuda_api.hpp"

// NCCL's own name for the target of its handles.
struct ncclComm;

/// The part of NCCL that COARSE calls, declared here so that COARSE builds without NCCL.
/// tests/native/nccl_api_test.cpp compares every declaration with nccl.h, if that is installed.
namespace coarse::nccl {

using Result = int;
using CommHandle = ::ncclComm*;

enum : Result {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum : int {
  kTypeUInt8 = 1,
  kTypeInt32 = 2,
  kTypeInt64 = 4,
  kTypeFloat16 = 6,
  kTypeFloat32 = 7,
  kTypeFloat64 = 8,
  kTypeBFloat16 = 9,
};

enum : int {
  kOpSum = 0,
  kOpMax = 2,
  kOpAvg = 4,
};

/// The name of a future communicator; NCCL passes it by value.
struct UniqueIdBytes {
  char bytes[128];
};

/// Each function by the name under which NCCL exports it, with its result and parameters.
#define COARSE_NCCL_FUNCTIONS(F)                                                                      \
  F(ncclGetVersion, Result, int*)                                                                     \
  F(ncclGetUniqueId, Result, UniqueIdBytes*)                                                          \
  F(ncclCommInitRank, Result, CommHandle*, int, UniqueIdBytes, int)                                   \
  F(ncclCommAbort, Result, CommHandle)                                                                \
  F(ncclCommGetAsyncError, Result, CommHandle, Result*)                                               \
  F(ncclAllReduce, Result, const void*, void*, std::size_t, int, int, CommHandle, cuda::StreamHandle) \
  F(ncclGroupStart, Result, void)                                                                     \
  F(ncclGroupEnd, Result, void)                                                                       \
  F(ncclGetErrorString, const char*, Result)                                                          \
  F(ncclGetLastError, const char*, CommHandle)

/// NCCL's functions, once it is loaded.
struct Api {
#define COARSE_NCCL_MEMBER(name, result, ...) result (*name)(__VA_ARGS__) = nullptr;
  COARSE_NCCL_FUNCTIONS(COARSE_NCCL_MEMBER)
#undef COARSE_NCCL_MEMBER
};

}  // namespace coarse::nccl
