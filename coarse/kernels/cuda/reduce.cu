// Reductions of batches of shards: see batches.cuh.
#include "reduce_batch.cuh"

COARSE_REDUCE_KERNELS(float32, Plain<float>)
COARSE_REDUCE_KERNELS(float64, Plain<double>)
COARSE_REDUCE_KERNELS(bfloat16, BFloat16)
COARSE_REDUCE_KERNELS(float16, Float16)
COARSE_REDUCE_KERNELS(int32, Plain<std::int32_t>)
COARSE_REDUCE_KERNELS(int64, Plain<std::int64_t>)
COARSE_REDUCE_KERNELS(uint8, Plain<std::uint8_t>)
