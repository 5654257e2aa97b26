// Memory of the host in which another thread computes, in batches: what memory devices on GPUs do, without
// one.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "coarse/client/slot_copies.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/tensors/batched_compute.hpp"
#include "coarse/tensors/shard_reducer.hpp"
#include "coarse/tensors/shard_runs.hpp"
#include "coarse/tensors/tensor_memory.hpp"

namespace coarse::test {

/// Lets batches run, or holds them back.
class Gate {
 public:
  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    isOpen_ = false;
  }
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    isOpen_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return isOpen_; });
    ++numPassed_;
  }
  std::size_t numPassed() const { return numPassed_; }

 private:
  std::mutex mutex_;  // guards isOpen_
  std::condition_variable changed_;
  bool isOpen_ = true;
  std::atomic<std::size_t> numPassed_{0};
};

inline void runOnHost(const ShardRun& run) {
  TensorGroup& group = *run.group;
  const ShardShape shape = group.shape(run.firstShard);
  if (run.arrays != nullptr) return reduceArrays(group, run.firstShard, *run.arrays);
  if (run.work == ShardWork::kMeasure) return reduceAndMeasureShard(group, run.firstShard);
  if (run.work == ShardWork::kReduce) {
    const Contributions all(group, run.firstShard, run.firstElement);
    return reduce(shape.dtype, shape.op, all.inputs.data(), all.numInputs, all.slots.data(), all.numSlots,
                  run.numElements, group.divisor(run.firstShard));
  }
  const UpdateInputs inputs(group, run.firstShard);
  if (!inputs.isRunnable()) return;
  const Shard& shard = group.plan().shards[run.firstShard];
  std::array<float*, kMostStates> states{};
  for (std::size_t i = 0; i < group.plan().numStates; ++i) states[i] = group.state(shard, i);
  UpdateArrays arrays;
  arrays.gradients = inputs.gradients.data();
  arrays.numGradients = inputs.numGradients;
  arrays.parameter = group.parameter(shard);
  if (group.plan().hasMaster(shard)) arrays.master = group.master(shard);
  arrays.states = states.data();
  arrays.numElements = run.numElements;
  update(inputs.settings, shard.dtype, arrays, inputs.divisor);
}

/// Runs batches on a thread of its own, each when the gate lets it.
class ThreadRunner : public BatchRunner {
 public:
  explicit ThreadRunner(Gate& gate) : gate_(gate), thread_([this] { run(); }) {}
  ~ThreadRunner() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      isStopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  MonotonicNs lead() const noexcept override { return 200'000; }
  void start(const ShardBatch& batch, MonotonicNs notBefore) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back({runsOf(batch), notBefore});
      ++numStarted_;
    }
    changed_.notify_all();
  }
  bool conclude() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (numDone_ == numConcluded_) return false;
    ++numConcluded_;
    return true;
  }
  void wait() override {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return numDone_ > numConcluded_; });
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return isStopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const auto [runs, notBefore] = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      gate_.pass();
      while (monotonicNow() < notBefore) std::this_thread::yield();
      for (const ShardRun& each : runs) runOnHost(each);
      lock.lock();
      ++numDone_;
      changed_.notify_all();
    }
  }

  Gate& gate_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::pair<std::vector<ShardRun>, MonotonicNs>> queue_;  // and when each may start
  std::size_t numStarted_ = 0;
  std::size_t numDone_ = 0;
  std::size_t numConcluded_ = 0;
  bool isStopping_ = false;
  std::thread thread_;
};

/// Does each step of a ring on a thread of its own.
class ThreadRingCompute : public RingCompute {
 public:
  ~ThreadRingCompute() override { drain(); }
  void begin(const RingStep& step, Done done) override {
    done_ = std::move(done);
    running_ = std::async(std::launch::async, [this, step] { host_->begin(step, [] {}); });
  }
  bool advance() override {
    if (!isBusy() || running_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return false;
    drain();
    return true;
  }
  bool isBusy() const noexcept override { return static_cast<bool>(done_); }
  void drain() override {
    if (!isBusy()) return;
    running_.get();
    std::exchange(done_, nullptr)();
  }

 private:
  std::unique_ptr<RingCompute> host_ = makeHostRingCompute();
  std::future<void> running_;
  Done done_;  // of the step under way
};

/// Nothing that the host computes on by itself, as far as memory devices know.
class DeferredMemory : public TensorMemory {
 public:
  explicit DeferredMemory(Gate& gate) : gate_(gate) {}
  TensorBytes map(const Region& region, std::size_t numBytes, const std::string& what) const override {
    return hostMemory()->map(region, numBytes, what);
  }
  TensorBytes allocate(std::size_t numBytes) const override { return hostMemory()->allocate(numBytes); }
  TensorBytes reach(std::byte* memory, std::size_t numBytes) const override {
    return hostMemory()->reach(memory, numBytes);
  }
  std::unique_ptr<TensorCopies> makeCopies() const override { return hostMemory()->makeCopies(); }
  std::unique_ptr<ShardCompute> makeCompute(ShardCompute::Finish finish) const override {
    return std::make_unique<BatchedCompute>(std::make_unique<ThreadRunner>(gate_), std::move(finish));
  }
  std::unique_ptr<RingCompute> makeRingCompute() const override {
    return std::make_unique<ThreadRingCompute>();
  }

 private:
  Gate& gate_;
};

/// Between slots and what the worker sees of them, both in memory of the host.
class HostSlotCopies : public SlotCopies {
 public:
  HostSlotCopies(TensorBytes slots, std::shared_ptr<Mapping> view)
      : slots_(std::move(slots)), view_(std::move(view)) {}
  void stage(std::size_t offset, std::size_t numBytes) override {
    begun_.push_back({slots_.get() + offset, view_->data() + offset, numBytes});
  }
  void fetch(std::size_t offset, std::size_t numBytes) override {
    begun_.push_back({view_->data() + offset, slots_.get() + offset, numBytes});
  }
  void synchronize() override {
    for (const Copy& copy : begun_) std::memcpy(copy.to, copy.from, copy.numBytes);
    begun_.clear();
  }

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::size_t numBytes;
  };

  TensorBytes slots_;
  std::shared_ptr<Mapping> view_;
  std::vector<Copy> begun_;
};

}  // namespace coarse::test
