#include "coarse/device/device_exchange.hpp"

#include <algorithm>
#include <utility>

namespace coarse {
namespace {

std::uint64_t keyOf(const RingEntry& entry) noexcept {
  return std::uint64_t{entry.group} << 32 | entry.shard;
}

/// The workers, of all nodes, that contributed to the current step of a shard.
std::uint32_t numContributors(const TensorGroup& group, std::uint32_t shard) noexcept {
  return group.control().contributors(shard).load(std::memory_order_relaxed);
}

/// Appends a piece, merging it with the last one if they are adjacent.
void append(std::vector<ShardPiece>& pieces, const ShardPiece& piece) {
  if (piece.begin == piece.end) return;
  if (!pieces.empty() && pieces.back().end == piece.begin) {
    pieces.back().end = piece.end;
  } else {
    pieces.push_back(piece);
  }
}

}  // namespace

DeviceExchange::DeviceExchange(ExchangePeers peers, DeviceLinks& links, FindGroup findGroup,
                               ComputeOf computeOf, ClientDone clientDone, PassToNodes passToNodes)
    : peers_(peers),
      links_(links),
      findGroup_(std::move(findGroup)),
      computeOf_(std::move(computeOf)),
      clientDone_(std::move(clientDone)),
      passToNodes_(std::move(passToNodes)) {}

std::size_t DeviceExchange::numPieces(const TensorGroup& group, std::uint32_t shard) const noexcept {
  const ShardShape shape = group.shape(shard);
  const bool isCut = group.plan().shards[shard].algorithm == Algorithm::kExchange && !passToNodes_ &&
                     shape.numElements * itemBytes(shape.dtype) > kSmallestExchangeBytes;
  return isCut ? group.plan().numClients : 1;
}

/// The device that reduces piece `piece`: of each client in turn, or with several nodes the same on all of
/// them.
std::size_t DeviceExchange::reducerOf(const TensorGroup& group, std::uint32_t shard,
                                      std::size_t piece) const noexcept {
  if (passToNodes_) return shard % peers_.numDevices;
  return group.deviceOf(shard, (shard + piece) % group.plan().numClients);
}

void DeviceExchange::distribute(TensorGroup& group, const RingEntry& entry) {
  const std::size_t count = numPieces(group, entry.shard);
  std::vector<bool> isReducer(peers_.numDevices, false);
  for (std::size_t piece = 0; piece < count; ++piece) isReducer[reducerOf(group, entry.shard, piece)] = true;
  const auto numReducers = static_cast<std::uint32_t>(std::count(isReducer.begin(), isReducer.end(), true));
  // relaxed: appendToRing() releases.
  group.control().devicesLeft(entry.shard).store(numReducers, std::memory_order_relaxed);
  for (std::size_t device = 0; device < peers_.numDevices; ++device) {
    if (!isReducer[device]) continue;
    appendToRing(peers_.logs[device], entry);
    if (device != peers_.device) peers_.doorbells[device].ring();
  }
}

bool DeviceExchange::advance() {
  RingEntry entry;
  if (!readRing(peers_.logs[peers_.device], logPosition_, entry)) return false;
  TensorGroup* group = findGroup_(entry.group);
  if (group == nullptr) return false;  // announced by a peer before our own control thread has mapped it
  ++logPosition_;
  fetch(*group, makeTask(*group, entry));
  return true;
}

DeviceExchange::Task DeviceExchange::makeTask(const TensorGroup& group, const RingEntry& entry) const {
  Task task;
  task.entry = entry;
  task.shape = group.shape(entry.shard);
  const std::size_t count = numPieces(group, entry.shard);
  std::size_t numElements = 0;
  for (std::size_t piece = 0; piece < count; ++piece) {
    if (reducerOf(group, entry.shard, piece) != peers_.device) continue;
    const ShardPiece own = pieceOf(task.shape.numElements, piece, count);
    append(task.pieces, own);
    numElements += own.end - own.begin;
  }
  task.numBytes = numElements * itemBytes(task.shape.dtype);
  return task;
}

/// Waits for contributions of other devices' clients over their links; then the pieces can be reduced. Those
/// of a direct all-reduce stay with the workers.
void DeviceExchange::fetch(const TensorGroup& group, Task task) {
  const std::uint32_t shard = task.entry.shard;
  const MonotonicNs sentAt =
      links_.isPaced() ? timeOf(task.entry.completedAt, monotonicNow()) : MonotonicNs{0};
  std::vector<std::size_t> bytesFrom(peers_.numDevices, 0);
  for (std::size_t client = 0; client < group.plan().numClients && !group.usesDirectAllReduce(shard);
       ++client) {
    if (group.isPresent(shard, client)) bytesFrom[group.deviceOf(shard, client)] += task.numBytes;
  }
  bytesFrom[peers_.device] = 0;
  MonotonicNs due = sentAt;
  for (std::size_t device = 0; device < peers_.numDevices; ++device) {
    if (bytesFrom[device] == 0) continue;
    due =
        std::max(due, links_.reserve(links_.endpointOfDevice(device), links_.endpointOfDevice(peers_.device),
                                     bytesFrom[device], sentAt, shard));
  }
  const MonotonicNs lead = links_.isPaced() ? computeOf_(group).lead() : 0;
  links_.at(due - lead,
            [this, task = std::move(task), due, lead](MonotonicNs) { beginReduction(task, due, lead); });
}

/// @param lead minimum time before the contributions' arrival at which this is called.
void DeviceExchange::beginReduction(Task task, MonotonicNs arrivesAt, MonotonicNs lead) {
  TensorGroup* group = findGroup_(task.entry.group);
  if (group == nullptr) return;  // removed because the session failed
  if (passToNodes_) {
    task.entry.completedAt = stampOf(arrivesAt);
    return passToNodes_(*group, task.entry);
  }
  const ShardTask work{group, task.entry, task.pieces, links_.isPaced() ? arrivesAt : 0};
  task.isReduced = work.pieces.empty();
  reducing_.insert_or_assign(keyOf(work.entry), std::move(task));
  if (lead == 0) {
    sendPieces(work.entry, arrivesAt);
  } else {
    links_.at(arrivesAt, [this, entry = work.entry](MonotonicNs arrivedAt) { sendPieces(entry, arrivedAt); });
  }
  if (!work.pieces.empty()) computeOf_(*group).begin(work);
}

/// Reserves the links for results as if these were ready: the reduction takes real time of the host or a GPU.
void DeviceExchange::sendPieces(const RingEntry& entry, MonotonicNs sentAt) {
  const TensorGroup* group = findGroup_(entry.group);
  if (group == nullptr) return;
  Task& task = reducing_.at(keyOf(entry));
  task.resultsAt = sendResults(*group, task, sentAt);
  task.isSent = true;
  conclude(keyOf(entry));
}

void DeviceExchange::reduced(const RingEntry& entry) {
  reducing_.at(keyOf(entry)).isReduced = true;
  conclude(keyOf(entry));
}

/// Schedules the arrival of results that are reduced and sent.
void DeviceExchange::conclude(std::uint64_t key) {
  const auto found = reducing_.find(key);
  if (!found->second.isReduced || !found->second.isSent) return;
  Task task = std::move(found->second);
  reducing_.erase(found);
  finishAt(std::move(task));
}

void DeviceExchange::deliver(TensorGroup& group, const RingEntry& entry) {
  Task task = makeTask(group, entry);
  task.resultsAt = sendResults(group, task, timeOf(entry.completedAt, monotonicNow()));
  finishAt(std::move(task));
}

void DeviceExchange::finishAt(Task task) {
  const MonotonicNs resultsAt = task.resultsAt;
  links_.at(resultsAt, [this, task = std::move(task)](MonotonicNs sentAt) {
    TensorGroup* finished = findGroup_(task.entry.group);
    if (finished != nullptr) finishDevice(*finished, task, sentAt);
  });
}

/// @returns the time when the pieces are at every device that holds a contribution.
MonotonicNs DeviceExchange::sendResults(const TensorGroup& group, const Task& task, MonotonicNs sentAt) {
  const std::uint32_t shard = task.entry.shard;
  if (numContributors(group, shard) == 0) return sentAt;
  std::vector<bool> receives(peers_.numDevices, false);
  for (std::size_t client = 0; client < group.plan().numClients; ++client)
    receives[group.deviceOf(shard, client)] = true;
  MonotonicNs due = sentAt;
  for (std::size_t device = 0; device < peers_.numDevices; ++device) {
    if (!receives[device] || device == peers_.device) continue;
    due = std::max(due, links_.reserve(links_.endpointOfDevice(peers_.device),
                                       links_.endpointOfDevice(device), task.numBytes, sentAt, shard));
  }
  return due;
}

/// The last device to get here lets the clients pull, each from the device that took its contribution.
void DeviceExchange::finishDevice(TensorGroup& group, const Task& task, MonotonicNs sentAt) {
  const RingEntry& entry = task.entry;
  // acq_rel: the last one sees the pieces of all others, and publishes them with each completion flag.
  if (group.control().devicesLeft(entry.shard).fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const std::size_t numBytes =
      numContributors(group, entry.shard) == 0 ? 0 : task.shape.numElements * itemBytes(task.shape.dtype);
  for (std::size_t client = 0; client < group.plan().numClients; ++client) {
    const std::size_t device = group.deviceOf(entry.shard, client);
    const MonotonicNs due = links_.reserve(links_.endpointOfDevice(device), links_.endpointOfClient(client),
                                           numBytes, sentAt, entry.shard);
    links_.at(due, [this, entry, client](MonotonicNs) {
      TensorGroup* pulled = findGroup_(entry.group);
      if (pulled != nullptr) clientDone_(*pulled, entry, client);
    });
  }
}

}  // namespace coarse
