// Means that are measured in the same pass (GradientMeasure of coarse/shared_memory/layout.hpp), as in
// reduceAndMeasureShard(): the same sums of squares, bit for bit, because additions have the host's order.
// That costs no time: each tile's sum is 16 chains of additions that overlap with the memory traffic of other
// blocks.
#pragma once

#include "reduce.cuh"

namespace coarse::cuda {

/// A tile's sum of squares has this many partial sums: element i goes to number i mod kNumPartialSums.
inline constexpr unsigned kNumPartialSums = 16;

template <class Element>
COARSE_DEVICE double partialSumOfSquares(const typename Element::Stored* tile, unsigned numElements,
                                         unsigned number) {
  double sum = 0;
  for (unsigned i = number; i < numElements; i += kNumPartialSums) {
    const double value = Element::load(tile[i]);
    sum += value * value;
  }
  return sum;
}

COARSE_DEVICE double sumInOrder(const double* values, unsigned count) {
  double sum = 0;
  for (unsigned i = 0; i < count; ++i) sum += values[i];
  return sum;
}

COARSE_DEVICE bool isFinite(float value) {
  return (bitCast<std::uint32_t>(value) & 0x7f800000u) != 0x7f800000u;
}

/// The mean of a tile, as it would lie in a slot. One thread computes the elements thread, thread + kThreads
/// ...
template <class Element>
COARSE_DEVICE void meanOfTile(const ReduceBatch& batch, const ReduceShard& shard, Range range,
                              unsigned thread, typename Element::Stored* tile) {
  using Shape = TileShape<Element>;
  const auto numElements = static_cast<unsigned>(range.end - range.begin);
  unsigned rest = 0;
  if (shard.isAligned != 0) {
    const ThreadVectors<false> own{thread, numElements / Shape::kLanes};
    typename Shape::Accumulator sums[kVectorsPerThread][Shape::kLanes] = {};
    addInputs<Element, Sum>(batch.arrays + shard.firstInput, shard.numInputs, range.begin, own, false, sums);
    COARSE_UNROLL
    for (unsigned i = 0; i < kVectorsPerThread; ++i) {
      if (!own.has(i)) continue;
      divide(sums[i], shard.divisor);
      storeWords<kVectorBytes>(tile + own.vector(i) * Shape::kLanes, pack<Element>(sums[i]));
    }
    rest = own.numVectors * Shape::kLanes;
  }
  for (unsigned i = rest + thread; i < numElements; i += kThreads) {
    const auto sum = sumOfElement<Element, Sum>(batch, shard, range.begin + i);
    tile[i] = finished<Element>(sum, shard.divisor);
  }
}

/// Writes the mean of a tile to all outputs.
template <class Element>
COARSE_DEVICE void writeTile(const ReduceBatch& batch, const ReduceShard& shard, Range range, unsigned thread,
                             const typename Element::Stored* tile) {
  using Shape = TileShape<Element>;
  const auto numElements = static_cast<unsigned>(range.end - range.begin);
  const unsigned numVectors = shard.isAligned != 0 ? numElements / Shape::kLanes : 0;
  for (unsigned j = 0; j < shard.numOutputs; ++j) {
    auto* const output =
        static_cast<typename Shape::Stored*>(batch.arrays[shard.firstOutput + j]) + range.begin;
    for (unsigned vector = thread; vector < numVectors; vector += kThreads) {
      const unsigned element = vector * Shape::kLanes;
      storeWords<kVectorBytes>(output + element, loadWords<kVectorBytes>(tile + element));
    }
    for (unsigned i = numVectors * Shape::kLanes + thread; i < numElements; i += kThreads)
      output[i] = tile[i];
  }
}

/// Whether one thread's elements of the tile in `tile` are all finite.
template <class Element>
COARSE_DEVICE bool isTileFinite(const typename Element::Stored* tile, unsigned numElements, unsigned thread) {
  bool isFiniteSoFar = true;
  for (unsigned i = thread; i < numElements; i += kThreads) isFiniteSoFar &= isFinite(Element::load(tile[i]));
  return isFiniteSoFar;
}

/// The first input with NaN or Inf among one thread's elements of a tile; numInputs if there is none.
template <class Element>
COARSE_DEVICE std::uint32_t firstNonFinite(const ReduceBatch& batch, const ReduceShard& shard, Range range,
                                           unsigned thread) {
  for (std::uint32_t k = 0; k < shard.numInputs; ++k) {
    const auto* input = static_cast<const typename Element::Stored*>(batch.arrays[shard.firstInput + k]);
    for (std::uint64_t i = range.begin + thread; i < range.end; i += kThreads) {
      if (!isFinite(Element::load(input[i]))) return k;
    }
  }
  return shard.numInputs;
}

/// The input that brought NaN or Inf into a tile whose mean is not finite, by the results of firstNonFinite()
/// over all threads.
COARSE_DEVICE std::int32_t offender(const ReduceShard& shard, std::uint32_t firstInput) {
  return firstInput < shard.numInputs ? static_cast<std::int32_t>(firstInput) : kEverybody;
}

}  // namespace coarse::cuda
