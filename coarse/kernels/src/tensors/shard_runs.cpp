#include "coarse/tensors/shard_runs.hpp"

#include <algorithm>
#include <functional>
#include <utility>

namespace coarse {
namespace {

ShardWork workOf(const ShardTask& task) noexcept {
  const TensorGroup& group = *task.group;
  if (task.arrays != nullptr) return task.arrays->isMeasured ? ShardWork::kMeasure : ShardWork::kReduce;
  if (group.isUpdate(task.entry.shard)) return ShardWork::kUpdate;
  return group.isMeasured(task.entry.shard) ? ShardWork::kMeasure : ShardWork::kReduce;
}

bool haveSameFlags(const TensorGroup& group, std::uint32_t one, std::uint32_t other) noexcept {
  for (std::size_t client = 0; client < group.plan().numClients; ++client) {
    if (group.control().contribution(one, client).flags != group.control().contribution(other, client).flags)
      return false;
  }
  return true;
}

bool continues(const ShardRun& run, const ShardTask& task) noexcept {
  if (!run.isWhole || run.arrays != nullptr || task.arrays != nullptr) return false;
  const std::uint32_t last = run.firstShard + run.numShards - 1;
  if (task.group != run.group || task.entry.shard != last + 1 || run.work == ShardWork::kMeasure)
    return false;
  const Shard& before = run.group->plan().shards[last];
  const Shard& shard = run.group->plan().shards[task.entry.shard];
  return shard.tensor == before.tensor && !shard.isDynamic &&
         shard.offset == before.offset + before.numElements * itemBytes(before.dtype) &&
         haveSameFlags(*run.group, last, task.entry.shard);
}

void add(std::vector<ShardRun>& runs, const ShardTask& task, const ShardPiece& piece,
         std::uint32_t shardElements) {
  const std::uint32_t numElements = piece.end - piece.begin;
  const bool isWhole = numElements == shardElements;
  if (isWhole && !runs.empty() && continues(runs.back(), task)) {
    ++runs.back().numShards;
    runs.back().numElements += numElements;
    return;
  }
  ShardRun run;
  run.group = task.group;
  run.firstShard = task.entry.shard;
  run.numShards = 1;
  run.firstElement = piece.begin;
  run.numElements = numElements;
  run.work = workOf(task);
  run.isWhole = isWhole;
  run.arrays = task.arrays;
  runs.push_back(run);
}

}  // namespace

std::vector<ShardRun> runsOf(const ShardBatch& batch) {
  ShardBatch inOrder = batch;
  std::sort(inOrder.begin(), inOrder.end(), [](const ShardTask& one, const ShardTask& other) {
    if (one.group != other.group) return one.group->plan().id < other.group->plan().id;
    return one.entry.shard < other.entry.shard;
  });
  std::vector<ShardRun> runs;
  for (const ShardTask& task : inOrder) {
    const std::uint32_t numElements = task.group->shape(task.entry.shard).numElements;
    const std::vector<ShardPiece> all{{0, numElements}};
    for (const ShardPiece& piece : task.pieces.empty() ? all : task.pieces)
      add(runs, task, piece, numElements);
  }
  return runs;
}

}  // namespace coarse
