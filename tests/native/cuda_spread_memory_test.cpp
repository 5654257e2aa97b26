/// Parameters and states that lie on several GPUs: updates have the bits of the host's memory, and each GPU
/// makes those of what it has.
#include "coarse/gpu/cuda_spread_memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "both_memories.hpp"
#include "coarse/gpu/cuda_pinned_pages.hpp"
#include "stand_in_kernels.hpp"

extern "C" std::size_t standInLaunches(int device);
extern "C" std::size_t standInPooledBytes();

namespace coarse::test::cuda_spread_memory_test {
namespace {

constexpr int kNumGpus = 3;
constexpr std::size_t kPageBytes = std::size_t{2} << 20;
constexpr std::uint32_t kShardElements = 100'000;  // whose ends are no page's

/// Three GPUs that reach each other.
class SpreadOverGpus : public testing::Test {
 protected:
  SpreadOverGpus() {
    std::vector<std::shared_ptr<const CudaTensorMemory>> memories;
    for (int device = 0; device < kNumGpus; ++device) {
      gpus_.push_back(std::make_shared<cuda::Context>(device));
      memories.push_back(std::make_shared<CudaTensorMemory>(gpus_.back(), standInKernels()));
      launchesBefore_[static_cast<std::size_t>(device)] = standInLaunches(device);
    }
    memory_ = std::make_shared<CudaSpreadMemory>(std::move(memories));
  }

  MemoryOfGpus memory() const { return {memory_, gpus_}; }
  /// Kernels that a GPU has run in this test.
  std::size_t numLaunches(int device) const {
    return standInLaunches(device) - launchesBefore_[static_cast<std::size_t>(device)];
  }
  /// Memory of each GPU, a page of it, side by side.
  TensorBytes mapPages() {
    Region all = allocateOn(0);
    for (int device = 1; device < kNumGpus; ++device) all.rest.push_back(allocateOn(device));
    return memory_->map(all, kNumGpus * kPageBytes, "pages");
  }
  Region allocateOn(int device) {
    const auto page = cuda::DeviceMemory::allocate(gpus_[static_cast<std::size_t>(device)], kPageBytes);
    return {fds_.emplace_back(page.exportFd()), 0, page.numBytes(), cuda::deviceUuid(device)};
  }

  const Variable numGpus_{"STAND_IN_GPUS", "3"};
  std::vector<cuda::SharedContext> gpus_;
  std::shared_ptr<CudaSpreadMemory> memory_;
  std::vector<Fd> fds_;
  std::array<std::size_t, kNumGpus> launchesBefore_{};
};

/// Parameters of several pages, some 16 bits wide, so that pieces end within shards, and states elsewhere.
GroupPlan makeLargePlan() {
  GroupPlan plan = makePlan(1, kNumClients,
                            {{1'500'001, DType::kFloat32, ReduceOp::kMean},
                             {77, DType::kBFloat16, ReduceOp::kMean},
                             {900'000, DType::kFloat16, ReduceOp::kMean},
                             {1'200'000, DType::kBFloat16, ReduceOp::kMean}},
                            kShardElements);
  plan.hasOptimizer = true;
  plan.numStates = 2;
  return plan;
}

UpdateSettings adam() {
  UpdateSettings settings;
  settings.rule = UpdateRule::kAdam;
  settings.parameterScale = 0.99F;
  settings.stepSize = 0.1F;
  settings.firstWeight = 0.1F;
  settings.secondDecay = 0.999F;
  settings.secondWeight = 0.001F;
  settings.secondScale = 0.7F;
  settings.epsilon = 1e-8F;
  return settings;
}

TEST_F(SpreadOverGpus, UpdatesHaveTheBitsOfTheHostAndAreMadeByEachGpu) {
  BothMemories both(makeLargePlan(), memory());
  both.forBoth([](GroupIn& each) {
    each.set(adam());
    for (std::size_t client = 0; client < kNumClients; ++client) each.contribute(client, kPresent | kUpdate);
    each.run();
  });
  both.expectSame();
  for (int device = 0; device < kNumGpus; ++device) EXPECT_GT(numLaunches(device), 0U) << device;
}

TEST_F(SpreadOverGpus, MeasuresHaveTheBitsOfTheHost) {
  BothMemories both(makeLargePlan(), memory());
  both.forBoth([](GroupIn& each) {
    for (std::size_t client = 0; client < kNumClients; ++client) each.contribute(client, kPresent | kMeasure);
    const GroupPlan& plan = each.group().plan();
    reinterpret_cast<float*>(each.group().slot(1, plan.shards[0]))[40] =
        std::numeric_limits<float>::infinity();
    each.run();
  });
  both.expectSame();
  both.expectSameMeasures();
}

TEST_F(SpreadOverGpus, WhatLiesInOnePieceIsOfItsGpu) {
  const TensorBytes mapped = memory_->map(allocateOn(1), kPageBytes, "a page");
  EXPECT_EQ(memory_->gpuOf(mapped.get() + kPageBytes - 1), 1U);
  EXPECT_THROW(memory_->map(allocateOn(0), kPageBytes + 1, "two pages"), std::invalid_argument);
}

TEST_F(SpreadOverGpus, PiecesLieSideBySideAndAreKnownWhileTheyAreMapped) {
  TensorBytes mapped = mapPages();
  std::byte* const begin = mapped.get();
  for (std::size_t gpu = 0; gpu < kNumGpus; ++gpu) {
    EXPECT_EQ(memory_->gpuOf(begin + gpu * kPageBytes), gpu);
    EXPECT_EQ(memory_->gpuOf(begin + (gpu + 1) * kPageBytes - 1), gpu);
  }
  mapped.reset();
  EXPECT_EQ(memory_->gpuOf(begin + kPageBytes), 0U);
}

/// Slots are on a fourth GPU, which two of the others cannot reach.
TEST_F(SpreadOverGpus, OfSlotsThatAGpuCannotReachItTakesCopies) {
  const Variable numGpus("STAND_IN_GPUS", "4"), apart("STAND_IN_GPUS_ARE_APART", "0:3,3:2");
  MemoryOfGpus where = memory();
  where.gpuOfSlots = std::make_shared<cuda::Context>(3);
  BothMemories both(makeLargePlan(), where);
  both.forBoth([](GroupIn& each) {
    each.set(adam());
    for (std::size_t client = 0; client < kNumClients; ++client) each.contribute(client, kPresent | kUpdate);
    each.run();
  });
  both.expectSame();
  for (int device = 0; device < kNumGpus; ++device) EXPECT_GT(numLaunches(device), 0U) << device;
  EXPECT_FALSE(memory_->gpu(0).distant().isEmpty());
  EXPECT_TRUE(memory_->gpu(1).distant().isEmpty());
}

TEST_F(SpreadOverGpus, PiecesThatAGpuCannotReachAreRefused) {
  const Variable apart("STAND_IN_GPUS_ARE_APART", "2:1");
  try {
    mapPages();
    FAIL() << "was mapped";
  } catch (const cuda::Error& error) {
    EXPECT_NE(std::string(error.what()).find("pages: a GPU cannot reach all of it"), std::string::npos)
        << error.what();
  }
}

TEST_F(SpreadOverGpus, CopiesGoWhereTheirEndIs) {
  const TensorBytes from = mapPages(), to = mapPages();
  std::fill_n(from.get(), kNumGpus * kPageBytes, std::byte{5});
  const auto copies = memory_->makeCopies();
  for (std::size_t gpu = 0; gpu < kNumGpus; ++gpu)
    copies->copy(to.get() + gpu * kPageBytes, from.get() + gpu * kPageBytes, kPageBytes);
  copies->synchronize();
  EXPECT_TRUE(std::equal(from.get(), from.get() + kNumGpus * kPageBytes, to.get()));
}

TEST_F(SpreadOverGpus, OldVersionsAreOfEachGpuAndGoBack) {
  const std::size_t before = standInPooledBytes();
  const TensorBytes blocks = mapPages();
  {
    const auto pool = memory_->makeSnapshotPool(std::vector<std::size_t>(kNumGpus, kPageBytes));
    const auto at = [&](std::size_t block) { return blocks.get() + block * kPageBytes; };
    for (std::size_t block = 0; block < kNumGpus; ++block) {
      std::fill_n(at(block), kPageBytes, static_cast<std::byte>(1 + block));
      ASSERT_TRUE(pool->store(block, 0, at(block)));
    }
    pool->synchronize();
    EXPECT_EQ(standInPooledBytes() - before, kNumGpus * kPageBytes);
    std::fill_n(blocks.get(), kNumGpus * kPageBytes, std::byte{9});
    std::vector<std::byte> found(kPageBytes);
    for (std::size_t block = 0; block < kNumGpus; ++block) {
      ASSERT_TRUE(pool->load(block, 0, found.data()));
      EXPECT_EQ(found, std::vector<std::byte>(kPageBytes, static_cast<std::byte>(1 + block)));
      EXPECT_FALSE(pool->load(block, 1, found.data()));
      pool->loadCurrent(block, at(block), found.data());
      EXPECT_EQ(found, std::vector<std::byte>(kPageBytes, std::byte{9}));
    }
    pool->free(1, 0);
    EXPECT_FALSE(pool->load(1, 0, found.data()));
  }
  EXPECT_EQ(standInPooledBytes(), before);
}

}  // namespace
}  // namespace coarse::test::cuda_spread_memory_test
