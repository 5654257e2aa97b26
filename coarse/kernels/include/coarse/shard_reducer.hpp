#pragma once

#include <cstddef>
#include <cstdint>

#include "coarse/tensor_group.hpp"

/// What a sync core does with a shard to which every client of the node has contributed, where memory is one:
/// all contributions are read, and all results written, in place.
///
/// Thread safety: any number of threads on distinct shards.
namespace coarse {

/// Clients that one memory device can serve.
inline constexpr std::size_t kMostClients = 256;

/// Writes the reduction of the contributions to every client's slot; leaves slots alone if there is none.
/// @pre all contributions have arrived and agree.
void reduceShard(TensorGroup& group, std::uint32_t shard) noexcept;

/// The same for means, of which it notes the GradientMeasure. @pre as for reduceShard().
void reduceAndMeasureShard(TensorGroup& group, std::uint32_t shard) noexcept;

/// Updates the shard's parameter and states by the mean of the contributions. @pre as for reduceShard(), and
/// they are an update.
void updateShard(TensorGroup& group, std::uint32_t shard) noexcept;

}  // namespace coarse
