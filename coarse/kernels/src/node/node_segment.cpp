#include "coarse/node/node_segment.hpp"

namespace coarse {
namespace {

std::size_t numOwned(std::size_t numShards, NodeIndex index) noexcept {
  return (numShards + index.numNodes - 1 - index.node) / index.numNodes;
}

std::size_t shardBytes(const Shard& shard) {
  return shard.numElements * (shard.isDynamic ? 1 : itemBytes(shard.dtype));
}

}  // namespace

NodeSegment::NodeSegment(const GroupPlan& plan, NodeIndex index, const Region& memory,
                         const TensorMemory& tensors)
    : index_(index),
      placeOffsets_(placeOffsets(plan, index, !tensors.isHost())),
      mapping_(mapShared(memory, numBytes(plan, index, !tensors.isHost()), Mapping::Access::kReadWrite,
                         "node segment")),
      reached_(tensors.reach(mapping_.data(), mapping_.numBytes())) {
  const std::size_t numShards = plan.shards.size();
  ArrayCursor cursor(mapping_.data());
  rounds_ = cursor.take<std::atomic<std::uint32_t>>(numShards);
  results_ = cursor.take<std::atomic<std::uint32_t>>(numShards);
  settings_ = cursor.take<std::atomic<std::uint32_t>>(numShards);
  arrivals_ = cursor.take<std::atomic<std::uint32_t>>(numOwned(numShards, index));
  contributions_ = cursor.take<NodeContribution>(numOwned(numShards, index) * index.numNodes);
  places_ = mapping_.data() + cursor.offset();
}

std::size_t NodeSegment::numBytes(const GroupPlan& plan, NodeIndex index, bool isStaged) {
  return headBytes(plan.shards.size(), index) + placeOffsets(plan, index, isStaged).back();
}

std::byte* NodeSegment::place(std::size_t shard, std::size_t node) const noexcept {
  const std::size_t stride = (placeOffsets_[shard + 1] - placeOffsets_[shard]) / (index_.numNodes - 1);
  const std::size_t other = node < index_.node ? node : node - 1;
  return places_ + placeOffsets_[shard] + other * stride;
}

std::byte* NodeSegment::stage(std::size_t shard) const noexcept {
  const bool hasStage = !index_.owns(shard) && placeOffsets_[shard + 1] > placeOffsets_[shard];
  return hasStage ? places_ + placeOffsets_[shard] : nullptr;
}

std::vector<std::size_t> NodeSegment::placeOffsets(const GroupPlan& plan, NodeIndex index, bool isStaged) {
  std::vector<std::size_t> offsets{0};
  for (std::size_t shard = 0; shard < plan.shards.size(); ++shard) {
    const std::size_t stride = roundUp(shardBytes(plan.shards[shard]), kCacheLineBytes);
    offsets.push_back(offsets.back() + stride * numPlaces(shard, index, isStaged));
  }
  return offsets;
}

std::size_t NodeSegment::numPlaces(std::size_t shard, NodeIndex index, bool isStaged) noexcept {
  if (index.owns(shard)) return index.numNodes - 1;
  return isStaged ? 1 : 0;
}

std::size_t NodeSegment::headBytes(std::size_t numShards, NodeIndex index) noexcept {
  ArrayCursor cursor(nullptr);
  for (int array = 0; array < 3; ++array) cursor.take<std::atomic<std::uint32_t>>(numShards);
  cursor.take<std::atomic<std::uint32_t>>(numOwned(numShards, index));
  cursor.take<NodeContribution>(numOwned(numShards, index) * index.numNodes);
  return cursor.offset();
}

}  // namespace coarse
