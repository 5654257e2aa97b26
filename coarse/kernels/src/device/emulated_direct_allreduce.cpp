#include "coarse/device/emulated_direct_allreduce.hpp"

#include <algorithm>
#include <utility>

namespace coarse {

EmulatedDirectAllReduce::EmulatedDirectAllReduce(DeviceLinks& links, FindGroup findGroup, Reduce reduce)
    : links_(links), findGroup_(std::move(findGroup)), reduce_(std::move(reduce)) {}

void EmulatedDirectAllReduce::start(const TensorGroup& group, const RingEntry& entry) {
  iterate(makeTask(group, entry), 0, timeOf(entry.completedAt, monotonicNow()));
}

EmulatedDirectAllReduce::Task EmulatedDirectAllReduce::makeTask(const TensorGroup& group,
                                                                const RingEntry& entry) {
  const ShardShape shape = group.shape(entry.shard);
  const std::size_t p = group.plan().numClients;
  const std::size_t whole =
      group.numPresent(entry.shard) == 0 ? 0 : shape.numElements * itemBytes(shape.dtype);
  const std::size_t part = (whole + p - 1) / p;
  const std::uint8_t path = group.directAllReduceFlags(entry.shard);
  if ((path & kAllGather) != 0) return {entry, p, 1, p - 1, whole};
  if ((path & kAllToAll) != 0) return {entry, p, 2, p - 1, part};
  return {entry, p, 2 * (p - 1), 1, part};
}

void EmulatedDirectAllReduce::iterate(const Task& task, std::size_t iteration, MonotonicNs sentAt) {
  if (iteration == task.numIterations) {
    TensorGroup* group = findGroup_(task.entry.group);
    if (group != nullptr) reduce_(*group, task.entry);  // otherwise removed because the session failed
    return;
  }
  MonotonicNs due = sentAt;
  for (std::size_t distance = 1; distance <= task.numTargets; ++distance) {
    for (std::size_t worker = 0; worker < task.numWorkers; ++worker) {
      const std::size_t target = (worker + distance) % task.numWorkers;
      due = std::max(due, links_.reserve(links_.endpointOfClient(worker), links_.endpointOfClient(target),
                                         task.numBytes, sentAt, task.entry.shard));
    }
  }
  links_.at(due, [this, task, iteration](MonotonicNs arrivedAt) { iterate(task, iteration + 1, arrivedAt); });
}

}  // namespace coarse
