// One thread's work on one tile of a shard: reductions, and the steps of rings.
#pragma once

#include "batches.cuh"
#include "vectors.cuh"

namespace coarse::cuda {

// Arrays that a thread has in flight at a time, two vectors of each: enough for the bandwidth of an H200 with
// half of the threads that a multiprocessor can hold.
inline constexpr unsigned kArraysInFlight = 4;

inline constexpr unsigned kVectorsPerThread = kTileBytes / kVectorBytes / kThreads;
static_assert(kVectorsPerThread * kVectorBytes * kThreads == kTileBytes, "tiles are whole");

/// The shard of a batch to which a tile belongs.
template <class Shard>
COARSE_DEVICE std::uint32_t shardOfTile(const Shard* shards, std::uint32_t numShards, std::uint32_t tile) {
  std::uint32_t begin = 0, end = numShards;
  while (end - begin > 1) {
    const std::uint32_t middle = (begin + end) / 2;
    (shards[middle].firstTile <= tile ? begin : end) = middle;
  }
  return begin;
}

/// How the elements of one dtype lie in tiles.
template <class Element>
struct TileShape {
  using Stored = typename Element::Stored;
  using Accumulator = typename Element::Accumulator;
  static constexpr unsigned kLanes = kVectorBytes / sizeof(Stored);
  static constexpr unsigned kElements = kTileBytes / sizeof(Stored);
};

/// A part of a shard's elements.
struct Range {
  std::uint64_t begin;
  std::uint64_t end;
};

COARSE_DEVICE Range rangeOfTile(std::uint64_t tile, std::uint64_t tileElements, std::uint64_t numElements) {
  const std::uint64_t begin = tile * tileElements;
  const std::uint64_t end = begin + tileElements < numElements ? begin + tileElements : numElements;
  return {begin, end};
}

/// The vectors of one thread in a tile: every kThreads-th, so that the threads of a warp read adjacent ones.
template <bool kIsWhole>
struct ThreadVectors {
  unsigned thread;
  unsigned numVectors;  // of the tile

  COARSE_DEVICE unsigned vector(unsigned i) const { return thread + i * kThreads; }
  COARSE_DEVICE bool has(unsigned i) const { return kIsWhole || vector(i) < numVectors; }
};

/// Adds a shard's inputs in order to `sums`, which are valid only if `hasSums`. @returns whether `sums` are
/// valid now.
template <class Element, class Op, bool kIsWhole>
COARSE_DEVICE bool addInputs(
    void* const* arrays, unsigned numInputs, std::uint64_t begin, const ThreadVectors<kIsWhole>& own,
    bool hasSums, typename Element::Accumulator (&sums)[kVectorsPerThread][TileShape<Element>::kLanes]) {
  using Shape = TileShape<Element>;
  COARSE_KEEP_LOOP
  for (unsigned first = 0; first < numInputs; first += kArraysInFlight) {
    Words<kVectorBytes> loaded[kArraysInFlight][kVectorsPerThread];
    COARSE_UNROLL
    for (unsigned k = 0; k < kArraysInFlight; ++k) {
      if (first + k >= numInputs) continue;
      const auto* input = static_cast<const typename Shape::Stored*>(arrays[first + k]) + begin;
      COARSE_UNROLL
      for (unsigned i = 0; i < kVectorsPerThread; ++i) {
        if (own.has(i)) loaded[k][i] = loadWords<kVectorBytes>(input + own.vector(i) * Shape::kLanes);
      }
    }
    COARSE_UNROLL
    for (unsigned k = 0; k < kArraysInFlight; ++k) {
      if (first + k >= numInputs) continue;
      COARSE_UNROLL
      for (unsigned i = 0; i < kVectorsPerThread; ++i) {
        if (!own.has(i)) continue;
        typename Shape::Accumulator values[Shape::kLanes];
        unpack<Element>(loaded[k][i], values);
        COARSE_UNROLL
        for (unsigned lane = 0; lane < Shape::kLanes; ++lane) {
          const bool isFirst = k == 0 && !hasSums;
          sums[i][lane] = isFirst ? values[lane] : Op::apply(sums[i][lane], values[lane]);
        }
      }
    }
    hasSums = true;
  }
  return hasSums;
}

/// The result of a tile for one element. @pre the shard has an input or a received array.
template <class Element, class Op>
COARSE_DEVICE typename Element::Accumulator sumOfElement(const ReduceBatch& batch, const ReduceShard& shard,
                                                         std::uint64_t element) {
  using Stored = typename Element::Stored;
  using Accumulator = typename Element::Accumulator;
  void* const* inputs = batch.arrays + shard.firstInput;
  unsigned first = 0;
  Accumulator sum;
  if (shard.received != kNoArray) {
    sum = static_cast<const Accumulator*>(batch.arrays[shard.received])[element];
  } else {
    sum = Element::load(static_cast<const Stored*>(inputs[first++])[element]);
  }
  for (unsigned k = first; k < shard.numInputs; ++k)
    sum = Op::apply(sum, Element::load(static_cast<const Stored*>(inputs[k])[element]));
  return sum;
}

template <class Element>
COARSE_DEVICE typename Element::Stored finished(typename Element::Accumulator sum, std::uint32_t divisor) {
  typename Element::Accumulator values[1] = {sum};
  divide(values, divisor);
  return Element::store(values[0]);
}

template <class Element, class Op>
COARSE_DEVICE void reduceElement(const ReduceBatch& batch, const ReduceShard& shard, std::uint64_t element) {
  using Accumulator = typename Element::Accumulator;
  const Accumulator sum = sumOfElement<Element, Op>(batch, shard, element);
  if (shard.sent != kNoArray) static_cast<Accumulator*>(batch.arrays[shard.sent])[element] = sum;
  const auto result = finished<Element>(sum, shard.divisor);
  for (unsigned j = 0; j < shard.numOutputs; ++j)
    static_cast<typename Element::Stored*>(batch.arrays[shard.firstOutput + j])[element] = result;
}

/// @param begin first element of the tile.
template <class Element, class Op, bool kIsRing, bool kIsWhole>
COARSE_DEVICE void reduceVectors(const ReduceBatch& batch, const ReduceShard& shard, std::uint64_t begin,
                                 const ThreadVectors<kIsWhole>& own) {
  using Shape = TileShape<Element>;
  using Accumulator = typename Shape::Accumulator;
  Accumulator sums[kVectorsPerThread][Shape::kLanes] = {};
  bool hasSums = false;
  if constexpr (kIsRing) {
    hasSums = shard.received != kNoArray;
    const auto* received =
        hasSums ? static_cast<const Accumulator*>(batch.arrays[shard.received]) + begin : nullptr;
    COARSE_UNROLL
    for (unsigned i = 0; i < kVectorsPerThread; ++i) {
      if (hasSums && own.has(i)) loadAccumulators(received + own.vector(i) * Shape::kLanes, sums[i]);
    }
  }
  addInputs<Element, Op>(batch.arrays + shard.firstInput, shard.numInputs, begin, own, hasSums, sums);
  if constexpr (kIsRing) {
    auto* const sent =
        shard.sent == kNoArray ? nullptr : static_cast<Accumulator*>(batch.arrays[shard.sent]) + begin;
    COARSE_UNROLL
    for (unsigned i = 0; i < kVectorsPerThread; ++i) {
      if (sent != nullptr && own.has(i)) storeAccumulators(sent + own.vector(i) * Shape::kLanes, sums[i]);
    }
  }
  Words<kVectorBytes> results[kVectorsPerThread];
  COARSE_UNROLL
  for (unsigned i = 0; i < kVectorsPerThread; ++i) {
    divide(sums[i], shard.divisor);
    results[i] = pack<Element>(sums[i]);
  }
  for (unsigned j = 0; j < shard.numOutputs; ++j) {
    auto* const output = static_cast<typename Shape::Stored*>(batch.arrays[shard.firstOutput + j]) + begin;
    COARSE_UNROLL
    for (unsigned i = 0; i < kVectorsPerThread; ++i) {
      if (own.has(i)) storeWords<kVectorBytes>(output + own.vector(i) * Shape::kLanes, results[i]);
    }
  }
}

/// One thread's work on tile `tile` of the shard; all threads of a block together reduce it.
template <class Element, class Op, bool kIsRing>
COARSE_DEVICE void reduceTile(const ReduceBatch& batch, const ReduceShard& shard, std::uint32_t tile,
                              unsigned thread) {
  using Shape = TileShape<Element>;
  const bool hasReceived = kIsRing && shard.received != kNoArray;
  if (shard.numInputs == 0 && !hasReceived) return;
  const Range range = rangeOfTile(tile, Shape::kElements, shard.numElements);
  std::uint64_t rest = range.begin;
  if (shard.isAligned != 0 && range.end > range.begin) {
    const auto numVectors = static_cast<unsigned>((range.end - range.begin) / Shape::kLanes);
    if (numVectors == kVectorsPerThread * kThreads) {
      return reduceVectors<Element, Op, kIsRing>(batch, shard, range.begin,
                                                 ThreadVectors<true>{thread, numVectors});
    }
    reduceVectors<Element, Op, kIsRing>(batch, shard, range.begin, ThreadVectors<false>{thread, numVectors});
    rest += std::uint64_t{numVectors} * Shape::kLanes;
  }
  for (std::uint64_t i = rest + thread; i < range.end; i += kThreads)
    reduceElement<Element, Op>(batch, shard, i);
}

}  // namespace coarse::cuda
