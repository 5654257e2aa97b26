/// Groups in the memory of a GPU come to the bits of those in the host's. The driver is the stand-in of
/// cuda_stand_in.cpp, which has the kernels compiled for the host.
#include "coarse/cuda_tensor_memory.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "coarse/shard_reducer.hpp"
#include "contributions.hpp"
#include "fixture.hpp"
#include "stand_in_kernels.hpp"

namespace coarse::test::cuda_tensor_memory_test {
namespace {

constexpr std::size_t kNumClients = 3;
constexpr std::uint32_t kShardElements = 5000;

/// One group, with the memory that its plan asks for, and what computes there.
class GroupIn {
 public:
  GroupIn(const GroupPlan& plan, std::shared_ptr<const TensorMemory> memory, cuda::SharedContext context)
      : plan_(plan),
        memory_(std::move(memory)),
        context_(std::move(context)),
        control_(GroupControl::numBytes(plan.shards.size(), kNumClients)) {
    std::vector<Region> slots;
    OptimizerFds optimizer;
    for (std::size_t client = 0; client < kNumClients; ++client) {
      slots.push_back(allocate(plan.clientBytes()));
      settings_.emplace_back(std::max<std::size_t>(plan.settingsBytes(), 1));
      optimizer.settings.push_back(settings_.back().fd);
    }
    if (plan.hasOptimizer) {
      optimizer.parameters = allocate(plan.parameterBytes());
      optimizer.states = allocate(std::max<std::size_t>(plan.keptBytes(), 1));
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
  /// @param piecesOf those of a shard that are to be reduced.
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
  /// Reduces a shard with which links are through at `notBefore`. @returns when it was finished.
  MonotonicNs reduceHeld(std::uint32_t shard, MonotonicNs notBefore) {
    compute_->begin({group_.get(), {plan_.id, shard, 1, 0}, {}, notBefore});
    compute_->drain();
    return monotonicNow();
  }
  MonotonicNs lead() const { return compute_->lead(); }

 private:
  Region allocate(std::size_t numBytes) {
    if (memory_->isHost()) return Region(fds_.emplace_back(createSealedMemory("test", numBytes)));
    const cuda::DeviceMemory memory = cuda::DeviceMemory::allocate(context_, numBytes);
    return {fds_.emplace_back(memory.exportFd()), 0, memory.numBytes()};
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
  cuda::SharedContext context_;
  Memory control_;
  std::vector<Memory> settings_;
  std::vector<Fd> fds_;
  std::vector<std::uint32_t> finished_;
  std::unique_ptr<TensorGroup> group_;
  std::unique_ptr<ShardCompute> compute_;
};

/// The same group twice: in the host's memory, and in that of a GPU.
class BothMemories {
 public:
  explicit BothMemories(const GroupPlan& plan)
      : plan_(plan),
        host_(plan, hostMemory(), context_),
        gpu_(plan, std::make_shared<CudaTensorMemory>(context_, standInKernels()), context_) {
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
  cuda::SharedContext context_ = std::make_shared<cuda::Context>(0);
  GroupPlan plan_;
  GroupIn host_, gpu_;
};

GroupPlan makeVariousPlan() {
  std::vector<TensorSpec> tensors;
  for (const DType dtype : kEveryDType) {
    for (const ReduceOp op : kEveryOp) {
      for (const std::uint32_t numElements : {1U, 33U, 12'345U})
        tensors.push_back({numElements, dtype, op, Algorithm::kDirect});
    }
  }
  return makePlan(1, kNumClients, tensors, kShardElements);
}

GroupPlan makeGradientPlan() {
  GroupPlan plan = makePlan(1, kNumClients,
                            {{12'345, DType::kFloat32, ReduceOp::kMean},
                             {77, DType::kBFloat16, ReduceOp::kMean},
                             {9'999, DType::kFloat16, ReduceOp::kMean},
                             {20'000, DType::kBFloat16, ReduceOp::kMean},
                             {1, DType::kFloat32, ReduceOp::kMean}},
                            kShardElements);
  plan.hasOptimizer = true;
  plan.numStates = 2;
  return plan;
}

TEST(CudaTensorMemory, ReducesToTheBitsOfTheHost) {
  BothMemories both(makeVariousPlan());
  both.forBoth([](GroupIn& each) {
    for (std::size_t client = 0; client < kNumClients; ++client) each.contribute(client, kPresent);
    each.run();
  });
  both.expectSame();
}

TEST(CudaTensorMemory, ReducesPiecesAndLeavesTheRest) {
  BothMemories both(makeVariousPlan());
  both.forBoth([](GroupIn& each) {
    for (std::size_t client = 0; client < kNumClients; ++client) each.contribute(client, kPresent);
    each.run([](const Shard& shard) {
      const std::uint32_t third = shard.numElements / 3;
      if (third == 0) return std::vector<ShardPiece>{{0, shard.numElements}};
      return std::vector<ShardPiece>{{0, third}, {2 * third, shard.numElements}};
    });
  });
  both.expectSame();
}

TEST(CudaTensorMemory, LeavesOutWhoHasNothingToContribute) {
  BothMemories both(makeVariousPlan());
  both.forBoth([](GroupIn& each) {
    each.contribute(0, kJoined);
    each.contribute(1, kPresent);
    each.contribute(2, 0);
    each.run();
  });
  both.expectSame();
}

TEST(CudaTensorMemory, LeavesSlotsAloneIfNobodyContributes) {
  BothMemories both(makeVariousPlan());
  both.forBoth([](GroupIn& each) { each.run(); });
  both.expectSame();
}

TEST(CudaTensorMemory, MeasuresToTheBitsOfTheHost) {
  BothMemories both(makeGradientPlan());
  both.forBoth([](GroupIn& each) {
    each.contribute(0, kMeasure);
    each.contribute(1, kPresent | kMeasure);
    each.contribute(2, kPresent | kMeasure);
    auto* const floats = reinterpret_cast<float*>(each.group().slot(2, each.group().plan().shards[1]));
    floats[4'000] = std::numeric_limits<float>::quiet_NaN();
    each.run();
  });
  both.expectSame();
  both.expectSameMeasures();
}

class CudaUpdates : public testing::TestWithParam<std::uint8_t> {};

TEST_P(CudaUpdates, HaveTheBitsOfTheHost) {
  BothMemories both(makeGradientPlan());
  UpdateSettings settings;
  settings.rule = UpdateRule::kAdam;
  settings.gradientScale = 0.5F;
  settings.parameterScale = 0.99F;
  settings.stepSize = 0.1F;
  settings.firstWeight = 0.1F;
  settings.secondDecay = 0.999F;
  settings.secondWeight = 0.001F;
  settings.secondScale = 0.7F;
  settings.epsilon = 1e-8F;
  both.forBoth([&](GroupIn& each) {
    each.set(settings);
    for (std::size_t client = 0; client < kNumClients; ++client) each.contribute(client, GetParam());
    each.run();
  });
  both.expectSame();
}

INSTANTIATE_TEST_SUITE_P(All, CudaUpdates,
                         testing::Values(kPresent | kUpdate, kPresent | kUpdate | kReduced, kUpdate));

TEST(CudaTensorMemory, HoldsReductionsUntilLinksAreThrough) {
  const auto context = std::make_shared<cuda::Context>(0);
  const GroupPlan plan = makeGradientPlan();
  GroupIn gpu(plan, std::make_shared<CudaTensorMemory>(context, standInKernels()), context);
  EXPECT_EQ(gpu.lead(), 0) << "nothing is known of the GPU's clock";
  gpu.reduceHeld(0, monotonicNow());
  int numHeld = 0;
  for (int attempt = 0; attempt < 100; ++attempt) {
    const MonotonicNs lead = gpu.lead(), notBefore = monotonicNow() + lead;
    if (lead == 0) {  // nothing was heard of the clock for too long: this machine is busy
      gpu.reduceHeld(0, notBefore);
      continue;
    }
    ++numHeld;
    ASSERT_GE(gpu.reduceHeld(1, notBefore), notBefore);
  }
  EXPECT_GT(numHeld, 0);
}

TEST(CudaTensorMemory, BeginsNothingEarlyWithoutTheKernelThatHolds) {
  const auto context = std::make_shared<cuda::Context>(0);
  const GroupPlan plan = makeGradientPlan();
  CudaKernels kernels = standInKernels();
  kernels.holdUntil = nullptr;
  GroupIn gpu(plan, std::make_shared<CudaTensorMemory>(context, kernels), context);
  gpu.reduceHeld(0, monotonicNow());
  EXPECT_EQ(gpu.lead(), 0);
}

TEST(CudaTensorMemory, NeedsAllKernels) {
  CudaKernels kernels = standInKernels();
  kernels.update[static_cast<std::size_t>(DType::kFloat16)] = nullptr;
  EXPECT_THROW(CudaTensorMemory(std::make_shared<cuda::Context>(0), kernels), std::invalid_argument);
}

TEST(CudaTensorMemory, SaysWhatIsTooSmallOrNoMemoryOfAGpu) {
  const auto context = std::make_shared<cuda::Context>(0);
  const CudaTensorMemory memory(context, standInKernels());
  const cuda::DeviceMemory allocated = cuda::DeviceMemory::allocate(context, 1);
  const Fd fd(allocated.exportFd());
  EXPECT_NO_THROW(memory.map(Region(fd, 0, allocated.numBytes()), 1 << 20, "slots"));
  EXPECT_THROW(memory.map(Region(fd, 0, allocated.numBytes()), 4 << 20, "slots"), std::invalid_argument);
  EXPECT_THROW(memory.map(Region(fd, 0, 4 << 20), 4 << 20, "slots"), cuda::Error);
}

}  // namespace
}  // namespace coarse::test::cuda_tensor_memory_test
