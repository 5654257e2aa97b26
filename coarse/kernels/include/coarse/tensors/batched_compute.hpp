#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "coarse/tensors/shard_compute.hpp"

namespace coarse {

using ShardBatch = std::vector<ShardTask>;

/// Runs batches of shards, one after the other, concurrently with the thread that requests them.
///
/// Thread safety: one caller at a time.
class BatchRunner {
 public:
  virtual ~BatchRunner() = default;

  /// Starts a batch behind those started before; returns immediately. The batch must stay in place until it
  /// is concluded. @throws std::runtime_error if it cannot be run.
  /// @param notBefore the latest notBefore of its tasks, or 0.
  virtual void start(const ShardBatch& batch, MonotonicNs notBefore) = 0;
  /// As ShardCompute::lead().
  virtual MonotonicNs lead() const noexcept { return 0; }
  /// Records the measures of the oldest batch, if it is done. @returns whether it is done.
  /// @throws std::runtime_error if it failed.
  virtual bool conclude() = 0;
  /// Returns when the oldest unconcluded batch is done.
  virtual void wait() = 0;
};

/// Runs shards in batches, because a launch costs more than a small shard: shards that were begun while
/// others ran go together.
class BatchedCompute : public ShardCompute {
 public:
  /// Batches that are started and not done: one runs, and the next is ready when it ends.
  static constexpr std::size_t kMostStarted = 2;
  static constexpr std::size_t kMostShards = 4096;  // of one batch

  BatchedCompute(std::unique_ptr<BatchRunner> runner, Finish finish);
  ~BatchedCompute() override;

  void begin(const ShardTask& task) override { waiting_.push_back(task); }
  MonotonicNs lead() const noexcept override { return runner_->lead(); }
  bool advance() override;
  void drain() override;
  bool isBusy() const noexcept override { return !waiting_.empty() || !started_.empty(); }
  bool isWorkingOn(const TensorGroup& group) const noexcept override;

 private:
  bool finishOldest();
  std::size_t numReadyTogether() const noexcept;
  bool startNext();

  std::unique_ptr<BatchRunner> runner_;
  Finish finish_;
  ShardBatch waiting_;
  std::deque<ShardBatch> started_;
};

}  // namespace coarse
