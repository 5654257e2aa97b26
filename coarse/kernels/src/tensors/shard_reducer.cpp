#include "coarse/tensors/shard_reducer.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "coarse/reduce/reduce.hpp"
#include "coarse/tensors/row_reducer.hpp"

namespace coarse {
namespace {

// A tile fits in the first-level cache together with the data that streams through.
constexpr std::size_t kTileBytes = 8192;

const void* at(const void* array, std::size_t offset) noexcept {
  return static_cast<const std::byte*>(array) + offset;
}

std::int32_t firstNonFinite(const Contributions& all, DType dtype, std::size_t offset,
                            std::size_t numElements) noexcept {
  for (std::size_t k = 0; k < all.numInputs; ++k) {
    if (!std::isfinite(sumOfSquares(dtype, at(all.inputs[k], offset), numElements)))
      return static_cast<std::int32_t>(all.clients[k]);
  }
  return kEverybody;
}

/// For a mean whose contributors are unknown.
GradientMeasure measureOf(const ShardShape& shape, const void* mean) noexcept {
  const std::size_t itemSize = itemBytes(shape.dtype);
  const std::size_t numBytes = shape.numElements * itemSize;
  GradientMeasure measure{0, kNobody, 0};
  for (std::size_t offset = 0; offset < numBytes; offset += kTileBytes) {
    const std::size_t count = std::min(kTileBytes, numBytes - offset) / itemSize;
    measure.sumOfSquares += sumOfSquares(shape.dtype, at(mean, offset), count);
  }
  if (!std::isfinite(measure.sumOfSquares)) measure.nonFiniteOf = kEverybody;
  return measure;
}

}  // namespace

Contributions::Contributions(const TensorGroup& group, std::uint32_t shardIndex,
                             std::uint32_t firstElement) noexcept {
  const Shard& shard = group.plan().shards[shardIndex];
  const std::size_t offset = firstElement == 0 ? 0 : firstElement * itemBytes(group.shape(shardIndex).dtype);
  for (std::size_t client = 0; client < group.plan().numClients; ++client) {
    void* const slot = group.slot(client, shard) + offset;
    if (!group.isAbsent(shardIndex, client)) slots[numSlots++] = slot;
    if (!group.isPresent(shardIndex, client)) continue;
    clients[numInputs] = client;
    inputs[numInputs++] = slot;
  }
}

UpdateInputs::UpdateInputs(const TensorGroup& group, std::uint32_t shardIndex) noexcept
    // Checked again: a client can have written to them since they were compared.
    : settings(group.settings(shardIndex)), hasRule(coarse::isRunnable(settings, group.plan().numStates)) {
  const bool isReduced = group.isReduced(shardIndex);
  const Shard& shard = group.plan().shards[shardIndex];
  for (std::size_t client = 0; client < group.plan().numClients; ++client) {
    if (!group.isPresent(shardIndex, client) || (isReduced && numGradients == 1)) continue;
    gradients[numGradients++] = group.slot(client, shard);
  }
  if (!isReduced) divisor = group.divisor(shardIndex);
}

void reduceShard(TensorGroup& group, std::uint32_t shardIndex) noexcept {
  if (group.plan().isTable(group.plan().shards[shardIndex])) return reduceRows(group, shardIndex);
  const Contributions all(group, shardIndex);
  if (all.numInputs == 0) return;
  const ShardShape shape = group.shape(shardIndex);
  reduce(shape.dtype, shape.op, all.inputs.data(), all.numInputs, all.slots.data(), all.numSlots,
         shape.numElements, group.divisor(shardIndex));
}

void reducePieces(TensorGroup& group, std::uint32_t shardIndex,
                  const std::vector<ShardPiece>& pieces) noexcept {
  const ShardShape shape = group.shape(shardIndex);
  for (const ShardPiece& piece : pieces) {
    const Contributions all(group, shardIndex, piece.begin);
    if (all.numInputs == 0) return;
    reduce(shape.dtype, shape.op, all.inputs.data(), all.numInputs, all.slots.data(), all.numSlots,
           piece.end - piece.begin, group.divisor(shardIndex));
  }
}

void reduceAndMeasureShard(TensorGroup& group, std::uint32_t shardIndex) noexcept {
  const Shard& shard = group.plan().shards[shardIndex];
  GradientMeasure measure{0, kNobody, 0};
  if (group.plan().isTable(shard)) {
    reduceRows(group, shardIndex, &measure);
    group.control().measure(shardIndex) = measure;
    return;
  }
  const Contributions all(group, shardIndex);
  const std::size_t itemSize = itemBytes(shard.dtype);
  alignas(kCacheLineBytes) std::array<std::byte, kTileBytes> tile;
  void* const mean[] = {tile.data()};
  std::array<const void*, kMostClients> inputs;
  const std::size_t numBytes = all.numInputs == 0 ? 0 : shard.numElements * itemSize;
  for (std::size_t offset = 0; offset < numBytes; offset += kTileBytes) {
    const std::size_t length = std::min(kTileBytes, numBytes - offset);
    const std::size_t count = length / itemSize;
    for (std::size_t k = 0; k < all.numInputs; ++k) inputs[k] = at(all.inputs[k], offset);
    reduce(shard.dtype, shard.op, inputs.data(), all.numInputs, mean, 1, count, group.divisor(shardIndex));
    const double squares = sumOfSquares(shard.dtype, tile.data(), count);
    measure.sumOfSquares += squares;
    // Before the slots are overwritten.
    if (!std::isfinite(squares) && measure.nonFiniteOf == kNobody)
      measure.nonFiniteOf = firstNonFinite(all, shard.dtype, offset, count);
    for (std::size_t k = 0; k < all.numSlots; ++k)
      std::memcpy(static_cast<std::byte*>(all.slots[k]) + offset, tile.data(), length);
  }
  group.control().measure(shardIndex) = measure;
}

void reduceArrays(TensorGroup& group, std::uint32_t shardIndex, const ShardArrays& arrays) noexcept {
  const ShardShape shape = group.shape(shardIndex);
  if (!arrays.outputs.empty()) {
    reduce(shape.dtype, arrays.op, arrays.inputs.data(), arrays.inputs.size(), arrays.outputs.data(),
           arrays.outputs.size(), shape.numElements, arrays.divisor);
  }
  if (arrays.isMeasured) {
    const void* const result = arrays.outputs.empty() ? arrays.inputs.front() : arrays.outputs.front();
    group.control().measure(shardIndex) = measureOf(shape, result);
  }
}

void updateShard(TensorGroup& group, std::uint32_t shardIndex) noexcept {
  const Shard& shard = group.plan().shards[shardIndex];
  const UpdateInputs inputs(group, shardIndex);
  if (!inputs.isRunnable()) return;
  if (group.plan().isTable(shard)) return updateRows(group, shardIndex, inputs.settings);
  group.keepBefore(shardIndex);
  std::array<float*, kMostStates> states;
  for (std::size_t i = 0; i < group.plan().numStates; ++i) states[i] = group.state(shard, i);
  UpdateArrays arrays;
  arrays.gradients = inputs.gradients.data();
  arrays.numGradients = inputs.numGradients;
  arrays.parameter = group.parameter(shard);
  if (group.plan().hasMaster(shard)) arrays.master = group.master(shard);
  arrays.states = states.data();
  arrays.numElements = shard.numElements;
  update(inputs.settings, shard.dtype, arrays, inputs.divisor);
}

void computeShard(TensorGroup& group, std::uint32_t shard) noexcept {
  if (group.isUpdate(shard)) {
    updateShard(group, shard);
  } else if (group.isMeasured(shard)) {
    reduceAndMeasureShard(group, shard);
  } else {
    reduceShard(group, shard);
  }
}

}  // namespace coarse
