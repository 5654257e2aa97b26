#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coarse/tensors/tensor_group.hpp"

/// Optimizer steps as transactions: memory devices that have begun one can finish it without any worker
/// (docs/design/recovery.md).
namespace coarse {

/// The contents of a group's parameters and states.
struct GroupUpdates {
  std::uint32_t group = 0;
  std::uint32_t step = 0;  // optimizer steps applied to every shard, from 1
  std::vector<std::uint32_t>
      updateNumbers;    // of the last update of each tensor, by its workers' count; 0 for none
  std::string problem;  // why they belong to no single step; empty if they do
};

/// Records one more step for a shard's parameter and states. @pre its update is complete.
void noteUpdate(TensorGroup& group, std::uint32_t shard) noexcept;

/// Records in a new group control the contents of parameters and states that are not new.
/// @throws std::invalid_argument unless there is a number for each tensor.
void noteUpdates(TensorGroup& group, std::uint32_t step, const std::vector<std::uint32_t>& updateNumbers);

/// Brings all shards to one step. If some shards have seen a step that others have not, the others take it
/// now, by the slots and settings that every worker had written before it pushed the first update; or, in a
/// group with an UndoLog, the first are reset to the step before.
/// @param lostClients those whose slots and settings went with a memory device: others' are used, which hold
/// the same mean. Only for groups with a replica. After these functions the group cannot be used further.
/// @pre the group has an optimizer; no worker and no sync core of any device uses it any more.
GroupUpdates finishUpdates(TensorGroup& group, const std::vector<std::size_t>& lostClients = {});

/// The same for the group's replica. If the owner is alive, the replica becomes a copy of the owner's memory
/// after finishUpdates(); if it is lost, shards are updated in the replica. @pre as for finishUpdates().
GroupUpdates finishReplica(TensorGroup& group, const std::vector<std::size_t>& lostClients, bool isOwnerLost);

}  // namespace coarse
