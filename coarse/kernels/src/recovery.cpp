#include "coarse/recovery.hpp"

#include <algorithm>
#include <stdexcept>

#include "coarse/acceptance.hpp"

namespace coarse {
namespace {

/// Has the shard's contributions say what they would if every worker had pushed its update.
void contributeForAll(const TensorGroup& group, std::uint32_t shard) noexcept {
  for (std::size_t client = 0; client < group.plan().numClients; ++client) {
    const bool hasGradient = group.settings(shard, client).hasGradient != 0;
    group.control().contribution(shard, client).flags =
        static_cast<std::uint8_t>(kUpdate | kReduced | (hasGradient ? kPresent : 0));
  }
}

std::uint32_t stepOf(const TensorGroup& group, std::uint32_t shard) noexcept {
  return group.control().update(shard).step.load(std::memory_order_acquire);
}

/// @returns why the shard cannot see the step that others have seen; empty if it has.
std::string catchUp(TensorGroup& group, std::uint32_t shard, std::uint32_t step) {
  if (stepOf(group, shard) == step) return {};
  if (stepOf(group, shard) + 1 != step) {
    return "shard " + std::to_string(shard) + " has seen " + std::to_string(stepOf(group, shard)) +
           " steps, another one " + std::to_string(step);
  }
  contributeForAll(group, shard);
  if (std::string difference = disagreement(group, shard, {}); !difference.empty()) return difference;
  const auto compute = group.memory().makeCompute(
      [](TensorGroup& of, const RingEntry& entry) { noteUpdate(of, entry.shard); });
  compute->begin(group, {group.plan().id, shard, step, 0});
  compute->drain();
  return {};
}

}  // namespace

void noteUpdate(TensorGroup& group, std::uint32_t shard) noexcept {
  UpdateRecord& record = group.control().update(shard);
  if (group.numPresent(shard) > 0)
    record.updateNumber.store(group.settings(shard, 0).updateNumber, std::memory_order_relaxed);
  // release: the update before the note of it.
  record.step.store(record.step.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

void noteUpdates(TensorGroup& group, std::uint32_t step, const std::vector<std::uint32_t>& updateNumbers) {
  if (updateNumbers.size() != group.plan().numTensors())
    throw std::invalid_argument("every tensor needs the number of its last update");
  const std::vector<Shard>& shards = group.plan().shards;
  for (std::uint32_t shard = 0; shard < shards.size(); ++shard) {
    UpdateRecord& record = group.control().update(shard);
    record.updateNumber.store(updateNumbers[shards[shard].tensor], std::memory_order_relaxed);
    record.step.store(step, std::memory_order_release);
  }
}

GroupUpdates finishUpdates(TensorGroup& group) {
  const std::vector<Shard>& shards = group.plan().shards;
  GroupUpdates updates;
  updates.group = group.plan().id;
  updates.updateNumbers.resize(group.plan().numTensors());
  for (std::uint32_t shard = 0; shard < shards.size(); ++shard)
    updates.step = std::max(updates.step, stepOf(group, shard));
  for (std::uint32_t shard = 0; shard < shards.size(); ++shard) {
    if (std::string problem = catchUp(group, shard, updates.step); !problem.empty()) {
      updates.problem = std::move(problem);
      return updates;
    }
    updates.updateNumbers[shards[shard].tensor] =
        group.control().update(shard).updateNumber.load(std::memory_order_relaxed);
  }
  return updates;
}

}  // namespace coarse
