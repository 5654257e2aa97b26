#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "coarse/device/batched_compute.hpp"
#include "coarse/device/tensor_group.hpp"

namespace coarse {

/// What becomes of the contributions to a shard.
enum class ShardWork : std::uint8_t { kReduce, kMeasure, kUpdate };

/// Shards of one tensor, one behind the other in memory, with which the same is to be done; or a piece of
/// one.
struct ShardRun {
  TensorGroup* group = nullptr;
  std::uint32_t firstShard = 0;
  std::uint32_t numShards = 0;
  std::uint32_t firstElement = 0;  // of the first shard
  std::uint64_t numElements = 0;   // of all
  ShardWork work = ShardWork::kReduce;
  bool isWhole = true;                          // all elements of its shards
  std::shared_ptr<const ShardArrays> arrays{};  // as in ShardTask
};

/// Puts the shards of a batch together to the fewest runs. Shards to be measured stay alone: each has a
/// measure of its own; so do pieces, and what has arrays of its own. The same in each process for the same
/// batch. @pre no shard is in the batch twice.
std::vector<ShardRun> runsOf(const ShardBatch& batch);

}  // namespace coarse
