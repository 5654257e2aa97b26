#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coarse/device/tensor_group.hpp"

/// Optimizer steps as transactions: memory devices that have begun one can finish it without any worker
/// (docs/design/recovery.md).
namespace coarse {

/// What the parameters and states of a group hold.
struct GroupUpdates {
  std::uint32_t group = 0;
  std::uint32_t step = 0;  // optimizer steps that every shard has seen, from 1
  std::vector<std::uint32_t>
      updateNumbers;    // of the last update of each tensor, as its workers count; 0 for none
  std::string problem;  // why they are of no step at all; empty if they are not
};

/// Notes that a shard's parameter and states have seen one more step. @pre its update is complete.
void noteUpdate(TensorGroup& group, std::uint32_t shard) noexcept;
/// Notes of a copy of them that it has seen what `from` has. @pre the copy is complete.
void copyRecord(UpdateRecord& to, const UpdateRecord& from) noexcept;

/// Notes in a group control that is new what parameters and states hold that are not.
/// @throws std::invalid_argument unless there is a number for each tensor.
void noteUpdates(TensorGroup& group, std::uint32_t step, const std::vector<std::uint32_t>& updateNumbers);

/// Brings all shards to one step: if any of them has seen a step that others have not, these see it now, by
/// the slots and settings that every worker had written before it pushed the first update; or, of a group
/// with an UndoLog, these see it no more.
/// @param lostClients those whose slots and settings went with a memory device: others' are taken, which hold
/// the same mean. Of groups with a replica only. These functions leave a group that nobody can use further.
/// @pre the group has an optimizer; no worker and no sync core of any device uses it any more.
GroupUpdates finishUpdates(TensorGroup& group, const std::vector<std::size_t>& lostClients = {});

/// The same for the group's replica. Where the owner is there, the replica becomes what finishUpdates() has
/// made of the owner's memory; where it is lost, shards are updated in the replica. @pre as for
/// finishUpdates().
GroupUpdates finishReplica(TensorGroup& group, const std::vector<std::size_t>& lostClients, bool isOwnerLost);

}  // namespace coarse
