// The same groups in the memory of GPUs and in host memory, for tests of the computation there. The driver is
// the stand-in of cuda_stand_in.cpp.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/tensors/shard_reducer.hpp"
#include "contributions.hpp"
#include "fixture.hpp"

namespace coarse::test {

inline constexpr std::size_t kNumClients = 3;

/// Some GPUs, and the object that computes in their memory.
struct MemoryOfGpus {
  std::shared_ptr<const TensorMemory> memory;
  std::vector<cuda::SharedContext> gpus{};  // none: the host
  cuda::SharedContext gpuOfSlots{};         // null: the first of these
};

/// One group, with the memory that its plan needs, and the object that computes there.
class GroupIn {
 public:
  GroupIn(const GroupPlan& plan, MemoryOfGpus where)
      : plan_(plan),
        memory_(std::move(where.memory)),
        gpus_(std::move(where.gpus)),
        gpuOfSlots_(where.gpuOfSlots != nullptr || gpus_.empty() ? where.gpuOfSlots : gpus_.front()),
        control_(GroupControl::numBytes(plan.shards.size(), kNumClients)) {
    std::vector<Region> slots;
    OptimizerFds optimizer;
    for (std::size_t client = 0; client < kNumClients; ++client) {
      slots.push_back(allocate(plan.clientBytes()));
      settings_.emplace_back(std::max<std::size_t>(plan.settingsBytes(), 1));
      optimizer.settings.push_back(settings_.back().fd);
    }
    if (plan.hasOptimizer) {
      optimizer.parameters = allocateEverywhere(plan.parameterBytes());
      optimizer.states = allocateEverywhere(std::max<std::size_t>(plan.keptBytes(), 1));
    }
    group_ = std::make_unique<TensorGroup>(plan, control_.fd, slots, optimizer, std::vector<int>(), memory_);
    compute_ = memory_->makeCompute([this](const ShardTask& task) { finished_.push_back(task.entry.shard); });
  }

  TensorGroup& group() { return *group_; }
  /// Random numbers as contributions, parameters and states; the same for the same seed.
  void fill(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (const Shard& shard : plan_.shards) {
      for (std::size_t client = 0; client < kNumClients; ++client)
        fillShard(group_->slot(client, shard), shard, random);
      if (!plan_.hasOptimizer) continue;
      fillShard(group_->parameter(shard), shard, random);
      for (std::size_t i = 0; i < plan_.numStates; ++i) {
        for (std::uint32_t k = 0; k < shard.numElements; ++k)
          group_->state(shard, i)[k] = static_cast<float>(random() % 1000) / 1000;
      }
    }
  }
  void contribute(std::size_t client, std::uint8_t flags) {
    for (std::uint32_t shard = 0; shard < plan_.shards.size(); ++shard)
      group_->control().contribution(shard, client).flags = flags;
  }
  void set(const UpdateSettings& settings) {
    for (Memory& each : settings_)
      std::fill_n(reinterpret_cast<UpdateSettings*>(each.data()), plan_.numTensors(), settings);
  }
  /// @param piecesOf a shard: the pieces to reduce.
  void run(const std::function<std::vector<ShardPiece>(const Shard&)>& piecesOf = nullptr) {
    for (std::uint32_t shard = 0; shard < plan_.shards.size(); ++shard) {
      ShardTask task{group_.get(), {plan_.id, shard, 1, 0}, {}, 0};
      if (piecesOf) task.pieces = piecesOf(plan_.shards[shard]);
      compute_->begin(task);
    }
    compute_->drain();
    ASSERT_EQ(finished_.size(), plan_.shards.size());
    ASSERT_FALSE(compute_->isBusy());
  }
  /// Reduces each shard from the slots of clients 0 and 2, with another node's contribution in host memory
  /// between them. Stores the result everywhere, or only in host memory if `isPartial`.
  /// @returns that host memory.
  std::vector<std::byte> runBesideHost(bool isPartial) {
    const Memory places(plan_.clientBytes());
    const TensorBytes reached = memory_->reach(places.data(), places.mapping.numBytes());
    std::mt19937_64 random(11);
    for (std::uint32_t number = 0; number < plan_.shards.size(); ++number) {
      const Shard& shard = plan_.shards[number];
      fillShard(places.data() + shard.offset, shard, random);
      std::byte* const place = reached.get() + shard.offset;
      ShardArrays arrays;
      arrays.inputs = {group_->slot(0, shard), place, group_->slot(2, shard)};
      arrays.outputs = {place};
      for (std::size_t client = 0; client < kNumClients && !isPartial; ++client)
        arrays.outputs.push_back(group_->slot(client, shard));
      arrays.op = isPartial && shard.op == ReduceOp::kMean ? ReduceOp::kSum : shard.op;
      arrays.divisor = 5;
      arrays.isMeasured = !isPartial && plan_.hasOptimizer;
      ShardTask task{group_.get(), {plan_.id, number, 1, 0}};
      task.arrays = std::make_shared<const ShardArrays>(arrays);
      if (memory_->isHost()) {
        reduceArrays(*group_, number, arrays);
      } else {
        compute_->begin(task);
      }
    }
    compute_->drain();
    return {places.data(), places.data() + plan_.clientBytes()};
  }
  /// Reduces a shard whose transfers on the links end at `notBefore`. @returns when the reduction ended.
  MonotonicNs reduceHeld(std::uint32_t shard, MonotonicNs notBefore) {
    compute_->begin({group_.get(), {plan_.id, shard, 1, 0}, {}, notBefore});
    compute_->drain();
    return monotonicNow();
  }
  MonotonicNs lead() const { return compute_->lead(); }

 private:
  Region allocate(std::size_t numBytes) {
    if (memory_->isHost()) return Region(fds_.emplace_back(createSealedMemory("test", numBytes)));
    return allocateOn(gpuOfSlots_, numBytes);
  }
  Region allocateOn(const cuda::SharedContext& gpu, std::size_t numBytes) {
    const cuda::DeviceMemory memory = cuda::DeviceMemory::allocate(gpu, numBytes);
    return {fds_.emplace_back(memory.exportFd()), 0, memory.numBytes(), cuda::deviceUuid(gpu->device())};
  }
  /// In as many pieces as there are GPUs.
  Region allocateEverywhere(std::size_t numBytes) {
    if (memory_->isHost()) return allocate(numBytes);
    const std::size_t share = numBytes / gpus_.size() + 1;
    Region all = allocateOn(gpus_.front(), share);
    for (std::size_t i = 1; i < gpus_.size(); ++i) all.rest.push_back(allocateOn(gpus_[i], share));
    return all;
  }
  static void fillShard(std::byte* to, const Shard& shard, std::mt19937_64& random) {
    const std::size_t itemSize = itemBytes(shard.dtype);
    for (std::uint32_t i = 0; i < shard.numElements; ++i) {
      const std::uint64_t bits = encode(shard.dtype, random() % 200);
      std::memcpy(to + i * itemSize, &bits, itemSize);
    }
  }

  GroupPlan plan_;
  std::shared_ptr<const TensorMemory> memory_;
  std::vector<cuda::SharedContext> gpus_;
  cuda::SharedContext gpuOfSlots_;
  Memory control_;
  std::vector<Memory> settings_;
  std::vector<Fd> fds_;
  std::vector<std::uint32_t> finished_;
  std::unique_ptr<TensorGroup> group_;
  std::unique_ptr<ShardCompute> compute_;
};

/// The same group twice: in host memory and in the memory of GPUs.
class BothMemories {
 public:
  BothMemories(const GroupPlan& plan, MemoryOfGpus gpus)
      : plan_(plan), host_(plan, {hostMemory()}), gpu_(plan, std::move(gpus)) {
    forBoth([](GroupIn& each) { each.fill(7); });
  }
  template <class Action>
  void forBoth(Action action) {
    action(host_);
    action(gpu_);
  }
  void expectSame() {
    for (const Shard& shard : plan_.shards) {
      const std::size_t numBytes = shard.numElements * itemBytes(shard.dtype);
      for (std::size_t client = 0; client < kNumClients; ++client)
        ASSERT_EQ(std::memcmp(host_.group().slot(client, shard), gpu_.group().slot(client, shard), numBytes),
                  0)
            << "tensor " << shard.tensor << " of client " << client;
      if (!plan_.hasOptimizer) continue;
      ASSERT_EQ(std::memcmp(host_.group().parameter(shard), gpu_.group().parameter(shard), numBytes), 0);
      const std::size_t numArrays = plan_.numStates + (plan_.hasMaster(shard) ? 1 : 0);
      for (std::size_t i = 0; i < numArrays; ++i) {
        ASSERT_EQ(std::memcmp(host_.group().state(shard, i), gpu_.group().state(shard, i),
                              shard.numElements * sizeof(float)),
                  0);
      }
    }
  }
  void expectSameMeasures() {
    for (std::uint32_t shard = 0; shard < plan_.shards.size(); ++shard) {
      const GradientMeasure& expected = host_.group().control().measure(shard);
      const GradientMeasure& found = gpu_.group().control().measure(shard);
      EXPECT_EQ(std::memcmp(&found.sumOfSquares, &expected.sumOfSquares, sizeof(double)), 0) << shard;
      EXPECT_EQ(found.nonFiniteOf, expected.nonFiniteOf) << shard;
    }
  }

 private:
  GroupPlan plan_;
  GroupIn host_, gpu_;
};

}  // namespace coarse::test
