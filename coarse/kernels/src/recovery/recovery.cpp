#include "coarse/recovery/recovery.hpp"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "coarse/tensors/agreement.hpp"

namespace coarse {
namespace {

/// Number of a parameter's last update if its next one has `settings`: this one, if there is a gradient.
std::uint32_t lastUpdate(const UpdateSettings& settings, bool hasGradient) noexcept {
  return hasGradient ? settings.updateNumber : std::max(settings.updateNumber, 1U) - 1;
}

void note(UpdateRecord& record, const TensorGroup& group, std::uint32_t shard) noexcept {
  record.updateNumber.store(lastUpdate(group.settings(shard), group.numPresent(shard) > 0),
                            std::memory_order_relaxed);
  // release: the update happens before its record.
  record.step.store(record.step.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

/// Sets the shard's contributions as if every worker that is not lost had pushed its update.
void contributeForAll(const TensorGroup& group, std::uint32_t shard) noexcept {
  for (std::size_t client = 0; client < group.plan().numClients; ++client) {
    const bool hasGradient = !group.isLost(client) && group.settings(shard, client).hasGradient != 0;
    Contribution& contribution = group.control().contribution(shard, client);
    contribution.flags = static_cast<std::uint8_t>(kUpdate | kReduced | (hasGradient ? kPresent : 0));
    contribution.numElements = 0;  // no memory device stands in for a client
  }
}

/// The records of each shard's parameters and states: those of the owner, or of the replica.
class Records {
 public:
  static Records ofOwner(const TensorGroup& group) { return {group, false}; }
  static Records ofReplica(const TensorGroup& group) { return {group, true}; }

  UpdateRecord& operator[](std::uint32_t shard) const noexcept {
    return isReplica_ ? group_.replica()->control().record(shard) : group_.control().update(shard);
  }
  std::uint32_t step(std::uint32_t shard) const noexcept {
    return (*this)[shard].step.load(std::memory_order_acquire);
  }
  std::uint32_t lastStep() const noexcept {
    std::uint32_t last = 0;
    for (std::uint32_t shard = 0; shard < group_.plan().shards.size(); ++shard)
      last = std::max(last, step(shard));
    return last;
  }
  /// Shards that were never copied to a replica have no version that could take a step.
  bool isEmpty(std::uint32_t shard) const noexcept { return isReplica_ && step(shard) == 0; }
  GroupUpdates updates(std::string problem = {}) const;

 private:
  Records(const TensorGroup& group, bool isReplica) : group_(group), isReplica_(isReplica) {}

  const TensorGroup& group_;
  bool isReplica_;
};

GroupUpdates Records::updates(std::string problem) const {
  const std::vector<Shard>& shards = group_.plan().shards;
  GroupUpdates updates;
  updates.group = group_.plan().id;
  updates.step = lastStep();
  updates.problem = std::move(problem);
  updates.updateNumbers.resize(group_.plan().numTensors());
  for (std::uint32_t shard = 0; shard < shards.size(); ++shard) {
    updates.updateNumbers[shards[shard].tensor] = (*this)[shard].updateNumber.load(std::memory_order_relaxed);
    if (isEmpty(shard)) updates.step = 0;
  }
  return updates;
}

/// Runs updates that every worker has prepared, as a memory device does, in any kind of memory.
class Completion {
 public:
  Completion(TensorGroup& group, const Records& records) : group_(group), records_(records) {}

  /// @returns why it cannot begin; empty if it has begun.
  std::string begin(std::uint32_t shard, std::uint32_t step) {
    if (group_.firstClient() == group_.plan().numClients) return "the slots of all workers are lost";
    contributeForAll(group_, shard);
    if (std::string difference = disagreement(group_, shard, {}); !difference.empty()) return difference;
    if (compute_ == nullptr) {
      compute_ = group_.memory().makeCompute(
          [this](const ShardTask& task) { note(records_[task.entry.shard], group_, task.entry.shard); });
    }
    compute_->begin({&group_, {group_.plan().id, shard, step, 0}});
    return {};
  }
  /// Returns when all begun updates are complete.
  void drain() {
    if (compute_ != nullptr) compute_->drain();
  }

 private:
  TensorGroup& group_;
  const Records& records_;
  std::unique_ptr<ShardCompute> compute_;  // made at first use: for a GPU it takes a while
};

/// Brings all shards to the latest step of any of them.
GroupUpdates finish(TensorGroup& group, const Records& records) {
  const std::uint32_t last = records.lastStep();
  Completion completion(group, records);
  std::string problem;
  for (std::uint32_t shard = 0; shard < group.plan().shards.size() && problem.empty(); ++shard) {
    const std::uint32_t seen = records.step(shard);
    if (seen == last || records.isEmpty(shard)) continue;
    problem = seen + 1 == last ? completion.begin(shard, last)
                               : "shard " + std::to_string(shard) + " has seen " + std::to_string(seen) +
                                     " steps, another one " + std::to_string(last);
  }
  completion.drain();
  return records.updates(std::move(problem));
}

}  // namespace

void noteUpdate(TensorGroup& group, std::uint32_t shard) noexcept {
  note(group.control().update(shard), group, shard);
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

namespace {

/// Resets all shards to the step before the one that some of them have taken, unless all have.
GroupUpdates undo(TensorGroup& group, const Records& records) {
  const auto numShards = static_cast<std::uint32_t>(group.plan().shards.size());
  std::uint32_t first = records.lastStep();
  for (std::uint32_t shard = 0; shard < numShards; ++shard) first = std::min(first, records.step(shard));
  for (std::uint32_t shard = 0; shard < numShards; ++shard) {
    const std::uint32_t seen = records.step(shard);
    if (!group.undoLog()->restore(group, shard, first)) {
      return records.updates("shard " + std::to_string(shard) + " has seen " + std::to_string(seen) +
                             " steps, another one " + std::to_string(first) +
                             ", and the log does not go so far");
    }
  }
  return records.updates();
}

/// Copies to a replica everything that it lacks of the owner's memory.
GroupUpdates follow(TensorGroup& group) {
  const Records replica = Records::ofReplica(group), owner = Records::ofOwner(group);
  ReplicaStaging staging(group.memory());
  for (std::uint32_t shard = 0; shard < group.plan().shards.size(); ++shard) {
    if (replica.step(shard) != owner.step(shard)) group.replica()->copy(group, {shard}, staging);
    if (replica.step(shard) != owner.lastStep())
      return replica.updates("the home device could not finish its step");
  }
  return replica.updates();
}

}  // namespace

GroupUpdates finishUpdates(TensorGroup& group, const std::vector<std::size_t>& lostClients) {
  if (group.undoLog() != nullptr) return undo(group, Records::ofOwner(group));
  group.forget(lostClients);
  return finish(group, Records::ofOwner(group));
}

GroupUpdates finishReplica(TensorGroup& group, const std::vector<std::size_t>& lostClients,
                           bool isOwnerLost) {
  if (!isOwnerLost) return follow(group);
  group.forget(lostClients);
  group.moveToReplica();
  return finish(group, Records::ofReplica(group));
}

}  // namespace coarse
