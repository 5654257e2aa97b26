#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "coarse/tensors/batched_compute.hpp"
#include "coarse/tensors/tensor_group.hpp"

namespace coarse {

/// The work to do with the contributions to a shard.
enum class ShardWork : std::uint8_t { kReduce, kMeasure, kUpdate };

/// Shards of one tensor that are adjacent in memory and need the same work; or a piece of one shard.
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

/// Joins the shards of a batch into the fewest runs. Shards to be measured stay separate, because each has
/// its own measure; so do pieces, and shards with their own arrays. Every process gets the same runs for the
/// same batch. @pre no shard is in the batch twice.
std::vector<ShardRun> runsOf(const ShardBatch& batch);

}  // namespace coarse
