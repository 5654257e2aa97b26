// Means with measures: see batches.cuh and measure.cuh.
#include "measure.cuh"

namespace coarse::cuda {

/// Memory that the threads of a block share. Host and blocks use the same tiles.
template <class Element>
struct SharedTile {
  alignas(16) typename Element::Stored values[TileShape<Element>::kElements];
  double partialSums[kNumPartialSums];
  double tileSums[kThreads];
  unsigned firstInput;
  bool isLast;
};

/// Sums the tiles of a shard in order; run by the whole block.
template <class Element>
__device__ void finishMeasure(const MeasureBatch& batch, std::uint32_t number, std::uint32_t numTiles,
                              SharedTile<Element>& shared) {
  const std::uint32_t firstTile = batch.reduce.shards[number].firstTile;
  double sum = 0;
  std::int32_t nonFiniteOf = kNobody;
  for (std::uint32_t begin = 0; begin < numTiles; begin += kThreads) {
    const std::uint32_t count = min(kThreads, numTiles - begin);
    __syncthreads();
    // Other blocks wrote these: do not read them from this multiprocessor's cache.
    if (threadIdx.x < count)
      shared.tileSums[threadIdx.x] = __ldcg(batch.tileSums + firstTile + begin + threadIdx.x);
    __syncthreads();
    if (threadIdx.x != 0) continue;
    for (std::uint32_t i = 0; i < count; ++i) {
      sum += shared.tileSums[i];
      if (nonFiniteOf == kNobody && !isfinite(shared.tileSums[i]))
        nonFiniteOf = __ldcg(batch.tileOffenders + firstTile + begin + i);
    }
  }
  if (threadIdx.x != 0) return;
  batch.measures[number] = {sum, nonFiniteOf, 0};
  batch.tilesDone[number] = 0;
}

template <class Element>
__device__ void measureTile(const MeasureBatch& batch, std::uint32_t tile, SharedTile<Element>& shared) {
  const std::uint32_t number = shardOfTile(batch.reduce.shards, batch.reduce.numShards, tile);
  const ReduceShard shard = batch.reduce.shards[number];
  const bool isEmpty = shard.numInputs == 0;
  const std::uint64_t numElements = isEmpty ? 0 : shard.numElements;
  const Range range = rangeOfTile(tile - shard.firstTile, TileShape<Element>::kElements, numElements);
  const auto count = static_cast<unsigned>(range.end > range.begin ? range.end - range.begin : 0);
  if (threadIdx.x == 0) shared.firstInput = shard.numInputs;
  if (count > 0) meanOfTile<Element>(batch.reduce, shard, range, threadIdx.x, shared.values);
  __syncthreads();
  const bool isFiniteHere = isTileFinite<Element>(shared.values, count, threadIdx.x);
  const bool isTileBad = __syncthreads_or(!isFiniteHere) != 0;
  if (isTileBad) {
    // Before the slots are overwritten.
    atomicMin(&shared.firstInput, firstNonFinite<Element>(batch.reduce, shard, range, threadIdx.x));
    __syncthreads();
  }
  if (threadIdx.x < kNumPartialSums)
    shared.partialSums[threadIdx.x] = partialSumOfSquares<Element>(shared.values, count, threadIdx.x);
  if (count > 0) writeTile<Element>(batch.reduce, shard, range, threadIdx.x, shared.values);
  __syncthreads();
  const std::uint32_t numTiles = numTilesOf(shard.numElements, TileShape<Element>::kElements);
  if (threadIdx.x == 0) {
    batch.tileSums[tile] = sumInOrder(shared.partialSums, kNumPartialSums);
    batch.tileOffenders[tile] = isTileBad ? offender(shard, shared.firstInput) : kNobody;
    __threadfence();
    shared.isLast = atomicAdd(batch.tilesDone + number, 1U) == numTiles - 1;
  }
  __syncthreads();
  if (!shared.isLast) return;
  __threadfence();
  finishMeasure<Element>(batch, number, numTiles, shared);
}

template <class Element>
__device__ __forceinline__ void measureBatch(const MeasureBatch& batch) {
  __shared__ SharedTile<Element> shared;
  for (std::uint32_t tile = blockIdx.x; tile < batch.reduce.numTiles; tile += gridDim.x) {
    measureTile<Element>(batch, tile, shared);
    __syncthreads();  // the next tile overwrites this one
  }
}

}  // namespace coarse::cuda

#define COARSE_MEASURE_KERNEL(name, Element)                                        \
  extern "C" __global__ void __launch_bounds__(coarse::cuda::kThreads)              \
      measure_##name(const COARSE_GRID_CONSTANT coarse::cuda::MeasureBatch batch) { \
    coarse::cuda::measureBatch<coarse::cuda::Element>(batch);                       \
  }

COARSE_MEASURE_KERNEL(float32, Plain<float>)
COARSE_MEASURE_KERNEL(bfloat16, BFloat16)
COARSE_MEASURE_KERNEL(float16, Float16)
