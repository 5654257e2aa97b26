// Kernels that reduce batches of shards, as macros: reduce.cu and ring.cu choose the types.
#pragma once

#include "reduce.cuh"

namespace coarse::cuda {

template <class Element, class Op, bool kIsRing>
__device__ __forceinline__ void reduceBatch(const ReduceBatch& batch) {
  for (std::uint32_t tile = blockIdx.x; tile < batch.numTiles; tile += gridDim.x) {
    const ReduceShard shard = batch.shards[shardOfTile(batch.shards, batch.numShards, tile)];
    reduceTile<Element, Op, kIsRing>(batch, shard, tile - shard.firstTile, threadIdx.x);
  }
}

/// Blocks for which a multiprocessor must have registers: the maximum without spilling in reductions.
template <class Element, bool kIsRing>
inline constexpr int kBlocks = !kIsRing && sizeof(typename Element::Stored) == 4 ? 4 : 3;

}  // namespace coarse::cuda

#define COARSE_BATCH_KERNEL(name, Element, Operation, isRing)                                        \
  extern "C" __global__ void __launch_bounds__(coarse::cuda::kThreads,                               \
                                               coarse::cuda::kBlocks<coarse::cuda::Element, isRing>) \
      name(const COARSE_GRID_CONSTANT coarse::cuda::ReduceBatch batch) {                             \
    coarse::cuda::reduceBatch<coarse::cuda::Element, coarse::cuda::Operation, isRing>(batch);        \
  }
#define COARSE_REDUCE_KERNELS(dtype, Element)                  \
  COARSE_BATCH_KERNEL(reduce_sum_##dtype, Element, Sum, false) \
  COARSE_BATCH_KERNEL(reduce_max_##dtype, Element, Max, false)
#define COARSE_RING_KERNELS(dtype, Element)                 \
  COARSE_BATCH_KERNEL(ring_sum_##dtype, Element, Sum, true) \
  COARSE_BATCH_KERNEL(ring_max_##dtype, Element, Max, true)
