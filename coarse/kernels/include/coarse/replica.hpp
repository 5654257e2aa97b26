#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "coarse/layout.hpp"
#include "coarse/tensor_memory.hpp"

/// The second copy of what an optimizer keeps, in the memory of another memory device: what a device has lost
/// comes back from it (docs/design/recovery.md).
namespace coarse {

struct GroupPlan;
struct GroupUpdates;
class TensorGroup;

/// A set of shards in memory that processes share, a bit for each. Any number of threads and processes add
/// and take; none of them holds the others up by dying.
class ShardSet {
 public:
  ShardSet() = default;
  ShardSet(std::atomic<std::uint64_t>* words, std::size_t numShards) noexcept
      : words_(words), numWords_(numWords(numShards)) {}
  static constexpr std::size_t numWords(std::size_t numShards) noexcept { return (numShards + 63) / 64; }

  /// What the caller has written before is seen by whoever takes the shard.
  void add(std::uint32_t shard) const noexcept;
  /// Takes the first shard; each goes to one caller. @returns false if there is none.
  bool take(std::uint32_t& shard) const noexcept;

 private:
  std::atomic<std::uint64_t>* words_ = nullptr;
  std::size_t numWords_ = 0;
};

/// What owner and keeper of a replica tell each other, in the keeper's memory. All zero is its first state.
class ReplicaControl {
 public:
  ReplicaControl() = default;
  ReplicaControl(std::byte* base, std::size_t numShards) noexcept;
  static std::size_t numBytes(std::size_t numShards) noexcept;

  /// Shards whose update every client has pushed: for the sync cores of the owner.
  const ShardSet& updates() const noexcept { return updates_; }
  /// Shards that were updated and are to be copied: for those of the keeper.
  const ShardSet& copies() const noexcept { return copies_; }
  /// What the replica holds of a shard; step 0 for nothing.
  UpdateRecord& record(std::size_t shard) const noexcept { return records_[shard]; }

 private:
  ShardSet updates_, copies_;
  UpdateRecord* records_ = nullptr;
};

/// Descriptors stay the caller's.
struct ReplicaFds {
  int control = -1;        // ReplicaControl::numBytes() of host memory; none without a replica
  Region parameters = -1;  // as long as those of the group, and alike
  Region states = -1;      // likewise
  std::size_t owner = 0;   // the memory device in whose memory parameters and states lie, and
  std::size_t keeper = 1;  // that of the replica
  bool isFilled = false;   // whether the replica is what the owner has, at the start
};

/// Parameters and states of a group once more.
///
/// The owner's sync cores alone write to parameters and states, the keeper's alone to the replica, so that
/// whoever dies leaves at most its own memory torn. A shard is complete when the replica has it too.
///
/// Thread safety: any number of threads on distinct shards.
class Replica {
 public:
  /// @throws std::invalid_argument as TensorMemory::map(), or if owner and keeper are one.
  Replica(const GroupPlan& plan, const TensorMemory& memory, const ReplicaFds& fds);

  std::size_t owner() const noexcept { return owner_; }
  std::size_t keeper() const noexcept { return keeper_; }
  const ReplicaControl& control() const noexcept { return control_; }
  std::byte* parameters() const noexcept { return parameters_.get(); }
  std::byte* states() const noexcept { return states_.get(); }

  /// Copies a shard that was updated, and notes its step. It is read whole before anything of the replica is
  /// overwritten, so that an owner who is lost meanwhile leaves the version before.
  /// @param staging memory of the calling thread, which grows to what the largest shard needs.
  /// @param hasChanged whether the update wrote anything; if not, only the step is noted.
  void copy(const TensorGroup& group, std::uint32_t shard, std::vector<std::byte>& staging,
            bool hasChanged = true);
  /// Notes what all shards hold, and copies them unless the replica was filled before.
  void begin(const TensorGroup& group, const GroupUpdates& updates);

 private:
  void copyArrays(const TensorGroup& group, std::uint32_t shard, std::vector<std::byte>& staging);

  std::size_t owner_, keeper_;
  bool isFilled_;
  Mapping controlMapping_;
  ReplicaControl control_;
  TensorBytes parameters_;
  TensorBytes states_;
};

}  // namespace coarse
