// Lets one source compile with NVRTC, which has no standard library, with nvcc, and for the host.
#pragma once

#if defined(__CUDACC_RTC__)
namespace std {
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using size_t = unsigned long;
}  // namespace std
#else
#include <cstddef>
#include <cstdint>
#include <cstring>
#endif

#if defined(__CUDACC__)
#define COARSE_DEVICE __host__ __device__ __forceinline__
#else
#define COARSE_DEVICE inline
#endif

// Not for the host's compiler, which does not support it, even when nvcc calls it.
#if defined(__CUDA_ARCH__)
#define COARSE_UNROLL _Pragma("unroll")
#define COARSE_KEEP_LOOP _Pragma("unroll 1")
#else
#define COARSE_UNROLL
#define COARSE_KEEP_LOOP
#endif

// Missing before Volta, where the compiler reads the parameter in place all the same.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define COARSE_GRID_CONSTANT
#else
#define COARSE_GRID_CONSTANT __grid_constant__
#endif

namespace coarse::cuda {

/// Threads per block, for every kernel.
inline constexpr unsigned kThreads = 256;

template <class To, class From>
COARSE_DEVICE To bitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bitCast keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace coarse::cuda
