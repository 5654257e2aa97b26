#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "coarse/snapshot/snapshot.hpp"

namespace coarse {

struct GroupPlan;

/// Snapshots of an optimizer's arrays for a tensor group: array 0 of a tensor is its parameter, the others
/// are its KeptArrays. A block is one array's part of one shard.
///
/// Thread safety: as SnapshotStore.
class GroupSnapshots {
 public:
  /// @param parameters, states their mappings, which must outlive this.
  /// @throws std::invalid_argument as SnapshotStore.
  GroupSnapshots(const GroupPlan& plan, const std::byte* parameters, const std::byte* states,
                 const SnapshotFds& fds, std::chrono::milliseconds patience = SnapshotStore::kPatience);

  /// Length of each block, array by array; 0 where a tensor has fewer arrays than others.
  static std::vector<std::size_t> blockBytes(const GroupPlan& plan);

  std::size_t numArrays() const noexcept { return numArrays_; }
  std::size_t numShards() const noexcept { return numShards_; }
  SnapshotStore& store() noexcept { return store_; }
  const SnapshotStore& store() const noexcept { return store_; }

  /// SnapshotStore::warm() of one array's part of a shard.
  bool warm(std::uint32_t shard, std::size_t array) noexcept { return store_.warm(block(shard, array)); }
  /// Call before a shard is updated.
  void keep(std::uint32_t shard);
  /// The same for several shards, whose copies run together.
  void keep(const std::vector<std::uint32_t>& shards);
  /// SnapshotStore::read() of one array's part of a shard.
  bool read(std::uint32_t snapshot, std::uint32_t shard, std::size_t array, std::byte* destination);
  void letGo(std::uint32_t snapshot, std::uint32_t shard, std::size_t array) noexcept;
  std::size_t numBytes(std::uint32_t shard, std::size_t array) const noexcept {
    return store_.blockBytes(block(shard, array));
  }

 private:
  std::size_t block(std::uint32_t shard, std::size_t array) const noexcept {
    return array * numShards_ + shard;
  }

  std::size_t numShards_;
  std::size_t numArrays_;
  std::vector<const std::byte*> blocks_;  // address of each
  SnapshotStore store_;
};

}  // namespace coarse
