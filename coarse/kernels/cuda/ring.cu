// Ring steps for batches of shards: see batches.cuh.
#include "reduce_batch.cuh"

COARSE_RING_KERNELS(float32, Plain<float>)
COARSE_RING_KERNELS(float64, Plain<double>)
COARSE_RING_KERNELS(bfloat16, BFloat16)
COARSE_RING_KERNELS(float16, Float16)
COARSE_RING_KERNELS(int32, Plain<std::int32_t>)
COARSE_RING_KERNELS(int64, Plain<std::int64_t>)
COARSE_RING_KERNELS(uint8, Plain<std::uint8_t>)
