#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/tensor_memory.hpp"

/// What parameters and states were before a step that begins before all its gradients are complete
/// (docs/design/recovery.md).
namespace coarse {

struct GroupPlan;
class TensorGroup;

/// Descriptors stay the caller's.
struct UndoFds {
  int control = -1;        // UndoLog::controlBytes() of host memory; none without a log
  Region parameters = -1;  // as long as those of the group, and alike
  Region states = -1;      // likewise
};

/// The version before of each shard that has seen a step, so that a step which not all shards can see is
/// undone.
///
/// Thread safety: any number of threads on distinct shards; one where it does not lie in the host's memory.
class UndoLog {
 public:
  /// @throws std::invalid_argument as TensorMemory::map().
  UndoLog(const GroupPlan& plan, const TensorMemory& memory, const UndoFds& fds);
  static std::size_t controlBytes(std::size_t numShards) noexcept;

  /// To be called before the parameter and the states of a shard change.
  void keep(const TensorGroup& group, std::uint32_t shard);
  /// The same for several, whose copies run together.
  void keep(const TensorGroup& group, const std::uint32_t* shards, std::size_t count);
  /// Makes a shard what it was after `step`. @returns whether the log has that version.
  bool restore(TensorGroup& group, std::uint32_t shard, std::uint32_t step);

 private:
  Mapping controlMapping_;
  UpdateRecord* records_;  // what the log has of each shard
  std::unique_ptr<TensorCopies> copies_;
  TensorBytes parameters_;
  TensorBytes states_;
};

}  // namespace coarse
