// The CUDA kernels of coarse/kernels/cuda as functions of the host: what the threads of all blocks do, one
// after the other.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <thread>

#include "batches.cuh"
#include "delay.cuh"
#include "measure.cuh"
#include "reduce.cuh"
#include "update.cuh"

namespace coarse::test {

/// A kernel that takes one batch.
struct HostKernel {
  std::size_t parameterBytes = 0;
  void (*run)(const void* batch) = nullptr;
};

/// What a kernel does with a batch: `body` once for every thread of every tile.
template <class Batch, class Body>
void forEveryThread(const Batch& batch, Body body) {
  for (std::uint32_t tile = 0; tile < batch.numTiles; ++tile) {
    const auto& shard = batch.shards[cuda::shardOfTile(batch.shards, batch.numShards, tile)];
    for (unsigned thread = 0; thread < cuda::kThreads; ++thread) body(shard, tile - shard.firstTile, thread);
  }
}

template <class Element, class Op, bool kIsRing>
void runReduce(const void* parameters) {
  const auto& batch = *static_cast<const cuda::ReduceBatch*>(parameters);
  forEveryThread(batch, [&](const cuda::ReduceShard& shard, std::uint32_t tile, unsigned thread) {
    cuda::reduceTile<Element, Op, kIsRing>(batch, shard, tile, thread);
  });
}

template <class Element>
void runUpdate(const void* parameters) {
  const auto& batch = *static_cast<const cuda::UpdateBatch*>(parameters);
  forEveryThread(batch, [&](const cuda::UpdateShard& shard, std::uint32_t tile, unsigned thread) {
    cuda::updateTile<Element>(batch, shard, tile, thread);
  });
}

/// One tile as the block of a kernel measures it, phase by phase.
template <class Element>
void measureTile(const cuda::ReduceBatch& batch, const cuda::ReduceShard& shard, std::uint32_t number,
                 cuda::ShardMeasure& measure) {
  using Shape = cuda::TileShape<Element>;
  const cuda::Range range = cuda::rangeOfTile(number, Shape::kElements, shard.numElements);
  const auto count = static_cast<unsigned>(range.end - range.begin);
  alignas(16) typename Element::Stored tile[Shape::kElements];
  for (unsigned thread = 0; thread < cuda::kThreads; ++thread)
    cuda::meanOfTile<Element>(batch, shard, range, thread, tile);
  bool isFinite = true;
  std::uint32_t first = shard.numInputs;
  for (unsigned thread = 0; thread < cuda::kThreads; ++thread) {
    isFinite = isFinite && cuda::isTileFinite<Element>(tile, count, thread);
    first = std::min(first, cuda::firstNonFinite<Element>(batch, shard, range, thread));
  }
  for (unsigned thread = 0; thread < cuda::kThreads; ++thread)
    cuda::writeTile<Element>(batch, shard, range, thread, tile);
  double partialSums[cuda::kNumPartialSums];
  for (unsigned i = 0; i < cuda::kNumPartialSums; ++i)
    partialSums[i] = cuda::partialSumOfSquares<Element>(tile, count, i);
  measure.sumOfSquares += cuda::sumInOrder(partialSums, cuda::kNumPartialSums);
  if (!isFinite && measure.nonFiniteOf == cuda::kNobody) measure.nonFiniteOf = cuda::offender(shard, first);
}

template <class Element>
void runMeasure(const void* parameters) {
  const auto& batch = *static_cast<const cuda::MeasureBatch*>(parameters);
  std::fill_n(batch.measures, batch.reduce.numShards, cuda::ShardMeasure{0, cuda::kNobody, 0});
  for (std::uint32_t tile = 0; tile < batch.reduce.numTiles; ++tile) {
    const std::uint32_t number = cuda::shardOfTile(batch.reduce.shards, batch.reduce.numShards, tile);
    const cuda::ReduceShard& shard = batch.reduce.shards[number];
    measureTile<Element>(batch.reduce, shard, tile - shard.firstTile, batch.measures[number]);
  }
}

/// The global timer of the device, which counts from another moment than the host's clock.
inline std::uint64_t globalTimer() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return 1'000'000'000'000'000 +
         static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

inline void runHold(const void* parameters) {
  const auto& hold = *static_cast<const cuda::Hold*>(parameters);
  *hold.startedAt = globalTimer();
  const std::uint64_t end = cuda::endOf(hold, *hold.startedAt);
  while (globalTimer() < end) std::this_thread::yield();
}

template <class Element>
void addReductions(std::map<std::string, HostKernel>& kernels, const std::string& dtype) {
  kernels["reduce_sum_" + dtype] = {sizeof(cuda::ReduceBatch), runReduce<Element, cuda::Sum, false>};
  kernels["reduce_max_" + dtype] = {sizeof(cuda::ReduceBatch), runReduce<Element, cuda::Max, false>};
  kernels["ring_sum_" + dtype] = {sizeof(cuda::ReduceBatch), runReduce<Element, cuda::Sum, true>};
  kernels["ring_max_" + dtype] = {sizeof(cuda::ReduceBatch), runReduce<Element, cuda::Max, true>};
}

template <class Element>
void addGradientKernels(std::map<std::string, HostKernel>& kernels, const std::string& dtype) {
  kernels["measure_" + dtype] = {sizeof(cuda::MeasureBatch), runMeasure<Element>};
  kernels["update_" + dtype] = {sizeof(cuda::UpdateBatch), runUpdate<Element>};
}

/// By the names that the kernels have.
inline const std::map<std::string, HostKernel>& hostKernels() {
  static const std::map<std::string, HostKernel> kernels = [] {
    std::map<std::string, HostKernel> all;
    addReductions<cuda::Plain<float>>(all, "float32");
    addReductions<cuda::Plain<double>>(all, "float64");
    addReductions<cuda::BFloat16>(all, "bfloat16");
    addReductions<cuda::Float16>(all, "float16");
    addReductions<cuda::Plain<std::int32_t>>(all, "int32");
    addReductions<cuda::Plain<std::int64_t>>(all, "int64");
    addReductions<cuda::Plain<std::uint8_t>>(all, "uint8");
    addGradientKernels<cuda::Plain<float>>(all, "float32");
    addGradientKernels<cuda::BFloat16>(all, "bfloat16");
    addGradientKernels<cuda::Float16>(all, "float16");
    all["hold_until"] = {sizeof(cuda::Hold), runHold};
    return all;
  }();
  return kernels;
}

}  // namespace coarse::test
