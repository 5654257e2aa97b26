// Updates of batches of shards: see batches.cuh.
#include "update.cuh"

namespace coarse::cuda {

template <class Element>
__device__ __forceinline__ void updateBatch(const UpdateBatch& batch) {
  for (std::uint32_t tile = blockIdx.x; tile < batch.numTiles; tile += gridDim.x) {
    const UpdateShard shard = batch.shards[shardOfTile(batch.shards, batch.numShards, tile)];
    updateTile<Element>(batch, shard, tile - shard.firstTile, threadIdx.x);
  }
}

}  // namespace coarse::cuda

// Three blocks per multiprocessor: without this limit the rules' registers leave room for only two.
#define COARSE_UPDATE_KERNEL(name, Element)                                       \
  extern "C" __global__ void __launch_bounds__(coarse::cuda::kThreads, 3)         \
      update_##name(const COARSE_GRID_CONSTANT coarse::cuda::UpdateBatch batch) { \
    coarse::cuda::updateBatch<coarse::cuda::Element>(batch);                      \
  }

COARSE_UPDATE_KERNEL(float32, Plain<float>)
COARSE_UPDATE_KERNEL(bfloat16, BFloat16)
COARSE_UPDATE_KERNEL(float16, Float16)
