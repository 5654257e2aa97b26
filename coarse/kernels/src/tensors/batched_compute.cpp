#include "coarse/tensors/batched_compute.hpp"

#include <algorithm>
#include <utility>

namespace coarse {

BatchedCompute::BatchedCompute(std::unique_ptr<BatchRunner> runner, Finish finish)
    : runner_(std::move(runner)), finish_(std::move(finish)) {}

BatchedCompute::~BatchedCompute() = default;

bool BatchedCompute::advance() {
  bool progressed = false;
  while (finishOldest()) progressed = true;
  return startNext() || progressed;
}

void BatchedCompute::drain() {
  while (isBusy()) {
    startNext();
    runner_->wait();
    finishOldest();
  }
}

bool BatchedCompute::isWorkingOn(const TensorGroup& group) const noexcept {
  const auto isOfGroup = [&](const ShardTask& task) { return task.group == &group; };
  const auto hasSome = [&](const ShardBatch& batch) {
    return std::any_of(batch.begin(), batch.end(), isOfGroup);
  };
  return hasSome(waiting_) || std::any_of(started_.begin(), started_.end(), hasSome);
}

bool BatchedCompute::finishOldest() {
  if (started_.empty() || !runner_->conclude()) return false;
  const ShardBatch done = std::move(started_.front());
  started_.pop_front();
  for (const ShardTask& task : done) finish_(task);
  return true;
}

/// Number of tasks that are ready now, or no later than the first one: no task must wait for another's links.
std::size_t BatchedCompute::numReadyTogether() const noexcept {
  const MonotonicNs first = waiting_.front().notBefore;
  const MonotonicNs latest = first == 0 ? 0 : std::max(first, monotonicNow());
  const auto isLater = [&](const ShardTask& task) { return task.notBefore > latest; };
  const auto end = std::find_if(waiting_.begin(), waiting_.end(), isLater);
  return std::min(static_cast<std::size_t>(end - waiting_.begin()), kMostShards);
}

bool BatchedCompute::startNext() {
  if (waiting_.empty() || started_.size() == kMostStarted) return false;
  const auto end = waiting_.begin() + static_cast<std::ptrdiff_t>(numReadyTogether());
  MonotonicNs notBefore = 0;
  for (auto task = waiting_.begin(); task != end; ++task) notBefore = std::max(notBefore, task->notBefore);
  started_.emplace_back(waiting_.begin(), end);
  waiting_.erase(waiting_.begin(), end);
  runner_->start(started_.back(), notBefore);
  return true;
}

}  // namespace coarse
