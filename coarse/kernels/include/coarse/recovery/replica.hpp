#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/tensor_memory.hpp"

/// The second copy of what an optimizer keeps, in the memory of another memory device: what a device has lost
/// comes back from it (docs/design/recovery.md).
namespace coarse {

struct GroupPlan;
struct GroupUpdates;
struct KeptMemory;
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
  Region parameters = -1;  // as long as those of the group, and alike; none where another device keeps them
  Region states = -1;      // likewise
  std::size_t owner = 0;   // the memory device in whose memory parameters and states lie, and
  std::size_t keeper = 1;  // that of the replica
  bool isFilled = false;   // whether the replica is what the owner has, at the start
};

/// Memory through which copies go to replicas: of a replica nothing is overwritten before what is to come
/// there was read whole. It grows to what is the most at once.
///
/// Thread safety: one caller at a time.
class ReplicaStaging {
 public:
  /// @param memory of what is copied; must outlive this.
  explicit ReplicaStaging(const TensorMemory& memory) : memory_(&memory) {}
  std::byte* reserve(std::size_t numBytes);
  TensorCopies& copies();

 private:
  const TensorMemory* memory_;
  std::unique_ptr<TensorCopies> copies_;  // made when they are first needed
  TensorBytes bytes_;
  std::size_t numBytes_ = 0;
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
  /// Null at devices that do not keep it, as what follows.
  const TensorBytes& parameters() const noexcept { return parameters_; }
  const TensorBytes& states() const noexcept { return states_; }

  /// Copies shards that were updated, and notes their steps; of those that had no gradient, only the steps.
  /// All is read before anything of the replica is overwritten, so that an owner who is lost meanwhile leaves
  /// the version before.
  void copy(const TensorGroup& group, const std::vector<std::uint32_t>& shards, ReplicaStaging& staging);
  /// Notes what all shards hold, and copies them unless the replica was filled before.
  void begin(const TensorGroup& group, const GroupUpdates& updates);

 private:
  KeptMemory kept() const noexcept;

  std::size_t owner_, keeper_;
  bool isFilled_;
  Mapping controlMapping_;
  ReplicaControl control_;
  TensorBytes parameters_;
  TensorBytes states_;
};

}  // namespace coarse
