/// Tensors go from a GPU to the memory devices and come back while nobody waits but streams. The driver is
/// the stand-in of cuda_stand_in.cpp, whose device memory is the test's own.
#include "coarse/gpu/gpu_transfers.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <stdexcept>
#include <vector>

#include "coarse/gpu/cuda_unused_memory.hpp"
#include "contributions.hpp"
#include "fixture.hpp"
#include "gpu_worker.hpp"

extern "C" void standInCapture(coarse::cuda::StreamHandle stream, bool isCapturing);

namespace coarse::test::gpu_transfers_test {
namespace {

class GpuJob : public testing::Test {
 protected:
  explicit GpuJob(std::size_t numClients = 2) : cluster_({numClients, 2, 1}) {
    plan_ = makePlan(kGroup, numClients, someTensors(), kShardElements);
    cluster_.start().addToProxies(plan_);
  }
  const Variable devices_{"STAND_IN_GPUS", "2"};
  Cluster cluster_{{2, 2, 1}};
  GroupPlan plan_;
  Memory gate_{4096};  // a word at which a stream can be held
  cuda::DeviceAddress gateAddress() const { return reinterpret_cast<cuda::DeviceAddress>(gate_.data()); }
  void openGate() { reinterpret_cast<std::atomic<std::uint32_t>*>(gate_.data())->store(1); }
};

TEST_F(GpuJob, ComesBackReducedStepAfterStep) {
  together(2, [&](std::size_t rank) {
    GpuWorker worker(cluster_, plan_, rank);
    for (std::uint32_t step = 1; step <= 20; ++step) {
      ASSERT_NO_FATAL_FAILURE(worker.step(step));
      ASSERT_NO_FATAL_FAILURE(worker.expectResults({0, 1}, step, 2));
    }
  });
}

/// Slots of the worker's own device, or of another one, for which memory is mapped.
class GpuJobWithSlots : public GpuJob, public testing::WithParamInterface<int> {};

TEST_P(GpuJobWithSlots, ComesBackFromThoseOfAGpuWhichAreNotPinned) {
  together(2, [&](std::size_t rank) {
    GpuWorker worker(cluster_, plan_, rank, kPatienceSeconds, std::make_shared<cuda::Context>(GetParam()));
    EXPECT_NO_THROW(worker.pinSlots());
    for (std::uint32_t step = 1; step <= 5; ++step) {
      ASSERT_NO_FATAL_FAILURE(worker.step(step));
      ASSERT_NO_FATAL_FAILURE(worker.expectResults({0, 1}, step, 2));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, GpuJobWithSlots, testing::Values(0, 1), [](const auto& info) {
  return info.param == 0 ? "ThatReachesThem" : "ThatDoesNot";
});

TEST_F(GpuJob, GoesOnWithoutWaitingForTheGpu) {
  // Both workers give all of two steps before their GPUs have computed anything.
  GpuWorker first(cluster_, plan_, 0), second(cluster_, plan_, 1);
  for (GpuWorker* worker : {&first, &second}) {
    worker->compute().waitValue(gateAddress(), 1);
    for (std::uint32_t step = 1; step <= 2; ++step) ASSERT_NO_FATAL_FAILURE(worker->step(step));
    EXPECT_FALSE(worker->compute().isIdle());
  }
  openGate();
  ASSERT_NO_FATAL_FAILURE(first.expectResults({0, 1}, 2, 2));
  ASSERT_NO_FATAL_FAILURE(second.expectResults({0, 1}, 2, 2));
}

TEST_F(GpuJob, DoesNotWaitForTheGpuToUnmapMemory) {
  // That would end a capture which another thread has under way.
  const auto context = std::make_shared<cuda::Context>(0);
  cuda::leaveUnused(std::make_unique<cuda::DeviceMemory>(cuda::DeviceMemory::allocate(context, 1)));
  together(2, [&](std::size_t rank) {
    GpuWorker worker(cluster_, plan_, rank);
    ASSERT_NO_FATAL_FAILURE(worker.step(1));
    ASSERT_NO_FATAL_FAILURE(worker.expectResults({0, 1}, 1, 2));
  });
  EXPECT_EQ(cuda::numUnused(), 1U);
  cuda::unmapUnused();
  EXPECT_EQ(cuda::numUnused(), 0U);
}

TEST_F(GpuJob, TakesPartWithoutAGradient) {
  together(2, [&](std::size_t rank) {
    GpuWorker worker(cluster_, plan_, rank);
    std::vector<GpuTensor> tensors;
    for (std::uint32_t tensor = 0; tensor < someTensors().size(); ++tensor) {
      worker.computeGradient(tensor, 1);
      tensors.push_back(worker.describe(tensor, rank == 0 ? std::uint8_t{kPresent} : std::uint8_t{0}));
    }
    ASSERT_EQ(worker.transfers().push(tensors, worker.compute().handle()), WaitStatus::kDone);
    ASSERT_EQ(worker.transfers().join(worker.compute().handle()), WaitStatus::kDone);
    ASSERT_NO_FATAL_FAILURE(worker.expectResults({0}, 1, 2));
  });
}

TEST_F(GpuJob, PushesLessAtOnceTowardsTheEndOfAStep) {
  together(2, [&](std::size_t rank) {
    GpuWorker worker(cluster_, plan_, rank);
    for (std::uint32_t step = 1; step <= 2; ++step) {
      EXPECT_EQ(worker.transfers().batchBytes(), kMostBatchBytes);
      const std::vector<GpuTensor> tensors = worker.computeAll(step);
      const std::uint32_t before = worker.transfers().numPushed();
      ASSERT_EQ(worker.transfers().push({tensors[1]}, worker.compute().handle()), WaitStatus::kDone);
      // 12004 of 13934 bytes, in shards of 800: three times 3200, and the rest, of which 4 bytes are no
      // batch.
      EXPECT_EQ(worker.transfers().numPushed() - before, 4);
      EXPECT_EQ(worker.transfers().batchBytes(), kLeastBatchBytes);
      ASSERT_EQ(worker.transfers().push({tensors[0], tensors[2], tensors[3], tensors[4]},
                                        worker.compute().handle()),
                WaitStatus::kDone);
      ASSERT_EQ(worker.transfers().join(worker.compute().handle()), WaitStatus::kDone);
      ASSERT_NO_FATAL_FAILURE(worker.expectResults({0, 1}, step, 2));
    }
  });
}

TEST_F(GpuJob, AnnouncesWhatWasBroughtBeforeIt) {
  std::atomic<int> numChecked{0};
  together(2, [&](std::size_t rank) {
    GpuWorker worker(cluster_, plan_, rank);
    worker.compute().waitValue(gateAddress(), 1);
    std::vector<GpuTensor> tensors = worker.computeAll(1);
    ASSERT_EQ(worker.transfers().stage(tensors, worker.compute().handle()), WaitStatus::kDone);
    for (GpuTensor& tensor : tensors) tensor.source = 0;  // it is on its way to its slot
    ASSERT_EQ(worker.transfers().push(tensors, worker.compute().handle()), WaitStatus::kDone);
    EXPECT_FALSE(worker.transfers().hasBrought(worker.transfers().numPushed()));
    if (numChecked.fetch_add(1) == 1) openGate();
    ASSERT_EQ(worker.transfers().join(worker.compute().handle()), WaitStatus::kDone);
    ASSERT_NO_FATAL_FAILURE(worker.expectResults({0, 1}, 1, 2));
    EXPECT_TRUE(worker.transfers().hasBrought(worker.transfers().numPushed()));
  });
}

/// Results that are not those of slots come from the host's memory, or from another GPU.
class GpuJobWithResults : public GpuJob, public testing::WithParamInterface<std::optional<int>> {
 protected:
  static cuda::SharedContext gpu() {
    return GetParam() ? std::make_shared<cuda::Context>(*GetParam()) : nullptr;
  }
};

TEST_P(GpuJobWithResults, TakesThemWhereTheyLie) {
  const std::size_t cut = 1;  // a tensor of several batches
  together(2, [&](std::size_t rank) {
    const Bytes updated = contribution(DType::kFloat32, someTensors()[cut].numElements, 7 + rank, 1);
    const Memory memory(updated.size());
    std::copy(updated.begin(), updated.end(), memory.data());
    GpuWorker worker(cluster_, plan_, rank, kPatienceSeconds, nullptr,
                     {memory.data(), updated.size(), gpu()});
    std::vector<GpuTensor> tensors = worker.computeAll(1);
    tensors[cut].result = memory.data();
    ASSERT_EQ(worker.transfers().push(tensors, worker.compute().handle()), WaitStatus::kDone);
    ASSERT_EQ(worker.transfers().join(worker.compute().handle()), WaitStatus::kDone);
    worker.compute().synchronize();
    EXPECT_TRUE(worker.gradient(cut) == updated);
    EXPECT_TRUE(worker.gradient(0) == result(DType::kFloat32, ReduceOp::kMean, 7, {0, 1}, 1, 2));
    worker.transfers().close();
  });
}

INSTANTIATE_TEST_SUITE_P(Memories, GpuJobWithResults, testing::Values(std::nullopt, 0, 1),
                         [](const auto& info) {
                           return !info.param        ? "OfTheHost"
                                  : *info.param == 0 ? "OfAGpuThatIsReached"
                                                     : "OfAnotherGpu";
                         });

TEST_F(GpuJob, LeavesTheClientToItsOwner) {
  // Another group of the same client is pushed and pulled meanwhile.
  const std::vector<TensorSpec> others = {{777, DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect}};
  cluster_.addGroup(makePlan(2, 2, others, kShardElements));
  together(2, [&](std::size_t rank) {
    GpuWorker worker(cluster_, plan_, rank);
    for (std::uint32_t step = 1; step <= 10; ++step) {
      ASSERT_NO_FATAL_FAILURE(worker.step(step));
      Bytes data = contribution(DType::kFloat32, 777, rank, step);
      ASSERT_EQ(cluster_.client(rank).push(2, 0, kPresent, data.data()), WaitStatus::kDone);
      ASSERT_EQ(cluster_.client(rank).pull(2, 0, data.data(), kPatienceSeconds), WaitStatus::kDone);
      ASSERT_TRUE(data == result(DType::kFloat32, ReduceOp::kMean, 777, {0, 1}, step, 2));
      ASSERT_NO_FATAL_FAILURE(worker.expectResults({0, 1}, step, 2));
    }
  });
}

TEST_F(GpuJob, OfALostDeviceLetsStreamsGo) {
  GpuWorker worker(cluster_, plan_, 0);  // and no second one
  ASSERT_NO_FATAL_FAILURE(worker.step(1));
  EXPECT_FALSE(worker.compute().isIdle());
  cluster_.loseDevice(1);
  worker.compute().synchronize();
  EXPECT_EQ(worker.transfers().status(), WaitStatus::kDeviceLost);
  EXPECT_EQ(cluster_.client(0).lostDevice(), 1u);
  EXPECT_EQ(worker.transfers().push({worker.describe(0)}, worker.compute().handle()),
            WaitStatus::kDeviceLost);
}

TEST_F(GpuJob, ThatTakesTooLongLetsStreamsGo) {
  GpuWorker worker(cluster_, plan_, 0, kMomentSeconds);
  ASSERT_NO_FATAL_FAILURE(worker.step(1));
  worker.compute().synchronize();
  EXPECT_EQ(worker.transfers().status(), WaitStatus::kTimedOut);
}

TEST_F(GpuJob, ThatWasAbortedLetsStreamsGo) {
  GpuWorker worker(cluster_, plan_, 0);
  ASSERT_NO_FATAL_FAILURE(worker.step(1));
  cluster_.inbox(0).abort();
  worker.compute().synchronize();
  EXPECT_EQ(worker.transfers().status(), WaitStatus::kAborted);
}

TEST_F(GpuJob, CanBeClosedInTheMiddleOfAStep) {
  GpuWorker worker(cluster_, plan_, 0);
  ASSERT_NO_FATAL_FAILURE(worker.step(1));
  worker.transfers().close();
  worker.compute().synchronize();
  EXPECT_THROW(worker.transfers().push({worker.describe(0)}, worker.compute().handle()), std::logic_error);
}

TEST_F(GpuJob, RefusesToBeCaptured) {
  GpuWorker worker(cluster_, plan_, 0);
  standInCapture(worker.compute().handle(), true);
  EXPECT_THROW(worker.transfers().push({worker.describe(0)}, worker.compute().handle()), cuda::Error);
  standInCapture(worker.compute().handle(), false);
}

TEST_F(GpuJob, RefusesTensorsThatDoNotExist) {
  GpuWorker worker(cluster_, plan_, 0);
  const std::vector<GpuTensor> unknown = {{99, kPresent, 0, 0, nullptr}};
  EXPECT_THROW(worker.transfers().push(unknown, worker.compute().handle()), std::invalid_argument);
  EXPECT_THROW(worker.transfers().stage(unknown, worker.compute().handle()), std::invalid_argument);
}

}  // namespace
}  // namespace coarse::test::gpu_transfers_test
