#include "coarse/worker_ring.hpp"

#include <algorithm>
#include <utility>

namespace coarse {

WorkerRing::WorkerRing(DeviceLinks& links, FindGroup findGroup, Reduce reduce)
    : links_(links), findGroup_(std::move(findGroup)), reduce_(std::move(reduce)) {}

void WorkerRing::start(const TensorGroup& group, const RingEntry& entry) {
  const ShardShape shape = group.shape(entry.shard);
  const std::size_t p = group.plan().numClients;
  const std::size_t numBytes =
      group.numPresent(entry.shard) == 0 ? 0 : shape.numElements * itemBytes(shape.dtype);
  const MonotonicNs sentAt = links_.isPaced() ? timeOf(entry.completedAt, monotonicNow()) : MonotonicNs{0};
  iterate({entry, p, 2 * (p - 1), (numBytes + p - 1) / p}, 0, sentAt);
}

void WorkerRing::iterate(const Task& task, std::size_t iteration, MonotonicNs sentAt) {
  if (iteration == task.numIterations) {
    TensorGroup* group = findGroup_(task.entry.group);
    if (group != nullptr) reduce_(*group, task.entry);  // else removed because the session failed
    return;
  }
  MonotonicNs due = sentAt;
  for (std::size_t worker = 0; worker < task.numWorkers; ++worker) {
    const std::size_t next = (worker + 1) % task.numWorkers;
    due = std::max(due, links_.reserve(links_.endpointOfClient(worker), links_.endpointOfClient(next),
                                       task.numBytes, sentAt, task.entry.shard));
  }
  links_.at(due, [this, task, iteration](MonotonicNs arrivedAt) { iterate(task, iteration + 1, arrivedAt); });
}

}  // namespace coarse
