#pragma once

#include <cstdint>
#include <vector>

#include "coarse/batched_compute.hpp"
#include "coarse/tensor_group.hpp"

namespace coarse {

/// What becomes of the contributions to a shard.
enum class ShardWork : std::uint8_t { kReduce, kMeasure, kUpdate };

/// Shards of one tensor, one behind the other in memory, with which the same is to be done.
struct ShardRun {
  TensorGroup* group = nullptr;
  std::uint32_t firstShard = 0;
  std::uint32_t numShards = 0;
  std::uint64_t numElements = 0;  // of all
  ShardWork work = ShardWork::kReduce;
};

/// Puts the shards of a batch together to the fewest runs. Shards to be measured stay alone: each has a
/// measure of its own. @pre no shard is in the batch twice.
std::vector<ShardRun> runsOf(const ShardBatch& batch);

}  // namespace coarse
