#include "coarse/device/device_collectives.hpp"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "coarse/tensors/tensor_group.hpp"

namespace coarse {
namespace {

constexpr std::size_t kHomeDevice = 0;
// One batch runs, and the next is ready when it ends.
constexpr std::size_t kMostStarted = BatchedCompute::kMostStarted;

}  // namespace

DeviceCollectives::DeviceCollectives(const CollectiveMemory& memory, std::size_t device,
                                     std::size_t numDevices, Doorbell* doorbells, FindGroup findGroup,
                                     ShardDone shardDone)
    : mapping_(
          mapSealed(memory.logsFd, sizeof(CollectiveLogs), Mapping::Access::kReadWrite, "collective logs")),
      logs_(reinterpret_cast<CollectiveLogs*>(mapping_.data())),
      device_(device),
      numDevices_(numDevices),
      doorbells_(doorbells),
      clientsOf_(memory.clientsOf),
      findGroup_(std::move(findGroup)),
      shardDone_(std::move(shardDone)),
      memory_(memory.memory),
      runner_(memory.runner) {
  if (clientsOf_.size() != numDevices_)
    throw std::invalid_argument("collectives need the clients of every device");
  if (runner_ == nullptr || memory_ == nullptr)
    throw std::invalid_argument("collectives need memory, and what reduces there");
}

bool DeviceCollectives::canReduce(const TensorGroup& group, std::uint32_t shard) const noexcept {
  if (group.shape(shard).op == ReduceOp::kMax) return false;
  const auto contributes = [&](std::size_t client) { return group.isPresent(shard, client); };
  return std::all_of(clientsOf_.begin(), clientsOf_.end(), [&](const auto& clients) {
    return std::any_of(clients.begin(), clients.end(), contributes);
  });
}

void DeviceCollectives::propose(const RingEntry& entry) noexcept {
  appendToRing(logs_->proposals, entry);
  if (device_ != kHomeDevice) doorbells_[kHomeDevice].ring();
}

bool DeviceCollectives::advance() {
  bool progressed = false;
  while (conclude()) progressed = true;
  if (device_ == kHomeDevice && started_.size() < kMostStarted) progressed |= makeBatch();
  progressed |= readBatch();
  if (isNextWhole_ && started_.size() < kMostStarted) progressed |= startBatch();
  return progressed;
}

bool DeviceCollectives::conclude() {
  if (started_.empty() || !runner_->conclude()) return false;
  const Begun done = std::move(started_.front());
  started_.pop_front();
  for (std::size_t i = 0; i < done.batch.size(); ++i)
    shardDone_(*done.batch[i].group, done.batch[i].entry, done.shapes[i]);
  return true;
}

bool DeviceCollectives::makeBatch() {
  std::vector<RingEntry> proposed;
  RingEntry entry;
  while (proposed.size() < BatchedCompute::kMostShards &&
         readRing(logs_->proposals, numProposalsRead_, entry)) {
    ++numProposalsRead_;
    proposed.push_back(entry);
  }
  if (proposed.empty()) return false;
  auto numMore = static_cast<std::uint32_t>(proposed.size());
  for (RingEntry& each : proposed) {
    each.completedAt = --numMore;
    appendToRing(logs_->batches, each);
  }
  for (std::size_t device = 0; device < numDevices_; ++device) {
    if (device != device_) doorbells_[device].ring();
  }
  return true;
}

bool DeviceCollectives::readBatch() {
  bool progressed = false;
  RingEntry entry;
  while (!isNextWhole_ && readRing(logs_->batches, numEntriesRead_, entry)) {
    ++numEntriesRead_;
    isNextWhole_ = std::exchange(entry.completedAt, 0) == 0;
    next_.push_back(entry);
    progressed = true;
  }
  return progressed;
}

bool DeviceCollectives::startBatch() {
  Begun begun;
  for (const RingEntry& entry : next_) {
    TensorGroup* group = findGroup_(entry.group);
    if (group == nullptr) return false;  // announced by a peer before our own control thread has mapped it
    begun.batch.push_back({group, entry, {}, 0});
    begun.shapes.push_back(group->shape(entry.shard));
  }
  started_.push_back(std::move(begun));
  runner_->start(started_.back().batch, 0);
  next_.clear();
  isNextWhole_ = false;
  return true;
}

void DeviceCollectives::drain() noexcept {
  try {
    while (isBusy()) {
      runner_->wait();
      conclude();
    }
  } catch (const std::exception&) {
    started_.clear();  // the session is over, and waiters receive the failure
  }
}

bool DeviceCollectives::isWorkingOn(const TensorGroup& group) const noexcept {
  const auto isOfGroup = [&](const ShardTask& task) { return task.group == &group; };
  const auto hasSome = [&](const Begun& begun) {
    return std::any_of(begun.batch.begin(), begun.batch.end(), isOfGroup);
  };
  const auto hasId = [&](const RingEntry& entry) { return entry.group == group.plan().id; };
  return std::any_of(next_.begin(), next_.end(), hasId) ||
         std::any_of(started_.begin(), started_.end(), hasSome);
}

}  // namespace coarse
