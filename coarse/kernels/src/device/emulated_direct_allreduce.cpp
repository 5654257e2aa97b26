#include "coarse/device/emulated_direct_allreduce.hpp"

#include <algorithm>
#include <utility>

namespace coarse {
namespace {

/// The parent of a rank in a binary tree over all ranks in order, whose root is 0 and whose leaves are odd.
std::size_t parentOf(std::size_t rank, std::size_t numRanks) {
  const std::size_t lowestBit = rank & (~rank + 1);
  const std::size_t parent = (rank ^ lowestBit) | (lowestBit << 1);
  return parent < numRanks ? parent : rank ^ lowestBit;
}

std::size_t depthOf(std::size_t rank, std::size_t numRanks) {
  return rank == 0 ? 0 : 1 + depthOf(parentOf(rank, numRanks), numRanks);
}

std::size_t heightOf(std::size_t numRanks) {
  std::size_t height = 0;
  for (std::size_t rank = 0; rank < numRanks; ++rank) height = std::max(height, depthOf(rank, numRanks));
  return height;
}

/// The worker with a rank in the second tree: mirrored, or with an odd number shifted by one.
std::size_t inSecondTree(std::size_t rank, std::size_t numRanks) {
  return numRanks % 2 == 0 ? numRanks - 1 - rank : (rank + 1) % numRanks;
}

}  // namespace

EmulatedDirectAllReduce::EmulatedDirectAllReduce(DeviceLinks& links, FindGroup findGroup, Reduce reduce)
    : links_(links), findGroup_(std::move(findGroup)), reduce_(std::move(reduce)) {}

void EmulatedDirectAllReduce::start(const TensorGroup& group, const RingEntry& entry,
                                    std::uint32_t numPresent) {
  iterate(makeTask(group, entry, numPresent), 0, timeOf(entry.completedAt, monotonicNow()));
}

/// Two nodes exchange their sums at once; more nodes reduce and gather them.
EmulatedDirectAllReduce::Task EmulatedDirectAllReduce::makeTwoLevels(const RingEntry& entry,
                                                                     std::size_t numWorkers,
                                                                     std::size_t numBytes) const {
  const std::size_t numNodes = links_.numNodes(), perNode = numWorkers / numNodes;
  const std::size_t part = (numBytes + perNode - 1) / perNode;
  const std::size_t numBetween = std::min<std::size_t>(numNodes - 1, 2);
  Task task{entry, numWorkers, 2 + numBetween, 0, part};
  task.isTwoLevel = true;
  task.numBytesBetweenNodes = numBetween == 2 ? (part + numNodes - 1) / numNodes : part;
  return task;
}

EmulatedDirectAllReduce::Task EmulatedDirectAllReduce::makeTask(const TensorGroup& group,
                                                                const RingEntry& entry,
                                                                std::uint32_t numPresent) const {
  const ShardShape shape = group.shape(entry.shard);
  const std::size_t p = links_.numNodes() * group.plan().numClients;
  const std::size_t whole = numPresent == 0 ? 0 : shape.numElements * itemBytes(shape.dtype);
  const std::size_t part = (whole + p - 1) / p;
  const std::uint8_t flags = group.directAllReduceFlags(entry.shard);
  if ((flags & kAllGather) != 0) return {entry, p, 1, p - 1, whole};
  if ((flags & kAllToAll) != 0) return {entry, p, 2, p - 1, part};
  switch (group.relay(entry.shard)) {
    case Relay::kTwoWayRing:
      return {entry, p, 2 * (p - 1), 1, (part + 1) / 2, true};
    case Relay::kTree:
      return {entry, p, 2 * heightOf(p), 0, (whole + 1) / 2};
    case Relay::kTwoLevel:
      return makeTwoLevels(entry, p, whole);
    case Relay::kRing:
      break;
  }
  return {entry, p, 2 * (p - 1), 1, part};
}

void EmulatedDirectAllReduce::forEachTransfer(const Task& task, std::size_t iteration,
                                              const Send& send) const {
  if (task.isTwoLevel) return forEachTransferInLevels(task, iteration, send);
  if (task.numTargets == 0) return forEachTransferInTrees(task, iteration, send);
  for (std::size_t distance = 1; distance <= task.numTargets; ++distance) {
    for (std::size_t worker = 0; worker < task.numWorkers; ++worker) {
      const std::size_t target = (worker + distance) % task.numWorkers;
      send(worker, target);
      if (task.isTwoWay) send(target, worker);
    }
  }
}

/// In the first and the last iteration workers of one node send to each other.
bool EmulatedDirectAllReduce::isBetweenNodes(const Task& task, std::size_t iteration) noexcept {
  return task.isTwoLevel && iteration > 0 && iteration + 1 < task.numIterations;
}

void EmulatedDirectAllReduce::forEachTransferInLevels(const Task& task, std::size_t iteration,
                                                      const Send& send) const {
  const std::size_t perNode = task.numWorkers / links_.numNodes();
  for (std::size_t source = 0; source < task.numWorkers; ++source) {
    for (std::size_t target = 0; target < task.numWorkers; ++target) {
      const bool isSameNode = source / perNode == target / perNode;
      const bool isSameNumber = source % perNode == target % perNode;
      const bool isBetween = isBetweenNodes(task, iteration);
      if (isSameNode != isSameNumber && isBetween == isSameNumber) send(source, target);
    }
  }
}

/// First the deepest workers send to their parents, at last the roots have sent to their children.
void EmulatedDirectAllReduce::forEachTransferInTrees(const Task& task, std::size_t iteration,
                                                     const Send& send) {
  const std::size_t p = task.numWorkers, height = task.numIterations / 2;
  const bool isUp = iteration < height;
  const std::size_t depth = isUp ? height - iteration : iteration - height + 1;
  for (std::size_t rank = 1; rank < p; ++rank) {
    if (depthOf(rank, p) != depth) continue;
    const std::size_t parent = parentOf(rank, p);
    const std::size_t first = isUp ? rank : parent, second = isUp ? parent : rank;
    send(first, second);
    send(inSecondTree(first, p), inSecondTree(second, p));
  }
}

void EmulatedDirectAllReduce::iterate(const Task& task, std::size_t iteration, MonotonicNs sentAt) {
  if (iteration == task.numIterations) {
    TensorGroup* group = findGroup_(task.entry.group);
    if (group == nullptr) return;  // removed because the session failed
    RingEntry done = task.entry;
    done.completedAt = stampOf(sentAt);
    reduce_(*group, done);
    return;
  }
  MonotonicNs due = sentAt;
  const std::size_t numBytes = isBetweenNodes(task, iteration) ? task.numBytesBetweenNodes : task.numBytes;
  // The workers of all nodes are the first endpoints.
  forEachTransfer(task, iteration, [&](std::size_t source, std::size_t target) {
    due = std::max(due, links_.reserve(source, target, numBytes, sentAt, task.entry.shard));
  });
  links_.at(due, [this, task, iteration](MonotonicNs arrivedAt) { iterate(task, iteration + 1, arrivedAt); });
}

}  // namespace coarse
