/// Client and Proxy together: what was pushed comes back reduced, exactly, on every worker, in whatever
/// order.
#include "coarse/client/client.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "contributions.hpp"
#include "fixture.hpp"

namespace coarse::test::client_test {
namespace {

std::vector<std::size_t> everyClient(const ClusterShape& shape) {
  std::vector<std::size_t> clients(shape.numClients);
  std::iota(clients.begin(), clients.end(), std::size_t{0});
  return clients;
}

std::vector<std::uint32_t> shuffled(std::size_t count, std::uint64_t seed) {
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  return order;
}

constexpr Algorithm kAlgorithms[] = {Algorithm::kGather, Algorithm::kDirect, Algorithm::kRing,
                                     Algorithm::kNccl};

/// Tensors of every type, operation and algorithm, of one shard and of many.
std::vector<TensorSpec> variousTensors() {
  std::vector<TensorSpec> tensors;
  std::uint32_t numElements = 1;
  for (const Algorithm algorithm : kAlgorithms) {
    for (const DType dtype : kEveryDType) {
      for (const ReduceOp op : kEveryOp) {
        tensors.push_back({numElements, dtype, op, algorithm});
        numElements = numElements * 3 % 1009;
      }
    }
  }
  return tensors;
}

constexpr std::uint32_t kShardElements = 200;

std::size_t offsetOf(const GroupPlan& plan, std::uint32_t tensor) {
  const auto first = std::find_if(plan.shards.begin(), plan.shards.end(),
                                  [=](const Shard& shard) { return shard.tensor == tensor; });
  return first->offset;
}

/// One worker pushes and pulls tensors, and checks what comes back.
struct Worker {
  Cluster& cluster;
  std::size_t rank;
  std::uint32_t group;
  const std::vector<TensorSpec>& tensors;

  WaitStatus push(std::uint32_t tensor, std::uint32_t step, std::uint8_t flags = kPresent) const {
    const TensorSpec& spec = tensors[tensor];
    const Bytes data = contribution(spec.dtype, spec.numElements, rank, step);
    return cluster.client(rank).push(group, tensor, flags, data.data());
  }
  /// Pulls, and compares with the result of `present`.
  void pull(std::uint32_t tensor, std::uint32_t step, const std::vector<std::size_t>& present,
            std::uint32_t divisor) const {
    const TensorSpec& spec = tensors[tensor];
    Bytes data(spec.numElements * itemBytes(spec.dtype));
    ASSERT_EQ(cluster.client(rank).pull(group, tensor, data.data(), kPatienceSeconds), WaitStatus::kDone)
        << "tensor " << tensor << " at step " << step << " on worker " << rank;
    ASSERT_TRUE(data == result(spec.dtype, spec.op, spec.numElements, present, step, divisor))
        << "tensor " << tensor << " at step " << step << " on worker " << rank;
    ASSERT_EQ(cluster.client(rank).contributors(group, tensor), present.size());
  }
};

class Jobs : public testing::TestWithParam<ClusterShape> {
 protected:
  std::size_t numClients() const { return GetParam().numClients; }
  std::uint32_t divisor() const { return static_cast<std::uint32_t>(numClients()); }
  Cluster cluster_{GetParam()};
};

TEST_P(Jobs, ManyTensorsPushedAndPulledInOrdersOfTheirOwn) {
  const std::vector<TensorSpec> tensors = variousTensors();
  cluster_.start().addGroup(makePlan(1, numClients(), tensors, kShardElements));
  const std::vector<std::size_t> all = everyClient(GetParam());
  together(numClients(), [&](std::size_t rank) {
    const Worker worker{cluster_, rank, 1, tensors};
    for (std::uint32_t step = 1; step <= 6; ++step) {
      for (const std::uint32_t tensor : shuffled(tensors.size(), 100 * rank + step))
        ASSERT_EQ(worker.push(tensor, step), WaitStatus::kDone);
      for (const std::uint32_t tensor : shuffled(tensors.size(), 200 * rank + step))
        ASSERT_NO_FATAL_FAILURE(worker.pull(tensor, step, all, divisor()));
    }
  });
}

TEST_P(Jobs, OneTensorStepAfterStep) {
  for (const Algorithm algorithm : kAlgorithms) {
    const std::vector<TensorSpec> tensors = {{777, DType::kFloat32, ReduceOp::kMean, algorithm}};
    Cluster cluster(GetParam());
    cluster.start().addGroup(makePlan(1, numClients(), tensors, kShardElements));
    const std::vector<std::size_t> all = everyClient(GetParam());
    together(numClients(), [&](std::size_t rank) {
      const Worker worker{cluster, rank, 1, tensors};
      for (std::uint32_t step = 1; step <= 60; ++step) {
        ASSERT_EQ(worker.push(0, step), WaitStatus::kDone);
        ASSERT_NO_FATAL_FAILURE(worker.pull(0, step, all, divisor()));
      }
    });
  }
}

TEST_P(Jobs, PullAllWaitsForEverythingThatWasPushed) {
  const std::vector<TensorSpec> tensors = variousTensors();
  const GroupPlan plan = makePlan(1, numClients(), tensors, kShardElements);
  cluster_.start().addToProxies(plan);
  const std::vector<std::size_t> all = everyClient(GetParam());
  together(numClients(), [&](std::size_t rank) {
    const std::shared_ptr<Mapping> slots = cluster_.addToClient(plan, rank);
    const Worker worker{cluster_, rank, 1, tensors};
    for (std::uint32_t step = 1; step <= 3; ++step) {
      for (const std::uint32_t tensor : shuffled(tensors.size(), 100 * rank + step))
        ASSERT_EQ(worker.push(tensor, step), WaitStatus::kDone);
      ASSERT_EQ(cluster_.client(rank).pullAll(1, kPatienceSeconds), WaitStatus::kDone);
      for (const Shard& shard : plan.shards) {
        const TensorSpec& spec = tensors[shard.tensor];
        const Bytes expected = result(spec.dtype, spec.op, spec.numElements, all, step, divisor());
        const std::size_t start = shard.offset - offsetOf(plan, shard.tensor);
        ASSERT_EQ(std::memcmp(slots->data() + shard.offset, expected.data() + start,
                              shard.numElements * itemBytes(shard.dtype)),
                  0);
      }
    }
    EXPECT_EQ(cluster_.client(rank).allContributors(1),
              std::vector<std::uint32_t>(tensors.size(), divisor()));
  });
}

TEST_P(Jobs, BuffersOfAnyTypeAndLengthPassThroughDynamicShards) {
  for (const Algorithm algorithm : kAlgorithms) {
    Cluster cluster(GetParam());
    cluster.start().addGroup(makeDynamicPlan(1, numClients(), 3, 512, algorithm));
    const std::vector<std::size_t> all = everyClient(GetParam());
    together(numClients(), [&](std::size_t rank) {
      std::uint32_t step = 0;
      for (const DType dtype : kEveryDType) {
        for (const ReduceOp op : kEveryOp) {
          for (const std::size_t numElements : {0, 1, 63, 64, 65, 2001}) {
            ++step;
            Bytes buffer = contribution(dtype, numElements, rank, step);
            ASSERT_EQ(cluster.client(rank).allReduce(1, buffer.data(), numElements, dtype, op, true,
                                                     kPatienceSeconds),
                      WaitStatus::kDone);
            ASSERT_TRUE(buffer == result(dtype, op, numElements, all, step, divisor()))
                << numElements << " of dtype " << static_cast<int>(dtype) << ", op " << static_cast<int>(op);
          }
        }
      }
    });
  }
}

TEST_P(Jobs, AbsentAndJoinedContributions) {
  // Worker 0 gives nothing in odd steps, and has run out of inputs after step 4.
  std::vector<std::size_t> others = everyClient(GetParam());
  others.erase(others.begin());
  const std::vector<TensorSpec> tensors = variousTensors();
  cluster_.start().addGroup(makePlan(1, numClients(), tensors, kShardElements));
  together(numClients(), [&](std::size_t rank) {
    const Worker worker{cluster_, rank, 1, tensors};
    for (std::uint32_t step = 1; step <= 6; ++step) {
      const bool isOut = step > 4, isAbsent = isOut || step % 2 == 1;
      std::uint8_t flags = kPresent;
      if (rank == 0 && isAbsent) flags = 0;
      if (rank == 0 && isOut) flags = kJoined;
      for (const std::uint32_t tensor : shuffled(tensors.size(), 100 * rank + step))
        ASSERT_EQ(worker.push(tensor, step, flags), WaitStatus::kDone);
      const std::vector<std::size_t> present = isAbsent ? others : everyClient(GetParam());
      if (present.empty()) {
        ASSERT_EQ(cluster_.client(rank).pullAll(1, kPatienceSeconds), WaitStatus::kDone);
        continue;
      }
      for (std::uint32_t tensor = 0; tensor < tensors.size(); ++tensor)
        ASSERT_NO_FATAL_FAILURE(worker.pull(tensor, step, present, isOut ? divisor() - 1 : divisor()));
    }
  });
}

TEST_P(Jobs, AnAbsentWorkerGetsTheResultOfADynamicShard) {
  cluster_.start().addGroup(makeDynamicPlan(1, numClients(), 2, 256, Algorithm::kDirect));
  together(numClients(), [&](std::size_t rank) {
    const std::size_t giver = numClients() - 1;
    Bytes buffer = contribution(DType::kInt64, 999, rank, 1);
    ASSERT_EQ(cluster_.client(rank).allReduce(1, buffer.data(), 999, DType::kInt64, ReduceOp::kSum,
                                              rank == giver, kPatienceSeconds),
              WaitStatus::kDone);
    EXPECT_TRUE(buffer == contribution(DType::kInt64, 999, giver, 1));
  });
}

TEST_P(Jobs, GroupsComeAndGoWhileOthersRun) {
  constexpr std::uint32_t kNumVisitors = 8, kStepsBetween = 4, kFirstVisitor = 100;
  const std::vector<TensorSpec> residents = variousTensors();
  const std::vector<TensorSpec> visitors = {{300, DType::kFloat32, ReduceOp::kSum, Algorithm::kRing},
                                            {7, DType::kInt32, ReduceOp::kMax, Algorithm::kGather},
                                            {900, DType::kFloat64, ReduceOp::kMean, Algorithm::kDirect}};
  cluster_.start().addGroup(makePlan(1, numClients(), residents, kShardElements));
  const std::vector<std::size_t> all = everyClient(GetParam());
  std::atomic<std::uint32_t> numCome{0};
  std::vector<std::atomic<std::size_t>> numReleased(kNumVisitors);
  const auto work = [&](std::size_t rank) {
    for (std::uint32_t step = 1; step <= kNumVisitors * kStepsBetween; ++step) {
      const Worker worker{cluster_, rank, 1, residents};
      for (std::uint32_t tensor = step % 5; tensor < residents.size(); tensor += 5)
        ASSERT_EQ(worker.push(tensor, 1 + (step - 1) / 5), WaitStatus::kDone);
      for (std::uint32_t tensor = step % 5; tensor < residents.size(); tensor += 5)
        ASSERT_NO_FATAL_FAILURE(worker.pull(tensor, 1 + (step - 1) / 5, all, divisor()));
      if (step % kStepsBetween != 0) continue;
      const std::uint32_t visit = step / kStepsBetween - 1;
      ASSERT_TRUE(eventually([&] { return numCome.load(std::memory_order_acquire) > visit; }));
      const GroupPlan plan = makePlan(kFirstVisitor + visit, numClients(), visitors, kShardElements);
      cluster_.addToClient(plan, rank);
      const Worker visitor{cluster_, rank, plan.id, visitors};
      for (const std::uint32_t tensor : shuffled(visitors.size(), rank))
        ASSERT_EQ(visitor.push(tensor, 1), WaitStatus::kDone);
      for (std::uint32_t tensor = 0; tensor < visitors.size(); ++tensor)
        ASSERT_NO_FATAL_FAILURE(visitor.pull(tensor, 1, all, divisor()));
      cluster_.client(rank).removeGroup(plan.id);
      numReleased[visit].fetch_add(1, std::memory_order_release);
    }
  };
  together(numClients() + 1, [&](std::size_t thread) {
    if (thread < numClients()) return work(thread);
    for (std::uint32_t visit = 0; visit < kNumVisitors; ++visit) {
      cluster_.addToProxies(makePlan(kFirstVisitor + visit, numClients(), visitors, kShardElements));
      numCome.store(visit + 1, std::memory_order_release);
      ASSERT_TRUE(
          eventually([&] { return numReleased[visit].load(std::memory_order_acquire) == numClients(); }));
      cluster_.removeFromProxies(kFirstVisitor + visit);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, Jobs,
                         testing::Values(ClusterShape{1, 1, 1}, ClusterShape{1, 3, 2}, ClusterShape{2, 1, 1},
                                         ClusterShape{2, 1, 2}, ClusterShape{2, 2, 1}, ClusterShape{2, 2, 2},
                                         ClusterShape{3, 2, 1}, ClusterShape{3, 3, 2}, ClusterShape{4, 1, 2},
                                         ClusterShape{4, 3, 1}, kDeferred<1, 1, 1>, kDeferred<2, 1, 2>,
                                         kDeferred<3, 2, 1>),
                         nameOf);

// ---- waiting ----

class Waiting : public testing::Test {
 protected:
  Waiting() { cluster_.start().addGroup(makePlan(1, 2, tensors_)); }
  /// Returns how worker 0's wait for a tensor that worker 1 holds back ends, once `disturb` has run during
  /// it.
  template <typename Disturb>
  WaitStatus endOfWait(Disturb disturb) {
    EXPECT_EQ(worker(0).push(0, 1), WaitStatus::kDone);
    WaitStatus status = WaitStatus::kDone;
    together(2, [&](std::size_t thread) {
      if (thread == 0) {
        status = cluster_.client(0).pull(1, 0, nullptr, kPatienceSeconds);
      } else {
        EXPECT_TRUE(eventually([&] { return cluster_.inbox(0).sleeping.load() != 0; }));
        disturb();
      }
    });
    return status;
  }
  Worker worker(std::size_t rank) { return {cluster_, rank, 1, tensors_}; }

  const std::vector<TensorSpec> tensors_{{100}, {200}};
  Cluster cluster_{ClusterShape{2, 2, 1}};
};

TEST_F(Waiting, EndsAtTheTimeoutAndCanGoOn) {
  ASSERT_EQ(worker(0).push(0, 1), WaitStatus::kDone);
  EXPECT_EQ(cluster_.client(0).pull(1, 0, nullptr, kMomentSeconds), WaitStatus::kTimedOut);
  EXPECT_EQ(cluster_.client(0).pullAll(1, kMomentSeconds), WaitStatus::kTimedOut);
  EXPECT_TRUE(cluster_.client(0).isLate(1, 0));
  EXPECT_FALSE(cluster_.client(0).isLate(1, 1)) << "never pushed";
  EXPECT_EQ(cluster_.client(0).missingClients(1, 0), std::vector<std::size_t>{1});
  EXPECT_EQ(cluster_.client(1).clientsAhead(1, 0), std::vector<std::size_t>{0});
  EXPECT_TRUE(cluster_.client(0).clientsAhead(1, 0).empty());
  ASSERT_EQ(worker(1).push(0, 1), WaitStatus::kDone);
  cluster_.client(1).flush();
  worker(0).pull(0, 1, {0, 1}, 2);
  EXPECT_FALSE(cluster_.client(0).isLate(1, 0));
  EXPECT_TRUE(cluster_.client(0).missingClients(1, 0).empty());
}

TEST_F(Waiting, WakesWhenTheLastWorkerPushes) {
  EXPECT_EQ(endOfWait([&] {
              EXPECT_EQ(worker(1).push(0, 1), WaitStatus::kDone);
              cluster_.client(1).flush();
            }),
            WaitStatus::kDone);
}

TEST_F(Waiting, EndsWhenAMemoryDeviceAbortsTheClient) {
  EXPECT_EQ(endOfWait([&] { cluster_.proxy(0).abort({0}); }), WaitStatus::kAborted);
  EXPECT_EQ(cluster_.client(0).pull(1, 0, nullptr, kPatienceSeconds), WaitStatus::kAborted) << "for good";
}

TEST_F(Waiting, EndsWhenAMemoryDeviceClosesItsSocketAndNamesIt) {
  EXPECT_EQ(endOfWait([&] { cluster_.loseDevice(1); }), WaitStatus::kDeviceLost);
  EXPECT_EQ(cluster_.client(0).lostDevice(), 1u);
}

TEST_F(Waiting, WhatIsCompleteIsPulledEvenAfterAnAbort) {
  for (const std::size_t rank : {0, 1}) {
    ASSERT_EQ(worker(rank).push(0, 1), WaitStatus::kDone);
    cluster_.client(rank).flush();
  }
  ASSERT_TRUE(eventually([&] { return !cluster_.client(0).isLate(1, 0); }));
  cluster_.proxy(0).abort({0});
  worker(0).pull(0, 1, {0, 1}, 2);
}

TEST_F(Waiting, EndsAlsoIfEverybodyGoesOnAfterAnAbort) {
  cluster_.proxy(0).abort({0});
  for (const std::size_t rank : {0, 1}) {
    ASSERT_EQ(worker(rank).push(0, 1), WaitStatus::kDone);
    cluster_.client(rank).flush();
  }
  EXPECT_EQ(cluster_.client(0).pull(1, 0, nullptr, kPatienceSeconds), WaitStatus::kAborted);
}

TEST(AbortedSession, EndsAnUpdateByMeansThatSomeHaveBegun) {
  GroupPlan plan = makePlan(1, 2, {{100, DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect}});
  plan.hasOptimizer = true;
  Cluster cluster(ClusterShape{2, 1, 1});
  cluster.start().addGroup(plan);
  for (const std::size_t client : {0, 1}) cluster.settings(plan, client)->rule = UpdateRule::kSgd;
  cluster.proxy(0).abort({0, 1});
  for (const std::size_t client : {0, 1}) {
    ASSERT_EQ(cluster.client(client).push(1, 0, kPresent | kUpdate | kReduced, nullptr), WaitStatus::kDone);
    cluster.client(client).flush();
  }
  EXPECT_TRUE(eventually([&] { return !cluster.client(0).isLate(1, 0); }));
}

/// A client whose memory devices never run.
class LonelyClient : public testing::Test {
 protected:
  Cluster cluster_{ClusterShape{1, 1, 1}};
};

TEST(InterruptedClient, ThrowsOutOfItsWait) {
  const Memory segment(ClientSegment::numBytes(1)), doorbells(sizeof(Doorbell));
  Client client(ClientConfig(), segment.fd, doorbells.fd, [] { throw std::runtime_error("Ctrl-C"); });
  const GroupPlan plan = makePlan(1, 1, {{100}});
  const Memory control(GroupControl::numBytes(1, 1)), slots(plan.slotBytes);
  client.addGroup(plan, 0, control.fd, slots.fd, {0});
  ASSERT_EQ(client.push(1, 0, kPresent, nullptr), WaitStatus::kDone);
  EXPECT_THROW(client.pull(1, 0, nullptr, kPatienceSeconds), std::runtime_error);
}

TEST_F(LonelyClient, AFullQueueHoldsThePusherUntilTheSessionIsAborted) {
  const GroupPlan plan = makePlan(1, 1, {{kDescriptorCapacity + 1, DType::kUInt8}}, 1);
  cluster_.addGroup(plan);
  cluster_.proxy(0).abort({0});
  EXPECT_EQ(cluster_.client(0).push(1, 0, kPresent, nullptr), WaitStatus::kAborted);
}

TEST_F(LonelyClient, AFullQueueGoesOnWhenTheDeviceDoes) {
  const GroupPlan plan = makePlan(1, 1, {{2 * kDescriptorCapacity + 1, DType::kUInt8}}, 1);
  cluster_.addGroup(plan);
  together(2, [&](std::size_t thread) {
    if (thread == 0) {
      ASSERT_EQ(cluster_.client(0).push(1, 0, kPresent, nullptr), WaitStatus::kDone);
      ASSERT_EQ(cluster_.client(0).pull(1, 0, nullptr, kPatienceSeconds), WaitStatus::kDone);
    } else {
      const DescriptorCell& last = cluster_.queue(0, 0).cells[kDescriptorCapacity - 1];
      EXPECT_TRUE(eventually([&] { return last.commit.load() == kDescriptorCapacity; }));
      cluster_.start();
    }
  });
}

TEST_F(LonelyClient, AForkedChildIsTurnedAway) {
  cluster_.addGroup(makePlan(1, 1, {{100}}));
  const pid_t child = ::fork();
  if (child == 0) {
    Client& client = cluster_.client(0);
    const bool isTurnedAway =
        client.push(1, 0, kPresent, nullptr) == WaitStatus::kForked &&
        client.pull(1, 0, nullptr, 0) == WaitStatus::kForked && client.pullAll(1, 0) == WaitStatus::kForked &&
        client.allReduce(1, nullptr, 0, DType::kUInt8, ReduceOp::kSum, true, 0) == WaitStatus::kForked;
    ::_exit(isTurnedAway ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// ---- what a client refuses ----

TEST_F(LonelyClient, RefusesWhatDoesNotExist) {
  Client& client = cluster_.client(0);
  EXPECT_THROW(client.push(1, 0, kPresent, nullptr), std::invalid_argument) << "no such group";
  cluster_.addGroup(makePlan(1, 1, {{100}}));
  EXPECT_THROW(client.push(1, 1, kPresent, nullptr), std::invalid_argument) << "no such tensor";
  EXPECT_THROW(client.pull(1, 1, nullptr, 0), std::invalid_argument);
  client.removeGroup(1);
  EXPECT_THROW(client.pull(1, 0, nullptr, 0), std::invalid_argument) << "closed";
}

TEST_F(LonelyClient, RefusesAPushBeforeTheLastPull) {
  cluster_.start().addGroup(makePlan(1, 1, {{100}}));
  Client& client = cluster_.client(0);
  ASSERT_EQ(client.push(1, 0, kPresent, nullptr), WaitStatus::kDone);
  EXPECT_THROW(client.push(1, 0, kPresent, nullptr), std::logic_error);
  ASSERT_EQ(client.pull(1, 0, nullptr, kPatienceSeconds), WaitStatus::kDone);
  EXPECT_EQ(client.push(1, 0, kPresent, nullptr), WaitStatus::kDone);
}

TEST_F(LonelyClient, RefusesRoutesAndMemoryThatDoNotFit) {
  const GroupPlan plan = makePlan(1, 1, {{100}});
  cluster_.addToProxies(plan);
  EXPECT_THROW(cluster_.addToClient(plan, 0, {}), std::invalid_argument) << "a shard without a route";
  EXPECT_THROW(cluster_.addToClient(plan, 0, {1}), std::invalid_argument) << "there is one device";
  const Memory control(GroupControl::numBytes(1, 1)), small(plan.slotBytes - 1);
  EXPECT_THROW(cluster_.client(0).addGroup(plan, 0, control.fd, small.fd, {0}), std::invalid_argument);
}

TEST_F(LonelyClient, KeepsSlotsMappedForWhoStillHoldsThem) {
  const GroupPlan plan = makePlan(1, 1, {{100}});
  cluster_.addToProxies(plan);
  const std::shared_ptr<Mapping> slots = cluster_.addToClient(plan, 0);
  cluster_.client(0).removeGroup(1);
  slots->data()[0] = std::byte{1};
  EXPECT_EQ(slots->data()[0], std::byte{1});
}

}  // namespace
}  // namespace coarse::test::client_test
