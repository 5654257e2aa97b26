// The kernels for every processor of the architecture: SSE2 on x86-64, NEON on aarch64.
#include <cstddef>
#include <cstdint>

#include "reduce_table.inc"

#define COARSE_KERNEL_TABLE kBaselineKernels
#if defined(__aarch64__)
#define COARSE_KERNEL_NAME "neon"
#else
#define COARSE_KERNEL_NAME "baseline"
#endif

#include "reduce_kernels.inc"
