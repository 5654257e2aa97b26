/// Some shards of a step go by NCCL between the GPUs of the workers, others by the memory devices: whichever
/// way, step after step the results are those of all workers, and where somebody is missing nothing hangs.
/// Driver and NCCL are those of cuda_stand_in.cpp and nccl_stand_in.cpp; workers are threads.
#include "coarse/gpu/gpu_direct_allreduce.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "contributions.hpp"
#include "fixture.hpp"
#include "gpu_worker.hpp"

namespace coarse::test::gpu_direct_allreduce_test {
namespace {

constexpr std::size_t kBucketBytes = 1000;  // a shard of 200 numbers is less, two are more
constexpr std::size_t kNumWorkers = 2;

/// Shards of tensors 0 and 1, which are float32: the first one whole, of the second one some, in two runs.
const std::vector<std::uint32_t> kSomeShards = {12, 13, 14, 15, 0, 2, 3, 4, 5};
const std::vector<std::uint32_t> kAllShards = {0, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1};

class GpuDirectAllReduceJob : public testing::Test {
 protected:
  GpuDirectAllReduceJob() {
    plan_ = makePlan(kGroup, kNumWorkers, someTensors(), kShardElements);
    cluster_.start().addToProxies(plan_);
  }

  /// Worker `rank` on a GPU of its own.
  std::unique_ptr<GpuWorker> makeWorker(std::size_t rank, double timeoutSeconds = kPatienceSeconds) {
    return std::make_unique<GpuWorker>(cluster_, plan_, rank, timeoutSeconds, nullptr, MappedMemory{},
                                       static_cast<int>(rank));
  }
  std::shared_ptr<nccl::Communicator> join(const nccl::UniqueId& id, std::size_t rank,
                                           const cuda::SharedContext& context) {
    return std::make_shared<nccl::Communicator>(library_, id, static_cast<int>(rank),
                                                static_cast<int>(kNumWorkers), context);
  }
  /// Has the worker's transfers, or only what it tells memory devices, take these shards by NCCL.
  void useDirectAllReduce(GpuWorker& worker, std::size_t rank,
                          const std::shared_ptr<nccl::Communicator>& communicator,
                          const std::vector<std::uint32_t>& shards) {
    std::vector<std::uint8_t> flags(plan_.shards.size());
    for (const std::uint32_t shard : shards) flags[shard] = kDirectAllReduce | kByNccl;
    cluster_.client(rank).setDirectAllReduceFlags(kGroup, flags);
    std::shared_ptr<GpuDirectAllReduce> directAllReduce;
    if (communicator != nullptr) {
      directAllReduce = std::make_shared<GpuDirectAllReduce>(communicator, cluster_.client(rank).plan(kGroup),
                                                             shards, kBucketBytes);
    }
    worker.transfers().useDirectAllReduce(directAllReduce, 0);
  }
  /// Runs function(worker, rank) for all workers, which have joined NCCL and take these shards.
  void forWorkers(const std::vector<std::uint32_t>& shards,
                  const std::function<void(GpuWorker&, std::size_t)>& function,
                  double timeoutSeconds = kPatienceSeconds) {
    const nccl::UniqueId id = library_->makeUniqueId();
    together(kNumWorkers, [&](std::size_t rank) {
      const auto worker = makeWorker(rank, timeoutSeconds);
      useDirectAllReduce(*worker, rank, join(id, rank, worker->context()), shards);
      function(*worker, rank);
    });
  }

  const Variable devices_{"STAND_IN_GPUS", "2"};
  const std::shared_ptr<nccl::Library> library_ = std::make_shared<nccl::Library>();
  Cluster cluster_{{kNumWorkers, 2, 1}};
  GroupPlan plan_;
  Memory gate_{4096};  // a word at which streams can be held
};

class GpuDirectAllReduceOf : public GpuDirectAllReduceJob,
                             public testing::WithParamInterface<std::vector<std::uint32_t>> {};

TEST_P(GpuDirectAllReduceOf, HasTheResultsOfAllStepAfterStep) {
  forWorkers(GetParam(), [](GpuWorker& worker, std::size_t) {
    for (std::uint32_t step = 1; step <= 20; ++step) {
      ASSERT_NO_FATAL_FAILURE(worker.step(step));
      ASSERT_NO_FATAL_FAILURE(worker.expectResults({0, 1}, step, kNumWorkers));
    }
    EXPECT_EQ(worker.transfers().waitForDirectAllReduce(), WaitStatus::kDone);
  });
}

TEST_P(GpuDirectAllReduceOf, CountsAWorkerWithoutAContributionAsZeros) {
  forWorkers(GetParam(), [&](GpuWorker& worker, std::size_t rank) {
    std::vector<GpuTensor> tensors;
    for (std::uint32_t tensor = 0; tensor < someTensors().size(); ++tensor) {
      worker.computeGradient(tensor, 1);
      tensors.push_back(worker.describe(tensor, rank == 0 ? std::uint8_t{kPresent} : std::uint8_t{0}));
    }
    ASSERT_EQ(worker.transfers().push(tensors, worker.compute().handle()), WaitStatus::kDone);
    ASSERT_EQ(worker.transfers().join(worker.compute().handle()), WaitStatus::kDone);
    ASSERT_NO_FATAL_FAILURE(worker.expectResults({0}, 1, kNumWorkers));
    ASSERT_EQ(cluster_.client(rank).pullAll(kGroup, kPatienceSeconds), WaitStatus::kDone);
    EXPECT_EQ(cluster_.client(rank).contributors(kGroup, 1), 1u);
  });
}

TEST_P(GpuDirectAllReduceOf, CanBeTakenUpAndGivenUpBetweenSteps) {
  const nccl::UniqueId id = library_->makeUniqueId();
  together(kNumWorkers, [&](std::size_t rank) {
    const auto worker = makeWorker(rank);
    const auto communicator = join(id, rank, worker->context());
    for (std::uint32_t step = 1; step <= 9; ++step) {
      useDirectAllReduce(*worker, rank, step % 3 == 0 ? nullptr : communicator,
                         step % 3 == 0 ? std::vector<std::uint32_t>{} : GetParam());
      ASSERT_NO_FATAL_FAILURE(worker->step(step));
      ASSERT_NO_FATAL_FAILURE(worker->expectResults({0, 1}, step, kNumWorkers));
      ASSERT_EQ(cluster_.client(rank).pullAll(kGroup, kPatienceSeconds), WaitStatus::kDone);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shards, GpuDirectAllReduceOf, testing::Values(kSomeShards, kAllShards),
                         [](const auto& info) { return info.index == 0 ? "Some" : "All"; });

TEST_F(GpuDirectAllReduceJob, GoesOnWithoutWaitingForTheGpu) {
  const auto word = reinterpret_cast<cuda::DeviceAddress>(gate_.data());
  std::atomic<std::size_t> numGiven{0};
  forWorkers(kSomeShards, [&](GpuWorker& worker, std::size_t) {
    worker.compute().waitValue(word, 1);
    for (std::uint32_t step = 1; step <= 2; ++step) ASSERT_NO_FATAL_FAILURE(worker.step(step));
    EXPECT_FALSE(worker.compute().isIdle());
    if (numGiven.fetch_add(1) + 1 == kNumWorkers)
      reinterpret_cast<std::atomic<std::uint32_t>*>(gate_.data())->store(1);
    ASSERT_NO_FATAL_FAILURE(worker.expectResults({0, 1}, 2, kNumWorkers));
  });
}

TEST_F(GpuDirectAllReduceJob, RefusesATensorTwiceInAStep) {
  forWorkers(kSomeShards, [](GpuWorker& worker, std::size_t) {
    worker.computeGradient(0, 1);
    ASSERT_EQ(worker.transfers().push({worker.describe(0)}, worker.compute().handle()), WaitStatus::kDone);
    EXPECT_THROW(worker.transfers().push({worker.describe(0)}, worker.compute().handle()), std::logic_error);
  });
}

TEST_F(GpuDirectAllReduceJob, EndsWhereAWorkerDoesNotCome) {
  forWorkers(
      kSomeShards,
      [](GpuWorker& worker, std::size_t rank) {
        if (rank == 1) return;
        ASSERT_NO_FATAL_FAILURE(worker.step(1));
        worker.compute().synchronize();
        EXPECT_EQ(worker.transfers().status(), WaitStatus::kTimedOut);
        EXPECT_EQ(worker.transfers().waitForDirectAllReduce(), WaitStatus::kTimedOut);
      },
      kMomentSeconds);
}

TEST_F(GpuDirectAllReduceJob, EndsWhereAWorkerComesToMemoryDevicesAlone) {
  const nccl::UniqueId id = library_->makeUniqueId();
  together(kNumWorkers, [&](std::size_t rank) {
    const auto worker = makeWorker(rank, rank == 0 ? kMomentSeconds : kPatienceSeconds);
    const auto communicator = join(id, rank, worker->context());
    useDirectAllReduce(*worker, rank, rank == 0 ? communicator : nullptr, kSomeShards);
    ASSERT_NO_FATAL_FAILURE(worker->step(1));
    worker->compute().synchronize();
    EXPECT_EQ(worker->transfers().status(), rank == 0 ? WaitStatus::kTimedOut : WaitStatus::kDone);
  });
}

TEST_F(GpuDirectAllReduceJob, EndsWithADeviceThatIsLost) {
  forWorkers(kSomeShards, [&](GpuWorker& worker, std::size_t rank) {
    if (rank == 1) return;
    ASSERT_NO_FATAL_FAILURE(worker.step(1));
    cluster_.loseDevice(1);
    worker.compute().synchronize();
    EXPECT_EQ(worker.transfers().status(), WaitStatus::kDeviceLost);
    EXPECT_EQ(worker.transfers().push({worker.describe(0)}, worker.compute().handle()),
              WaitStatus::kDeviceLost);
    EXPECT_EQ(worker.transfers().join(worker.compute().handle()), WaitStatus::kDeviceLost);
  });
}

TEST_F(GpuDirectAllReduceJob, TellsWhatNcclSays) {
  const nccl::UniqueId id = library_->makeUniqueId();
  together(kNumWorkers, [&](std::size_t rank) {
    const auto worker = makeWorker(rank);
    // As no two workers of COARSE do it: in different orders, which NCCL may take for anything.
    std::vector<std::uint32_t> shards = kAllShards;
    if (rank == 1) std::reverse(shards.begin(), shards.end());
    useDirectAllReduce(*worker, rank, join(id, rank, worker->context()), shards);
    try {
      for (const std::uint32_t tensor : {0u, 1u}) {
        worker->computeGradient(tensor, 1);
        worker->transfers().push({worker->describe(tensor)}, worker->compute().handle());
      }
      worker->transfers().join(worker->compute().handle());
      worker->compute().synchronize();
      worker->transfers().waitForDirectAllReduce();
      ADD_FAILURE() << "nothing was told";
    } catch (const nccl::Error& error) {
      for (const char* part : {"an operation of the communicator", "COARSE_DUAL_SYNC=off"})
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    worker->transfers().close();
  });
}

TEST_F(GpuDirectAllReduceJob, CanBeClosedInTheMiddleOfAStep) {
  forWorkers(kSomeShards, [](GpuWorker& worker, std::size_t rank) {
    if (rank == 1) return;
    ASSERT_NO_FATAL_FAILURE(worker.step(1));
    worker.transfers().close();
    worker.compute().synchronize();
  });
}

TEST_F(GpuDirectAllReduceJob, RefusesToEndAStepForWhichOthersWouldWait) {
  forWorkers(kSomeShards, [](GpuWorker& worker, std::size_t) {
    worker.computeGradient(0, 1);
    ASSERT_EQ(worker.transfers().push({worker.describe(0)}, worker.compute().handle()), WaitStatus::kDone);
    EXPECT_THROW(worker.transfers().join(worker.compute().handle()), std::logic_error);
  });
}

TEST_F(GpuDirectAllReduceJob, RefusesWhatNcclWouldRoundOrTakeTwice) {
  const auto context = std::make_shared<cuda::Context>(0);
  const auto alone = std::make_shared<nccl::Communicator>(library_, library_->makeUniqueId(), 0, 1, context);
  const auto refuses = [&](const std::vector<std::uint32_t>& shards) {
    EXPECT_THROW(GpuDirectAllReduce(alone, plan_, shards, kBucketBytes), std::invalid_argument);
  };
  refuses({static_cast<std::uint32_t>(plan_.shards.size())});
  refuses({1, 2, 1});
  const auto narrow = std::find_if(plan_.shards.begin(), plan_.shards.end(),
                                   [](const Shard& shard) { return shard.dtype == DType::kBFloat16; });
  refuses({static_cast<std::uint32_t>(narrow - plan_.shards.begin())});
}

}  // namespace
}  // namespace coarse::test::gpu_direct_allreduce_test
