#pragma once

#include <cstdint>

#include "coarse/tensors/tensor_group.hpp"

/// The work of shard_reducer.hpp for a shard of a table, once all contributions have arrived and agree. It
/// handles only the rows that some contribution has. Bits are those of the same rows in whole tensors.
///
/// Two threads must not call these functions for one shard at once; for several shards of one table they may.
namespace coarse {

/// Writes the mean of the contributions' rows to the buffers of all clients, one row after the other for the
/// whole table. Rows that no client has are in no list. With `measure`, measures the rows of this shard.
void reduceRows(TensorGroup& group, std::uint32_t shard, GradientMeasure* measure = nullptr) noexcept;

/// Updates, by their mean, only the rows of the parameter and its states that some contribution has; with
/// kReduced by the rows that the first contribution holds as a mean.
/// @pre the group has an optimizer with settings `settings`, whose rule needs no more than the group's
/// states.
void updateRows(TensorGroup& group, std::uint32_t shard, const UpdateSettings& settings) noexcept;

}  // namespace coarse
