#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "coarse/emulation/pacer.hpp"
#include "coarse/reduce/compression.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/tensors/tensor_group.hpp"
#include "coarse/tensors/tensor_memory.hpp"

namespace coarse {

/// This node's number among the nodes of a job.
struct NodeIndex {
  std::size_t node = 0;
  std::size_t numNodes = 1;

  /// The node that reduces all nodes' contributions to `shard`, if no node was lost.
  std::size_t ownerOf(std::size_t shard) const noexcept { return shard % numNodes; }
  bool owns(std::size_t shard) const noexcept { return ownerOf(shard) == node; }
};

/// One node's contribution to a shard, kept at the node that owns the shard.
struct NodeContribution {
  std::atomic<std::uint32_t> step;  // stored last: the other fields belong to this step
  std::uint32_t numElements;
  std::uint32_t numPresent;  // workers that contributed
  std::uint32_t numCounted;  // workers that count in a mean
  std::uint32_t settings;    // as in FrameHeader
  std::uint8_t dtype;
  std::uint8_t op;
  std::uint16_t isReduced;  // of the owner: its workers' contributions lie reduced in the first one's slot
  MonotonicNs arrivedAt;    // as FrameHeader::dueAt
};
static_assert(sizeof(NodeContribution) == 32);

/// The memory through which the devices of one node receive the contributions of other nodes to one tensor
/// group (docs/design/nodes.md). Every owned shard has a place for each other node's contribution. The result
/// for that node also waits there to be sent: a node contributes to the next step only after it has received
/// the last result, so the two uses of a place never overlap.
///
/// If tensors lie in memory that the host does not read, every other shard has a stage too. This node's
/// contribution is sent from it, and the result is received into it. Owned shards that travel compressed then
/// have one for their mean.
///
/// With Compression::kInt8, every compressed shard also has the rounding errors of what this node sends of
/// it.
///
/// If nodes may be lost (`isWhole`), every shard has all of this, whoever owns it. A result of another node
/// is then received into that node's place, and its contribution says which result lies there: slots keep
/// what this node has contributed until the result is whole, and the result can be handed to others.
class NodeSegment {
 public:
  /// Maps `memory`; the caller closes its descriptor.
  /// @param tensors the memory of the group's tensors.
  /// @param compression that of gradients.
  /// @param isWhole whether nodes may be lost.
  /// @throws std::invalid_argument as mapShared(); std::runtime_error as TensorMemory::reach().
  NodeSegment(const GroupPlan& plan, NodeIndex index, const Region& memory, const TensorMemory& tensors,
              Compression compression = Compression::kNone, bool isWhole = false);
  /// @param isStaged true if the host does not read the memory of the tensors.
  static std::size_t numBytes(const GroupPlan& plan, NodeIndex index, bool isStaged,
                              Compression compression = Compression::kNone, bool isWhole = false);

  /// For an owned shard: its last completed step. For another shard: the last step to which this node
  /// contributed.
  std::atomic<std::uint32_t>& round(std::size_t shard) const noexcept { return rounds_[shard]; }
  /// For a shard that another node owns: the last step whose result has arrived.
  std::atomic<std::uint32_t>& result(std::size_t shard) const noexcept { return results_[shard]; }
  /// Digest of the settings by which this node last updated the shard's parameter, as in FrameHeader.
  std::atomic<std::uint32_t>& settings(std::size_t shard) const noexcept { return settings_[shard]; }
  /// How the shard's contributions and results travel.
  Compression compression(std::size_t shard) const noexcept { return layout_.shards[shard].compression; }
  /// Where the host reads and writes this node's part or mean of the shard; null if it does so in slots.
  std::byte* stage(std::size_t shard) const noexcept;
  /// The rounding errors of what this node sends of the shard; null without error feedback.
  float* residual(std::size_t shard) const noexcept;
  /// The address of a place or stage for the processor that computes where the tensors lie.
  std::byte* reached(std::byte* place) const noexcept { return reached_.get() + (place - mapping_.data()); }
  /// Whether nodes may be lost.
  bool isWhole() const noexcept { return isWhole_; }
  /// The last step whose reduction has begun. @pre the shard is owned, as for all functions below, or the
  /// segment is whole.
  std::atomic<std::uint32_t>& begun(std::size_t shard) const noexcept { return begun_[numberOf(shard)]; }
  NodeContribution& contribution(std::size_t shard, std::size_t node) const noexcept {
    return contributions_[numberOf(shard) * index_.numNodes + node];
  }
  /// @pre `node` is another node.
  std::byte* place(std::size_t shard, std::size_t node) const noexcept;

 private:
  /// Offsets are from the start of the segment.
  struct ShardLayout {
    Compression compression = Compression::kNone;
    bool hasStage = false;  // after the places
    std::size_t offset = 0;
    std::size_t stride = 0;          // of the places
    std::size_t residualOffset = 0;  // 0 without error feedback
  };
  struct Layout {
    std::vector<ShardLayout> shards;
    std::size_t numBytes = 0;
  };
  static Layout layOut(const GroupPlan& plan, NodeIndex index, bool isStaged, Compression compression,
                       bool isWhole);
  static std::size_t headBytes(std::size_t numShards, NodeIndex index, bool isWhole) noexcept;
  std::size_t numPlaces(std::size_t shard) const noexcept {
    return isWhole_ || index_.owns(shard) ? index_.numNodes - 1 : 0;
  }
  /// Among the shards that have contributions.
  std::size_t numberOf(std::size_t shard) const noexcept {
    return isWhole_ ? shard : shard / index_.numNodes;
  }

  NodeIndex index_;
  bool isWhole_;
  Layout layout_;
  Mapping mapping_;
  TensorBytes reached_;  // the same memory
  std::atomic<std::uint32_t>* rounds_ = nullptr;
  std::atomic<std::uint32_t>* results_ = nullptr;
  std::atomic<std::uint32_t>* settings_ = nullptr;
  std::atomic<std::uint32_t>* begun_ = nullptr;
  NodeContribution* contributions_ = nullptr;
};

}  // namespace coarse
