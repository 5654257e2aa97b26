#pragma once

#include <cstdint>

#include "coarse/device/tensor_group.hpp"

/// What becomes of a shard of a table once all contributions have arrived and agree: what shard_reducer.hpp
/// does, for the rows that some contribution has. Bits are those of the same rows in whole tensors.
///
/// Not to be called for one shard by two threads at once; for several shards of one table it may be.
namespace coarse {

/// Writes the mean of the contributions' rows to the buffers of all clients, one row after the other for the
/// whole table. Rows that nobody has are in no list. With `measure`, adds up what the rows of this shard are.
void reduceRows(TensorGroup& group, std::uint32_t shard, GradientMeasure* measure = nullptr) noexcept;

/// Updates the rows of the parameter and its states that some contribution has, by their mean, and no others;
/// with kReduced by the rows that the first contribution holds as a mean.
/// @pre the group has an optimizer, whose settings are `settings`, and a rule that the states suffice for.
void updateRows(TensorGroup& group, std::uint32_t shard, const UpdateSettings& settings) noexcept;

}  // namespace coarse
