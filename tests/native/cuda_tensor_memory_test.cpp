/// Groups in the memory of a GPU come to the bits of those in the host's. The driver is the stand-in of
/// cuda_stand_in.cpp, which has the kernels compiled for the host.
#include "coarse/gpu/cuda_tensor_memory.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "both_memories.hpp"
#include "stand_in_kernels.hpp"

namespace coarse::test::cuda_tensor_memory_test {
namespace {

constexpr std::uint32_t kShardElements = 5000;

MemoryOfGpus gpu() {
  const auto context = std::make_shared<cuda::Context>(0);
  return {std::make_shared<CudaTensorMemory>(context, standInKernels()), {context}};
}

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
  BothMemories both(makeVariousPlan(), gpu());
  both.forBoth([](GroupIn& each) {
    for (std::size_t client = 0; client < kNumClients; ++client) each.contribute(client, kPresent);
    each.run();
  });
  both.expectSame();
}

TEST(CudaTensorMemory, ReducesPiecesAndLeavesTheRest) {
  BothMemories both(makeVariousPlan(), gpu());
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
  BothMemories both(makeVariousPlan(), gpu());
  both.forBoth([](GroupIn& each) {
    each.contribute(0, kJoined);
    each.contribute(1, kPresent);
    each.contribute(2, 0);
    each.run();
  });
  both.expectSame();
}

TEST(CudaTensorMemory, LeavesSlotsAloneIfNobodyContributes) {
  BothMemories both(makeVariousPlan(), gpu());
  both.forBoth([](GroupIn& each) { each.run(); });
  both.expectSame();
}

TEST(CudaTensorMemory, MeasuresToTheBitsOfTheHost) {
  BothMemories both(makeGradientPlan(), gpu());
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

TEST(CudaTensorMemory, ReducesWhatLiesInTheHostsMemoryBesideSlots) {
  for (const bool isPartial : {true, false}) {
    BothMemories both(makeVariousPlan(), gpu());
    std::vector<std::vector<std::byte>> places;
    both.forBoth([&](GroupIn& each) { places.push_back(each.runBesideHost(isPartial)); });
    EXPECT_EQ(places[0], places[1]);
    both.expectSame();
  }
}

TEST(CudaTensorMemory, MeasuresWhatComesOfSeveralNodes) {
  BothMemories both(makeGradientPlan(), gpu());
  both.forBoth([](GroupIn& each) {
    auto* const floats = reinterpret_cast<float*>(each.group().slot(2, each.group().plan().shards[1]));
    floats[4'000] = std::numeric_limits<float>::quiet_NaN();
    each.runBesideHost(false);
  });
  both.expectSame();
  both.expectSameMeasures();
  both.forBoth([](GroupIn& each) { EXPECT_EQ(each.group().control().measure(1).nonFiniteOf, kEverybody); });
}

class CudaUpdates : public testing::TestWithParam<std::uint8_t> {};

TEST_P(CudaUpdates, HaveTheBitsOfTheHost) {
  BothMemories both(makeGradientPlan(), gpu());
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
  GroupIn gpu(makeGradientPlan(), test::cuda_tensor_memory_test::gpu());
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
  CudaKernels kernels = standInKernels();
  kernels.holdUntil = nullptr;
  GroupIn gpu(makeGradientPlan(), {std::make_shared<CudaTensorMemory>(context, kernels), {context}});
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
