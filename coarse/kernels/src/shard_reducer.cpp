#include "coarse/shard_reducer.hpp"

#include <array>

#include "coarse/reduce.hpp"

namespace coarse {

void reduceShard(TensorGroup& group, std::uint32_t shardIndex) noexcept {
  const Shard& shard = group.plan().shards[shardIndex];
  const std::size_t numClients = group.plan().numClients;
  std::array<const void*, kMostClients> inputs;
  std::array<void*, kMostClients> outputs;
  std::size_t numInputs = 0;
  for (std::size_t client = 0; client < numClients; ++client) {
    outputs[client] = group.slot(client, shard);
    if (group.isPresent(shardIndex, client)) inputs[numInputs++] = outputs[client];
  }
  if (numInputs == 0) return;
  const ShardShape shape = group.shape(shardIndex);
  reduce(shape.dtype, shape.op, inputs.data(), numInputs, outputs.data(), numClients, shape.numElements,
         group.divisor(shardIndex));
}

void updateShard(TensorGroup& group, std::uint32_t shardIndex) noexcept {
  const Shard& shard = group.plan().shards[shardIndex];
  const bool isReduced = group.isReduced(shardIndex);
  std::array<const void*, kMostClients> gradients;
  std::size_t numGradients = 0;
  for (std::size_t client = 0; client < group.plan().numClients; ++client) {
    if (!group.isPresent(shardIndex, client) || (isReduced && numGradients == 1)) continue;
    gradients[numGradients++] = group.slot(client, shard);
  }
  // Looked at again: a client can have written to them since they were compared.
  const UpdateSettings settings = group.settings(shardIndex, 0);
  if (numGradients == 0 || !isRunnable(settings, group.plan().numStates)) return;
  group.keepForSnapshots(shardIndex);
  std::array<float*, kMostStates> states;
  for (std::size_t i = 0; i < group.plan().numStates; ++i) states[i] = group.state(shard, i);
  UpdateArrays arrays;
  arrays.gradients = gradients.data();
  arrays.numGradients = numGradients;
  arrays.parameter = group.parameter(shard);
  if (group.plan().hasMaster(shard)) arrays.master = group.master(shard);
  arrays.states = states.data();
  arrays.numElements = shard.numElements;
  update(settings, shard.dtype, arrays, isReduced ? 1 : group.divisor(shardIndex));
}

}  // namespace coarse
