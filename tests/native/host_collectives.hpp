// What NCCL does between memory devices on GPUs, for devices of one process and without one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "coarse/tensors/batched_compute.hpp"
#include "deferred_memory.hpp"

namespace coarse::test {

/// Where devices meet in batches, which they must begin in the same order. The last one to come to a batch
/// has another thread reduce it, to the slots of all clients.
///
/// Thread safety: any.
class HostMeeting {
 public:
  HostMeeting(std::size_t numDevices, Gate& gate) : numStarted_(numDevices), runner_(gate) {}

  void start(std::size_t device, const ShardBatch& batch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::size_t number = numStarted_[device]++;
    if (number == batches_.size()) batches_.push_back({batch, 0});
    expectSame(batch, batches_[number].first);
    if (++batches_[number].numCome == numStarted_.size()) runner_.start(batch, 0);
  }
  bool isDone(std::size_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (runner_.conclude()) ++numDone_;
    return number < numDone_;
  }

 private:
  struct Batch {
    ShardBatch first;  // from the first device
    std::size_t numCome;
  };

  static void expectSame(const ShardBatch& batch, const ShardBatch& first) {
    ASSERT_EQ(batch.size(), first.size());
    for (std::size_t i = 0; i < batch.size(); ++i) {
      EXPECT_EQ(batch[i].entry.group, first[i].entry.group);
      EXPECT_EQ(batch[i].entry.shard, first[i].entry.shard);
      EXPECT_EQ(batch[i].entry.step, first[i].entry.step);
    }
  }

  std::mutex mutex_;  // guards what follows
  std::vector<std::size_t> numStarted_;
  std::vector<Batch> batches_;
  std::size_t numDone_ = 0;
  ThreadRunner runner_;
};

/// One device's part. As NCCL, it adds what each device has a contribution to.
class HostCollectives : public BatchRunner {
 public:
  HostCollectives(std::shared_ptr<HostMeeting> meeting, std::size_t device,
                  std::vector<std::size_t> localClients)
      : meeting_(std::move(meeting)), device_(device), localClients_(std::move(localClients)) {}

  void start(const ShardBatch& batch, MonotonicNs) override {
    for (const ShardTask& task : batch) {
      EXPECT_NE(task.group->shape(task.entry.shard).op, ReduceOp::kMax);
      EXPECT_TRUE(std::any_of(localClients_.begin(), localClients_.end(), [&](std::size_t client) {
        return task.group->isPresent(task.entry.shard, client);
      }));
    }
    meeting_->start(device_, batch);
  }
  bool conclude() override {
    if (!meeting_->isDone(numConcluded_)) return false;
    ++numConcluded_;
    return true;
  }
  void wait() override {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!meeting_->isDone(numConcluded_)) {
      if (std::chrono::steady_clock::now() > end) throw std::runtime_error("other devices have not come");
      std::this_thread::yield();
    }
  }

 private:
  std::shared_ptr<HostMeeting> meeting_;
  std::size_t device_;
  std::vector<std::size_t> localClients_;
  std::size_t numConcluded_ = 0;
};

}  // namespace coarse::test
