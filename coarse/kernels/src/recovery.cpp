#include "coarse/recovery.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "coarse/acceptance.hpp"

namespace coarse {
namespace {

/// Number of the last update of a parameter whose next one has `settings`: this one, if there is a gradient.
std::uint32_t lastUpdate(const UpdateSettings& settings, bool hasGradient) noexcept {
  return hasGradient ? settings.updateNumber : std::max(settings.updateNumber, 1U) - 1;
}

/// Has the shard's contributions say what they would if every worker had pushed its update.
void contributeForAll(const TensorGroup& group, std::uint32_t shard) noexcept {
  for (std::size_t client = 0; client < group.plan().numClients; ++client) {
    const bool hasGradient = group.settings(shard, client).hasGradient != 0;
    group.control().contribution(shard, client).flags =
        static_cast<std::uint8_t>(kUpdate | kReduced | (hasGradient ? kPresent : 0));
  }
}

/// Parameters and states of a group, in the memory of one device, and what they hold of each shard.
class Copy {
 public:
  static Copy ownersOf(TensorGroup& group) { return {group, group.parameters(), group.states(), false}; }
  static Copy replicaOf(TensorGroup& group) {
    return {group, group.replica()->parameters(), group.replica()->states(), true};
  }

  UpdateRecord& record(std::uint32_t shard) const noexcept {
    return isReplica_ ? group_.replica()->control().record(shard) : group_.control().update(shard);
  }
  std::uint32_t step(std::uint32_t shard) const noexcept {
    return record(shard).step.load(std::memory_order_acquire);
  }
  std::uint32_t lastStep() const noexcept {
    std::uint32_t last = 0;
    for (std::uint32_t shard = 0; shard < group_.plan().shards.size(); ++shard)
      last = std::max(last, step(shard));
    return last;
  }
  /// Shards of which nothing was ever copied, to a replica, have no version that could see a step.
  bool isEmpty(std::uint32_t shard) const noexcept { return isReplica_ && step(shard) == 0; }
  /// Runs the update that every worker has prepared, by what clients say that are not lost.
  /// @returns why it cannot; empty if it has.
  std::string redo(std::uint32_t shard, const std::vector<std::size_t>& lostClients) const;
  GroupUpdates updates(std::string problem = {}) const;

 private:
  Copy(TensorGroup& group, std::byte* parameters, std::byte* states, bool isReplica)
      : group_(group), parameters_(parameters), states_(states), isReplica_(isReplica) {}
  void update(const Shard& shard, const UpdateSettings& settings, const void* gradient) const noexcept;

  TensorGroup& group_;
  std::byte* parameters_;
  std::byte* states_;
  bool isReplica_;
};

void Copy::update(const Shard& shard, const UpdateSettings& settings, const void* gradient) const noexcept {
  std::array<float*, kMostStates> states;
  for (std::size_t i = 0; i < group_.plan().numStates; ++i) states[i] = group_.stateIn(states_, shard, i);
  UpdateArrays arrays;
  arrays.gradients = &gradient;
  arrays.numGradients = 1;
  arrays.parameter = group_.parameterIn(parameters_, shard);
  if (group_.plan().hasMaster(shard)) arrays.master = group_.stateIn(states_, shard, group_.plan().numStates);
  arrays.states = states.data();
  arrays.numElements = shard.numElements;
  coarse::update(settings, shard.dtype, arrays, 1);
}

std::string Copy::redo(std::uint32_t shard, const std::vector<std::size_t>& lostClients) const {
  constexpr std::size_t kComparedBytes = offsetof(UpdateSettings, hasGradient);
  const Shard& plan = group_.plan().shards[shard];
  std::optional<UpdateSettings> settings;
  const void* gradient = nullptr;
  for (std::size_t client = 0; client < group_.plan().numClients; ++client) {
    if (std::find(lostClients.begin(), lostClients.end(), client) != lostClients.end()) continue;
    const UpdateSettings own = group_.settings(shard, client);
    if (!settings) settings = own;
    if (std::memcmp(&*settings, &own, kComparedBytes) != 0)
      return "workers disagree on the optimizer's settings: " + firstDifference(*settings, own);
    if (gradient == nullptr && own.hasGradient != 0) gradient = group_.slot(client, plan);
  }
  if (!settings) return "the slots of all workers are lost";
  if (!isRunnable(*settings, group_.plan().numStates)) return "there is no update rule";
  UpdateRecord& seen = record(shard);
  if (gradient != nullptr) update(plan, *settings, gradient);
  seen.updateNumber.store(lastUpdate(*settings, gradient != nullptr), std::memory_order_relaxed);
  // release: the update before the note of it.
  seen.step.store(step(shard) + 1, std::memory_order_release);
  return {};
}

GroupUpdates Copy::updates(std::string problem) const {
  const std::vector<Shard>& shards = group_.plan().shards;
  GroupUpdates updates;
  updates.group = group_.plan().id;
  updates.step = lastStep();
  updates.problem = std::move(problem);
  updates.updateNumbers.resize(group_.plan().numTensors());
  for (std::uint32_t shard = 0; shard < shards.size(); ++shard) {
    updates.updateNumbers[shards[shard].tensor] = record(shard).updateNumber.load(std::memory_order_relaxed);
    if (isEmpty(shard)) updates.step = 0;
  }
  return updates;
}

/// Runs updates of a group of which no memory is lost as a memory device does, wherever that lies.
class Completion {
 public:
  explicit Completion(TensorGroup& group) : group_(group) {}

  /// @returns as Copy::redo().
  std::string begin(std::uint32_t shard, std::uint32_t step) {
    contributeForAll(group_, shard);
    if (std::string difference = disagreement(group_, shard, {}); !difference.empty()) return difference;
    if (compute_ == nullptr) {
      compute_ = group_.memory().makeCompute(
          [](const ShardTask& task) { noteUpdate(*task.group, task.entry.shard); });
    }
    compute_->begin({&group_, {group_.plan().id, shard, step, 0}});
    return {};
  }
  /// Returns when all that was begun has run.
  void drain() {
    if (compute_ != nullptr) compute_->drain();
  }

 private:
  TensorGroup& group_;
  std::unique_ptr<ShardCompute> compute_;  // made when it is first needed: a GPU's takes a while
};

/// Brings all shards to the step that any of them has seen.
GroupUpdates finish(TensorGroup& group, const Copy& copy, const std::vector<std::size_t>& lostClients) {
  const std::uint32_t last = copy.lastStep();
  Completion completion(group);
  std::string problem;
  for (std::uint32_t shard = 0; shard < group.plan().shards.size() && problem.empty(); ++shard) {
    const std::uint32_t seen = copy.step(shard);
    if (seen == last || copy.isEmpty(shard)) continue;
    if (seen + 1 != last) {
      problem = "shard " + std::to_string(shard) + " has seen " + std::to_string(seen) +
                " steps, another one " + std::to_string(last);
    } else {
      problem = group.replica() == nullptr ? completion.begin(shard, last) : copy.redo(shard, lostClients);
    }
  }
  completion.drain();
  return copy.updates(std::move(problem));
}

}  // namespace

void noteUpdate(TensorGroup& group, std::uint32_t shard) noexcept {
  UpdateRecord& record = group.control().update(shard);
  record.updateNumber.store(lastUpdate(group.settings(shard, 0), group.numPresent(shard) > 0),
                            std::memory_order_relaxed);
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

namespace {

/// Brings all shards to the step before the one that some of them have seen, unless all have.
GroupUpdates undo(TensorGroup& group, const Copy& copy) {
  const auto numShards = static_cast<std::uint32_t>(group.plan().shards.size());
  std::uint32_t first = copy.lastStep();
  for (std::uint32_t shard = 0; shard < numShards; ++shard) first = std::min(first, copy.step(shard));
  for (std::uint32_t shard = 0; shard < numShards; ++shard) {
    const std::uint32_t seen = copy.step(shard);
    if (!group.undoLog()->restore(group, shard, first)) {
      return copy.updates("shard " + std::to_string(shard) + " has seen " + std::to_string(seen) +
                          " steps, another one " + std::to_string(first) +
                          ", and the log does not go so far");
    }
  }
  return copy.updates();
}

}  // namespace

GroupUpdates finishUpdates(TensorGroup& group, const std::vector<std::size_t>& lostClients) {
  if (group.undoLog() != nullptr) return undo(group, Copy::ownersOf(group));
  return finish(group, Copy::ownersOf(group), lostClients);
}

GroupUpdates finishReplica(TensorGroup& group, const std::vector<std::size_t>& lostClients,
                           bool isOwnerLost) {
  const Copy copy = Copy::replicaOf(group);
  if (isOwnerLost) return finish(group, copy, lostClients);
  const Copy owners = Copy::ownersOf(group);
  std::vector<std::byte> staging;
  for (std::uint32_t shard = 0; shard < group.plan().shards.size(); ++shard) {
    if (copy.step(shard) != owners.step(shard)) group.replica()->copy(group, shard, staging);
    if (copy.step(shard) != owners.lastStep())
      return copy.updates("the home device could not finish its step");
  }
  return copy.updates();
}

}  // namespace coarse
