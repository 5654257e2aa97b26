#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "coarse/tensors/tensor_group.hpp"

/// A sync core's work on a shard to which every client of the node has contributed, if all share one memory:
/// reads all contributions, and writes all results, in place.
///
/// Thread safety: any number of threads on distinct shards.
namespace coarse {

/// Maximum number of clients of one memory device.
inline constexpr std::size_t kMostClients = 256;

/// The present contributions to a shard, in the order of the clients, and the slots of all that are not lost.
/// @pre all contributions have arrived and agree.
struct Contributions {
  /// @param firstElement the element at which the arrays begin.
  Contributions(const TensorGroup& group, std::uint32_t shard, std::uint32_t firstElement = 0) noexcept;

  std::array<void*, kMostClients> slots;
  std::array<const void*, kMostClients> inputs;
  std::array<std::size_t, kMostClients> clients;  // the clients of `inputs`
  std::size_t numSlots = 0;
  std::size_t numInputs = 0;
};

/// The inputs of a shard's update. @pre as for Contributions, and they are an update.
struct UpdateInputs {
  UpdateInputs(const TensorGroup& group, std::uint32_t shard) noexcept;
  /// Whether there is a gradient, and a rule whose states the group keeps.
  bool isRunnable() const noexcept { return numGradients > 0 && hasRule; }

  UpdateSettings settings;
  bool hasRule = false;
  std::array<const void*, kMostClients> gradients;
  std::size_t numGradients = 0;
  std::uint32_t divisor = 1;
};

/// Writes the reduction of the contributions to the slot of every client that is not lost; leaves slots
/// unchanged without contributions.
/// @pre all contributions have arrived and agree.
void reduceShard(TensorGroup& group, std::uint32_t shard) noexcept;

/// The same for some elements of the shard.
void reducePieces(TensorGroup& group, std::uint32_t shard, const std::vector<ShardPiece>& pieces) noexcept;

/// As reduceShard() for means, and records their GradientMeasure. @pre as for reduceShard().
void reduceAndMeasureShard(TensorGroup& group, std::uint32_t shard) noexcept;

/// Reduces a shard from and to other arrays than its slots; the caller must call `finish`.
void reduceArrays(TensorGroup& group, std::uint32_t shard, const ShardArrays& arrays) noexcept;

/// Updates the shard's parameter and states by the mean of the contributions. @pre as for reduceShard(), and
/// they are an update.
void updateShard(TensorGroup& group, std::uint32_t shard) noexcept;

/// Runs the function above that the contributions request. @pre as for reduceShard().
void computeShard(TensorGroup& group, std::uint32_t shard) noexcept;

}  // namespace coarse
