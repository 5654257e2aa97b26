#include "coarse/tensors/group_snapshots.hpp"

#include <algorithm>

#include "coarse/tensors/tensor_group.hpp"

namespace coarse {

namespace {

struct Block {
  bool isParameter = false;  // otherwise one of its other arrays
  std::size_t offset = 0;    // in the segment of all arrays of its kind
  std::size_t numBytes = 0;
};

std::size_t countArrays(const std::vector<KeptArrays>& kept) {
  std::size_t most = 0;
  for (const KeptArrays& tensor : kept) most = std::max(most, tensor.numArrays);
  return 1 + most;
}

/// All blocks, array by array; tensors with fewer arrays than others have empty blocks.
std::vector<Block> blocksOf(const GroupPlan& plan) {
  if (!plan.hasOptimizer) return {};
  const std::vector<KeptArrays> kept = plan.keptArrays();
  std::vector<Block> blocks;
  for (const Shard& shard : plan.shards) {
    const KeptArrays& tensor = kept[shard.tensor];
    const std::size_t offset = tensor.parameterOffset + (shard.offset - tensor.slotOffset);
    blocks.push_back({true, offset, shard.numElements * itemBytes(shard.dtype)});
  }
  for (std::size_t array = 0; array + 1 < countArrays(kept); ++array) {
    for (const Shard& shard : plan.shards) {
      const KeptArrays& tensor = kept[shard.tensor];
      const std::size_t element = (shard.offset - tensor.slotOffset) / itemBytes(shard.dtype);
      const std::size_t offset = tensor.offset + array * tensor.arrayBytes + element * sizeof(float);
      blocks.push_back(array < tensor.numArrays ? Block{false, offset, shard.numElements * sizeof(float)}
                                                : Block{});
    }
  }
  return blocks;
}

}  // namespace

GroupSnapshots::GroupSnapshots(const GroupPlan& plan, const std::byte* parameters, const std::byte* states,
                               const SnapshotFds& fds, std::chrono::milliseconds patience)
    : numShards_(plan.shards.size()),
      numArrays_(countArrays(plan.keptArrays())),
      store_(blockBytes(plan), fds, patience) {
  for (const Block& block : blocksOf(plan))
    blocks_.push_back((block.isParameter ? parameters : states) + block.offset);
}

std::vector<std::size_t> GroupSnapshots::blockBytes(const GroupPlan& plan) {
  std::vector<std::size_t> bytes;
  for (const Block& block : blocksOf(plan)) bytes.push_back(block.numBytes);
  return bytes;
}

void GroupSnapshots::keep(std::uint32_t shard) {
  for (std::size_t array = 0; array < numArrays_; ++array)
    store_.keep(block(shard, array), blocks_[block(shard, array)]);
}

void GroupSnapshots::keep(const std::vector<std::uint32_t>& shards) {
  std::vector<BlockInPlace> blocks;
  for (const std::uint32_t shard : shards) {
    for (std::size_t array = 0; array < numArrays_; ++array)
      blocks.push_back({block(shard, array), blocks_[block(shard, array)]});
  }
  store_.keep(blocks.data(), blocks.size());
}

bool GroupSnapshots::read(std::uint32_t snapshot, std::uint32_t shard, std::size_t array,
                          std::byte* destination) {
  return store_.read(snapshot, block(shard, array), blocks_[block(shard, array)], destination);
}

void GroupSnapshots::letGo(std::uint32_t snapshot, std::uint32_t shard, std::size_t array) noexcept {
  store_.letGo(snapshot, block(shard, array));
}

}  // namespace coarse
