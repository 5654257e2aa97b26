// The kernels for processors with AVX2 and F16C. Empty on other architectures.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "reduce_table.inc"

// After the headers: their inline functions must run on every processor.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#define COARSE_KERNEL_TABLE kAvx2Kernels
#define COARSE_KERNEL_NAME "avx2"
#define COARSE_KERNEL_LANES

#include "reduce_kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // defined(__x86_64__)
