#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "coarse/shared_memory/layout.hpp"
#include "coarse/tensors/tensor_memory.hpp"

/// The second copy of parameters and states, in the memory of another memory device: it restores the contents
/// of a lost device (docs/design/recovery.md).
namespace coarse {

struct GroupPlan;
struct KeptMemory;
class TensorGroup;

/// A set of shards in memory that processes share, a bit for each. Any number of threads and processes add
/// and take; none blocks the others by dying.
class ShardSet {
 public:
  ShardSet() = default;
  ShardSet(std::atomic<std::uint64_t>* words, std::size_t numShards) noexcept
      : words_(words), numWords_(numWords(numShards)) {}
  static constexpr std::size_t numWords(std::size_t numShards) noexcept { return (numShards + 63) / 64; }

  /// Earlier writes of the caller are visible to the taker of the shard.
  void add(std::uint32_t shard) const noexcept;
  /// Takes the first shard; each goes to one caller. @returns false if the set is empty.
  bool take(std::uint32_t& shard) const noexcept;

 private:
  std::atomic<std::uint64_t>* words_ = nullptr;
  std::size_t numWords_ = 0;
};

/// Notices between owner and keeper of a replica, in the keeper's memory. Its first state is all zero.
class ReplicaControl {
 public:
  ReplicaControl() = default;
  ReplicaControl(std::byte* base, std::size_t numShards) noexcept;
  static std::size_t numBytes(std::size_t numShards) noexcept;

  /// Shards whose update every client has pushed: for the owner's sync cores.
  const ShardSet& updates() const noexcept { return updates_; }
  /// Updated shards to copy: for the keeper's sync cores.
  const ShardSet& copies() const noexcept { return copies_; }
  /// The replica's version of a shard; step 0 for none.
  UpdateRecord& record(std::size_t shard) const noexcept { return records_[shard]; }

 private:
  ShardSet updates_, copies_;
  UpdateRecord* records_ = nullptr;
};

/// The caller closes the descriptors.
struct ReplicaFds {
  int control = -1;        // ReplicaControl::numBytes() of host memory; -1 without a replica
  Region parameters = -1;  // same length and layout as the group's; -1 if another device keeps them
  Region states = -1;      // likewise
  std::size_t owner = 0;   // the memory device in whose memory parameters and states lie
  std::size_t keeper = 1;  // the memory device that keeps the replica
  bool isFilled = false;   // whether the replica equals the owner's memory at the start
};

/// Memory through which copies go to replicas: nothing of a replica is overwritten before its new contents
/// were read completely. It grows to the largest single copy.
///
/// Thread safety: one caller at a time.
class ReplicaStaging {
 public:
  /// @param memory the memory of the copied data; must outlive this.
  explicit ReplicaStaging(const TensorMemory& memory) : memory_(&memory) {}
  std::byte* reserve(std::size_t numBytes);
  TensorCopies& copies();

 private:
  const TensorMemory* memory_;
  std::unique_ptr<TensorCopies> copies_;  // made when they are first needed
  TensorBytes bytes_;
  std::size_t numBytes_ = 0;
};

/// A copy of a group's parameters and states.
///
/// Only the owner's sync cores write to parameters and states, and only the keeper's write to the replica, so
/// that a device that dies leaves at most its own memory torn. A shard is complete when the replica has it
/// too.
///
/// Thread safety: any number of threads on distinct shards.
class Replica {
 public:
  /// @throws std::invalid_argument as TensorMemory::map(), or if owner and keeper are the same.

  Replica(const GroupPlan& plan, const TensorMemory& memory, const ReplicaFds& fds);

  std::size_t owner() const noexcept { return owner_; }
  std::size_t keeper() const noexcept { return keeper_; }
  const ReplicaControl& control() const noexcept { return control_; }
  /// Null at devices that do not keep it, as the next member.
  const TensorBytes& parameters() const noexcept { return parameters_; }
  const TensorBytes& states() const noexcept { return states_; }

  /// Copies updated shards and records their steps; for shards without a gradient, only the steps. Reads
  /// everything before it overwrites anything in the replica, so that an owner who is lost meanwhile leaves
  /// the previous version.
  void copy(const TensorGroup& group, const std::vector<std::uint32_t>& shards, ReplicaStaging& staging);
  /// Records the versions of all shards, as noteUpdates(), and copies them unless the replica was filled
  /// before.
  void begin(const TensorGroup& group, std::uint32_t step, const std::vector<std::uint32_t>& updateNumbers);

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
