#include "coarse/node/node_segment.hpp"

namespace coarse {
namespace {

/// Shards with contributions of other nodes.
std::size_t numContributed(std::size_t numShards, NodeIndex index, bool isWhole) noexcept {
  return isWhole ? numShards : (numShards + index.numNodes - 1 - index.node) / index.numNodes;
}

std::size_t shardBytes(const Shard& shard) {
  return shard.numElements * (shard.isDynamic ? 1 : itemBytes(shard.dtype));
}

/// How a shard travels, if gradients are compressed. Where that would save nothing, it does not change.
Compression compressionOf(const GroupPlan& plan, const Shard& shard, Compression ofGradients) {
  const bool isCompressible = plan.areGradients && !shard.isDynamic && !plan.isTable(shard) &&
                              shard.dtype == DType::kFloat32 && shard.op == ReduceOp::kMean;
  const bool isSmaller = compressedBytes(ofGradients, shard.numElements) < shardBytes(shard);
  return isCompressible && isSmaller ? ofGradients : Compression::kNone;
}

}  // namespace

NodeSegment::NodeSegment(const GroupPlan& plan, NodeIndex index, const Region& memory,
                         const TensorMemory& tensors, Compression compression, bool isWhole)
    : index_(index),
      isWhole_(isWhole),
      layout_(layOut(plan, index, !tensors.isHost(), compression, isWhole)),
      mapping_(mapShared(memory, layout_.numBytes, Mapping::Access::kReadWrite, "node segment")),
      reached_(tensors.reach(mapping_.data(), mapping_.numBytes())) {
  const std::size_t numShards = plan.shards.size();
  ArrayCursor cursor(mapping_.data());
  rounds_ = cursor.take<std::atomic<std::uint32_t>>(numShards);
  results_ = cursor.take<std::atomic<std::uint32_t>>(numShards);
  settings_ = cursor.take<std::atomic<std::uint32_t>>(numShards);
  begun_ = cursor.take<std::atomic<std::uint32_t>>(numContributed(numShards, index, isWhole));
  contributions_ = cursor.take<NodeContribution>(numContributed(numShards, index, isWhole) * index.numNodes);
}

std::size_t NodeSegment::numBytes(const GroupPlan& plan, NodeIndex index, bool isStaged,
                                  Compression compression, bool isWhole) {
  return layOut(plan, index, isStaged, compression, isWhole).numBytes;
}

std::byte* NodeSegment::place(std::size_t shard, std::size_t node) const noexcept {
  const ShardLayout& layout = layout_.shards[shard];
  const std::size_t other = node < index_.node ? node : node - 1;
  return mapping_.data() + layout.offset + other * layout.stride;
}

std::byte* NodeSegment::stage(std::size_t shard) const noexcept {
  const ShardLayout& layout = layout_.shards[shard];
  return layout.hasStage ? mapping_.data() + layout.offset + numPlaces(shard) * layout.stride : nullptr;
}

float* NodeSegment::residual(std::size_t shard) const noexcept {
  const std::size_t offset = layout_.shards[shard].residualOffset;
  return offset == 0 ? nullptr : reinterpret_cast<float*>(mapping_.data() + offset);
}

NodeSegment::Layout NodeSegment::layOut(const GroupPlan& plan, NodeIndex index, bool isStaged,
                                        Compression compression, bool isWhole) {
  Layout layout;
  layout.numBytes = headBytes(plan.shards.size(), index, isWhole);
  for (std::size_t number = 0; number < plan.shards.size(); ++number) {
    const Shard& shard = plan.shards[number];
    ShardLayout own;
    own.compression = compressionOf(plan, shard, compression);
    own.hasStage = isStaged && (!index.owns(number) || own.compression != Compression::kNone);
    own.offset = layout.numBytes;
    own.stride = roundUp(shardBytes(shard), kCacheLineBytes);
    const bool hasPlaces = isWhole || index.owns(number);
    const std::size_t numPlaces = (hasPlaces ? index.numNodes - 1 : 0) + (own.hasStage ? 1 : 0);
    layout.numBytes += numPlaces * own.stride;
    if (own.compression == Compression::kInt8) {
      own.residualOffset = layout.numBytes;
      layout.numBytes += own.stride;
    }
    layout.shards.push_back(own);
  }
  return layout;
}

std::size_t NodeSegment::headBytes(std::size_t numShards, NodeIndex index, bool isWhole) noexcept {
  ArrayCursor cursor(nullptr);
  for (int array = 0; array < 3; ++array) cursor.take<std::atomic<std::uint32_t>>(numShards);
  cursor.take<std::atomic<std::uint32_t>>(numContributed(numShards, index, isWhole));
  cursor.take<NodeContribution>(numContributed(numShards, index, isWhole) * index.numNodes);
  return cursor.offset();
}

}  // namespace coarse
