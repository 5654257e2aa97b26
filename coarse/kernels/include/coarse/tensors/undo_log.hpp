#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "coarse/shared_memory/layout.hpp"
#include "coarse/tensors/tensor_memory.hpp"

/// Parameters and states as they were before a step that begins before all its gradients are complete
/// (docs/design/recovery.md).
namespace coarse {

struct GroupPlan;
class TensorGroup;

/// The caller closes the descriptors.
struct UndoFds {
  int control = -1;        // UndoLog::controlBytes() of host memory; -1 without a log
  Region parameters = -1;  // same length and layout as the group's
  Region states = -1;      // likewise
};

/// The previous version of each shard that has taken a step, to undo a step that not all shards can take.
///
/// Thread safety: any number of threads on distinct shards; one thread if it does not lie in host memory.
class UndoLog {
 public:
  /// @throws std::invalid_argument as TensorMemory::map().
  UndoLog(const GroupPlan& plan, const TensorMemory& memory, const UndoFds& fds);
  static std::size_t controlBytes(std::size_t numShards) noexcept;

  /// Call before the parameter and the states of a shard change.
  void keep(const TensorGroup& group, std::uint32_t shard);
  /// The same for several shards, whose copies run together.
  void keep(const TensorGroup& group, const std::uint32_t* shards, std::size_t count);
  /// Resets a shard to its version after `step`. @returns whether the log has that version.
  bool restore(TensorGroup& group, std::uint32_t shard, std::uint32_t step);

 private:
  Mapping controlMapping_;
  UpdateRecord* records_;  // the log's version of each shard
  std::unique_ptr<TensorCopies> copies_;
  TensorBytes parameters_;
  TensorBytes states_;
};

}  // namespace coarse
