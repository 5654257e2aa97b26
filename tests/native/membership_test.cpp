/// Lost clients: memory devices stand in for them, so that the others go on (docs/design/membership.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "contributions.hpp"
#include "fixture.hpp"

namespace coarse::test::membership_test {
namespace {

constexpr std::uint32_t kGroup = 1;

using Clients = std::vector<std::size_t>;

/// Memory devices that stand in for clients when the test says that these have ended.
class Job {
 public:
  Job(const ClusterShape& shape, GroupPlan groupPlan) : plan(std::move(groupPlan)), cluster(shape) {
    cluster.addGroup(plan);
  }
  void push(std::size_t client, std::uint32_t tensor, std::uint32_t step, std::uint8_t flags = kPresent) {
    const TensorShape shape = shapeOf(tensor);
    const Bytes given = contribution(shape.dtype, shape.numElements, client, step);
    ASSERT_EQ(cluster.client(client).push(kGroup, tensor, flags, given.data()), WaitStatus::kDone);
    cluster.client(client).flush();
  }
  void pull(std::size_t client, std::uint32_t tensor) {
    ASSERT_EQ(cluster.client(client).pull(kGroup, tensor, nullptr, kPatienceSeconds), WaitStatus::kDone);
  }
  /// The result in a client's slot; those of `clients` give it with this divisor.
  void expectResult(std::size_t client, std::uint32_t tensor, std::uint32_t step, const Clients& clients) {
    EXPECT_TRUE(isResult(client, tensor, step, clients)) << "tensor " << tensor << " of client " << client;
    EXPECT_EQ(cluster.client(client).contributors(kGroup, tensor), clients.size());
  }
  bool isResult(std::size_t client, std::uint32_t tensor, std::uint32_t step, const Clients& clients) {
    const TensorShape shape = shapeOf(tensor);
    const Bytes expected = result(shape.dtype, shape.op, shape.numElements, clients, step,
                                  static_cast<std::uint32_t>(clients.size()));
    const std::byte* slot = cluster.slots(plan, client) + shape.offset;
    return std::memcmp(slot, expected.data(), expected.size()) == 0;
  }
  /// The devices' control threads learn that the process of a client has ended.
  void end(std::size_t client) {
    for (std::size_t device = 0; device < numDevices(); ++device) cluster.proxy(device).clientEnded(client);
  }
  void awaitDrained(std::size_t client) {
    for (std::size_t device = 0; device < numDevices(); ++device) {
      Clients drained;
      ASSERT_TRUE(eventually([&] {
        const Clients more = cluster.proxy(device).takeDrained();
        drained.insert(drained.end(), more.begin(), more.end());
        return !drained.empty();
      }));
      ASSERT_EQ(drained, Clients{client});
    }
  }
  void standIn(std::size_t client) {
    for (std::size_t device = 0; device < numDevices(); ++device) cluster.proxy(device).standInFor(client);
  }
  void lose(std::size_t client) {
    end(client);
    awaitDrained(client);
    standIn(client);
  }
  void expectNoEvents() {
    for (std::size_t device = 0; device < numDevices(); ++device) {
      for (const ProxyEvent& event : cluster.proxy(device).takeEvents())
        ADD_FAILURE() << "device " << device << " reports of client " << event.client << ": "
                      << event.message;
    }
  }

  GroupPlan plan;
  Cluster cluster;

 private:
  struct TensorShape {
    std::uint32_t numElements = 0;
    DType dtype = DType::kFloat32;
    ReduceOp op = ReduceOp::kSum;
    std::uint64_t offset = 0;
  };
  TensorShape shapeOf(std::uint32_t tensor) const {
    TensorShape shape;
    for (const Shard& shard : plan.shards) {
      if (shard.tensor != tensor) continue;
      if (shape.numElements == 0) shape = {0, shard.dtype, shard.op, shard.offset};
      shape.numElements += shard.numElements;
    }
    return shape;
  }
  std::size_t numDevices() const { return cluster.shape().numDevices; }
};

/// A large and a small tensor.
GroupPlan twoTensors(std::size_t numClients, ReduceOp op = ReduceOp::kMean) {
  return makePlan(
      kGroup, numClients,
      {{40'000, DType::kFloat32, op, Algorithm::kDirect}, {33, DType::kFloat32, op, Algorithm::kGather}},
      16'384);
}

class LostClient : public testing::TestWithParam<ClusterShape> {};

TEST_P(LostClient, IsAbsentFromStepsToWhichItHasNotContributed) {
  const std::size_t numClients = GetParam().numClients;
  for (const bool isEarly : {true, false}) {
    for (std::size_t lost = 0; lost < numClients; ++lost) {
      Job job(GetParam(), twoTensors(numClients));
      job.cluster.start();
      Clients others;
      for (std::size_t client = 0; client < numClients; ++client) {
        if (client != lost) others.push_back(client);
      }
      if (isEarly) job.lose(lost);
      for (std::uint32_t step = 1; step <= 3; ++step) {
        for (const std::size_t client : others) {
          for (const std::uint32_t tensor : {0, 1}) job.push(client, tensor, step);
        }
        if (!isEarly && step == 1) job.lose(lost);
        for (const std::size_t client : others) {
          for (const std::uint32_t tensor : {0, 1}) {
            job.pull(client, tensor);
            job.expectResult(client, tensor, step, others);
          }
          EXPECT_EQ(job.cluster.client(client).standIns(kGroup), Clients{lost});
        }
      }
      job.expectNoEvents();
    }
  }
}

TEST_P(LostClient, CountsWhereItHasContributed) {
  const std::size_t numClients = GetParam().numClients;
  Job job(GetParam(), twoTensors(numClients));
  Clients all(numClients);
  std::iota(all.begin(), all.end(), 0);
  const Clients others(all.begin() + 1, all.end());
  job.push(0, 1, 1);  // no device takes it before it starts, and then the client has ended
  job.end(0);
  job.cluster.start();
  job.awaitDrained(0);
  job.standIn(0);
  for (const std::size_t client : others) {
    for (const std::uint32_t tensor : {0, 1}) job.push(client, tensor, 1);
  }
  for (const std::size_t client : others) {
    for (const std::uint32_t tensor : {0, 1}) job.pull(client, tensor);
    job.expectResult(client, 0, 1, others);
    job.expectResult(client, 1, 1, all);
    EXPECT_EQ(job.cluster.client(client).standIns(kGroup), Clients{0});
  }
  job.expectNoEvents();
}

TEST_P(LostClient, IsWaitedForUntilAllDevicesHaveTakenItsContributions) {
  Job job(GetParam(), twoTensors(GetParam().numClients));
  job.cluster.start();
  for (std::size_t client = 1; client < GetParam().numClients; ++client) job.push(client, 1, 1);
  job.end(0);
  job.awaitDrained(0);
  EXPECT_EQ(job.cluster.client(1).pull(kGroup, 1, nullptr, kMomentSeconds), WaitStatus::kTimedOut);
  job.standIn(0);
  job.pull(1, 1);
}

TEST_P(LostClient, IsStoodInForInGroupsThatAreAddedLater) {
  const std::size_t numClients = GetParam().numClients;
  Job job(GetParam(), twoTensors(numClients));
  job.cluster.start();
  job.lose(0);
  GroupPlan later = makeDynamicPlan(kGroup + 1, numClients, 4, 4096, Algorithm::kDirect);
  job.cluster.addGroup(later);
  together(numClients - 1, [&](std::size_t i) {
    std::vector<float> values(10'000, static_cast<float>(1 << (i + 1)));
    EXPECT_EQ(job.cluster.client(i + 1).allReduce(later.id, values.data(), values.size(), DType::kFloat32,
                                                  ReduceOp::kSum, true, kPatienceSeconds),
              WaitStatus::kDone);
    const auto sum = static_cast<float>((1 << numClients) - 2);
    EXPECT_EQ(std::count(values.begin(), values.end(), sum), 10'000);
  });
  job.expectNoEvents();
}

TEST_P(LostClient, LeavesABufferIncompleteThatOnlyItHad) {
  const std::size_t numClients = GetParam().numClients;
  const GroupPlan buffers = makeDynamicPlan(kGroup, numClients, 4, 4096, Algorithm::kDirect);
  Job job(GetParam(), buffers);
  job.cluster.start();
  job.lose(0);
  together(numClients - 1, [&](std::size_t i) {
    std::vector<float> values(10'000, 3.F);
    const auto reduce = [&](bool isPresent) {
      return job.cluster.client(i + 1).allReduce(kGroup, values.data(), values.size(), DType::kFloat32,
                                                 ReduceOp::kSum, isPresent, kPatienceSeconds);
    };
    EXPECT_EQ(reduce(false), WaitStatus::kNoContribution);
    EXPECT_EQ(std::count(values.begin(), values.end(), 3.F), 10'000) << "nothing was written";
    EXPECT_EQ(reduce(i == 0), WaitStatus::kDone) << "all are at the same step";
    EXPECT_EQ(std::count(values.begin(), values.end(), 3.F), 10'000);
  });
}

TEST_P(LostClient, LeavesATensorWithoutAContributionOfWhichOnlyItHasPushedSomeShards) {
  const std::size_t numClients = GetParam().numClients;
  Job job(GetParam(), twoTensors(numClients));
  job.cluster.start();
  const ShardRange whole = job.cluster.client(0).beginPush(kGroup, 0);
  ASSERT_GT(whole.last, whole.first + 1);
  for (std::size_t client = 1; client < numClients; ++client) job.push(client, 0, 1, 0);
  ASSERT_EQ(job.cluster.client(0).post(kGroup, {whole.first, whole.first + 1, 1}, kPresent),
            WaitStatus::kDone);
  job.lose(0);
  for (std::size_t client = 1; client < numClients; ++client) {
    job.pull(client, 0);
    EXPECT_EQ(job.cluster.client(client).contributors(kGroup, 0), 0U);
    EXPECT_EQ(job.cluster.client(client).allContributors(kGroup)[0], 0U);
  }
}

/// The numbers, twice as large.
Bytes doubled(DType dtype, Bytes numbers) {
  const std::size_t count = numbers.size() / itemBytes(dtype);
  if (dtype == DType::kFloat64) {
    for (std::size_t i = 0; i < count; ++i) {
      double number = 0;
      std::memcpy(&number, numbers.data() + i * sizeof number, sizeof number);
      number *= 2;
      std::memcpy(numbers.data() + i * sizeof number, &number, sizeof number);
    }
    return numbers;
  }
  std::vector<float> wide(count);
  widen(dtype, numbers.data(), wide.data(), count);
  for (float& number : wide) number *= 2;
  narrow(dtype, wide.data(), numbers.data(), count, 1, ReduceOp::kSum);
  return numbers;
}

TEST_P(LostClient, LeavesToTheOthersItsWeightOfTheShardsToWhichItHasNotContributed) {
  constexpr std::uint32_t kElements = 5000, kShardElements = 2000;
  const std::size_t numClients = GetParam().numClients;
  Clients all(numClients);
  std::iota(all.begin(), all.end(), 0);
  const Clients others(all.begin() + 1, all.end());
  std::vector<double> weights(numClients, 0.25);
  weights[0] *= static_cast<double>(others.size());  // half of all
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    Job job(GetParam(), makePlan(kGroup, numClients, {{kElements, dtype, ReduceOp::kSum}}, kShardElements));
    job.cluster.start();
    const Bytes given = contribution(dtype, kElements, 0, 1);
    std::memcpy(job.cluster.slots(job.plan, 0), given.data(), given.size());
    job.cluster.client(0).beginPush(kGroup, 0);
    ASSERT_EQ(job.cluster.client(0).post(kGroup, {0, 1, 1}, kPresent), WaitStatus::kDone);
    for (const std::size_t client : others) job.push(client, 0, 1);
    job.lose(0);
    const std::size_t endOfFirst = kShardElements * itemBytes(dtype);
    const auto divisor = static_cast<std::uint32_t>(numClients);
    Bytes expected = result(dtype, ReduceOp::kSum, kElements, all, 1, divisor);
    const Bytes rest = doubled(dtype, result(dtype, ReduceOp::kSum, kElements, others, 1, divisor));
    std::copy(rest.begin() + endOfFirst, rest.end(), expected.begin() + endOfFirst);
    for (const std::size_t client : others) {
      Bytes sum(given.size());
      ASSERT_EQ(job.cluster.client(client).pull(kGroup, 0, sum.data(), kPatienceSeconds), WaitStatus::kDone);
      job.cluster.client(client).compensateForLost(kGroup, 0, sum.data(), {weights.data(), numClients});
      EXPECT_TRUE(sum == expected) << "client " << client << ", dtype " << static_cast<int>(dtype);
      EXPECT_THROW(job.cluster.client(client).compensateForLost(kGroup, 0, sum.data(), {weights.data(), 1}),
                   std::invalid_argument);
    }
  }
}

TEST_P(LostClient, IsNoReasonToReportOneThatLeaves) {
  Job job(GetParam(), twoTensors(GetParam().numClients));
  job.cluster.start();
  for (std::size_t client = 0; client < GetParam().numClients; ++client) job.push(client, 0, 1);
  for (std::size_t client = 0; client < GetParam().numClients; ++client) job.pull(client, 0);
  job.push(0, 0, 2);  // a step that no other client takes
  job.lose(0);
  for (std::size_t device = 0; device < GetParam().numDevices; ++device)
    job.cluster.proxy(device).clientLeft(1);
  job.expectNoEvents();
  // With one that lives it is a reason.
  job.push(GetParam().numClients - 1, 1, 1);
  std::size_t numEvents = 0;
  EXPECT_TRUE(eventually([&] {
    for (std::size_t device = 0; device < GetParam().numDevices; ++device)
      numEvents += job.cluster.proxy(device).takeEvents().size();
    return numEvents > 0;
  }));
}

// Devices stand in at the same time, while contributions arrive at all of them.
TEST_P(LostClient, LeavesTheOthersWithEqualResultsWhenItEndsAtAnyTime) {
  constexpr std::uint32_t kSteps = 40;
  const std::size_t numClients = GetParam().numClients;
  std::mt19937 random(7);
  for (int round = 0; round < 6; ++round) {
    Job job(GetParam(), twoTensors(numClients, round % 2 == 0 ? ReduceOp::kMean : ReduceOp::kSum));
    job.cluster.start();
    const std::size_t lost = random() % numClients;
    const std::uint32_t numPushed =
        random() % (2 * kSteps - 4);                    // by the lost one, of the tensors of all steps
    std::vector<std::vector<bool>> isWith(numClients);  // whether a result is with the lost one
    const auto train = [&](std::size_t client, std::uint32_t numPushes) {
      for (std::uint32_t step = 1, pushed = 0; step <= kSteps; ++step) {
        for (const std::uint32_t tensor : {0, 1}) {
          if (pushed++ == numPushes) return;
          job.push(client, tensor, step);
        }
        for (const std::uint32_t tensor : {0, 1}) job.pull(client, tensor);
        // Whether or not others have pushed the next step.
        if (client != lost) {
          EXPECT_EQ(job.cluster.client(client).standIns(kGroup),
                    step <= (numPushed + 1) / 2 ? Clients{} : Clients{lost});
        }
        Clients all(numClients), others;
        std::iota(all.begin(), all.end(), 0);
        std::copy_if(all.begin(), all.end(), std::back_inserter(others), [&](auto c) { return c != lost; });
        for (const std::uint32_t tensor : {0, 1}) {
          const bool isAll = job.isResult(client, tensor, step, all);
          EXPECT_TRUE(isAll || job.isResult(client, tensor, step, others)) << "half a contribution";
          isWith[client].push_back(isAll);
        }
      }
    };
    std::thread ending([&] {
      train(lost, numPushed);
      job.lose(lost);
    });
    together(numClients, [&](std::size_t client) {
      if (client != lost) train(client, 2 * kSteps);
    });
    ending.join();
    for (std::size_t client = 0; client < numClients; ++client) {
      if (client == lost) continue;
      ASSERT_EQ(isWith[client].size(), 2 * kSteps);
      for (std::uint32_t i = 0; i < 2 * kSteps; ++i) EXPECT_EQ(isWith[client][i], i < numPushed) << i;
    }
    job.expectNoEvents();
  }
}

INSTANTIATE_TEST_SUITE_P(Clusters, LostClient,
                         testing::Values(ClusterShape{2, 1, 1}, ClusterShape{3, 2, 1}, ClusterShape{3, 2, 2},
                                         ClusterShape{5, 3, 2}),
                         nameOf);

TEST(LostClients, MayBeSeveralAtOnce) {
  Job job({4, 2, 2}, twoTensors(4));
  job.cluster.start();
  for (const std::size_t client : {0, 2}) {
    for (const std::uint32_t tensor : {0, 1}) job.push(client, tensor, 1);
  }
  job.push(3, 1, 1);
  job.lose(1);
  job.lose(3);
  for (std::uint32_t step = 1; step <= 2; ++step) {
    for (const std::size_t client : {0, 2}) {
      for (const std::uint32_t tensor : {0, 1}) {
        if (step > 1) job.push(client, tensor, step);
      }
    }
    for (const std::size_t client : {0, 2}) {
      for (const std::uint32_t tensor : {0, 1}) job.pull(client, tensor);
      job.expectResult(client, 0, step, {0, 2});
      job.expectResult(client, 1, step, step == 1 ? Clients{0, 2, 3} : Clients{0, 2});
    }
  }
  job.expectNoEvents();
}

/// Parameters of 8, gradients of 2 and 4 of clients 1 and 2; client 0 gets lost, whose settings are of no
/// step.
class LostBeforeUpdate : public testing::Test {
 protected:
  LostBeforeUpdate() : job_({3, 2, 1}, plan()) {
    job_.cluster.start();
    std::fill_n(parameters(), kElements, 8.F);
    for (const std::size_t client : {1, 2}) {
      UpdateSettings settings;
      settings.rule = UpdateRule::kSgd;
      settings.stepSize = 1;
      settings.updateNumber = 1;
      job_.cluster.settings(job_.plan, client)[0] = settings;
    }
  }
  static constexpr std::size_t kElements = 40'000;
  static GroupPlan plan() {
    GroupPlan plan =
        makePlan(kGroup, 3, {{kElements, DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect}}, 16'384);
    plan.hasOptimizer = true;
    return plan;
  }
  float* parameters() { return reinterpret_cast<float*>(job_.cluster.parameters(job_.plan)); }
  void fill(std::size_t client, float value) {
    std::fill_n(reinterpret_cast<float*>(job_.cluster.slots(job_.plan, client)), kElements, value);
  }
  void push(std::size_t client, std::uint8_t flags) {
    ASSERT_EQ(job_.cluster.client(client).push(kGroup, 0, flags, nullptr), WaitStatus::kDone);
    job_.cluster.client(client).flush();
  }
  void pushAndPull(std::uint8_t flags) {
    for (const std::size_t client : {1, 2}) push(client, flags);
    for (const std::size_t client : {1, 2}) job_.pull(client, 0);
  }
  void expectParameters(float value) {
    EXPECT_EQ(std::count(parameters(), parameters() + kElements, value), std::ptrdiff_t{kElements});
    job_.expectNoEvents();
  }

  Job job_;
};

TEST_F(LostBeforeUpdate, AParameterMovesByTheMeanOfTheOthers) {
  job_.lose(0);
  fill(1, 2);
  fill(2, 4);
  pushAndPull(kPresent | kUpdate);
  expectParameters(5);
}

TEST_F(LostBeforeUpdate, AMeanIsTakenFromASlotOfOneThatHasPushed) {
  fill(0, 9);
  fill(1, 2);
  fill(2, 4);
  for (const std::size_t client : {0, 1, 2}) push(client, kPresent);
  for (const std::size_t client : {0, 1, 2}) job_.pull(client, 0);
  fill(0, 100);  // it dies while it writes
  job_.lose(0);
  pushAndPull(kPresent | kUpdate | kReduced);
  expectParameters(3);
}

TEST_F(LostBeforeUpdate, AMeasureIsOfTheMeanOfTheOthers) {
  job_.lose(0);
  fill(1, 2);
  fill(2, 4);
  pushAndPull(kPresent | kMeasure);
  double squares = 0;
  for (const GradientMeasure& measure : job_.cluster.client(1).measures(kGroup))
    squares += measure.sumOfSquares;
  EXPECT_EQ(squares, 9.0 * kElements);
  expectParameters(8);
}

// ---- newcomers ----

constexpr std::uint32_t kBoundary = 2;

/// Members that go over the boundary before each step, as coarse.client.membership.step_boundary does. Any
/// thread may act for one client, the test's own for the memory devices.
class Training : public Job {
 public:
  explicit Training(ClusterShape shape)
      : Job(withEpochs(shape), twoTensors(shape.numClients, ReduceOp::kSum)),
        boundary(
            makePlan(kBoundary, shape.numClients, {{1, DType::kUInt8, ReduceOp::kMax, Algorithm::kGather}})),
        epochs_(shape.numClients),
        hasPushed_(shape.numClients) {
    for (std::size_t device = 0; device < shape.numDevices; ++device)
      cluster.proxy(device).setBoundary(kBoundary);
    cluster.addGroup(boundary);
    cluster.start();
  }
  void admit(std::size_t client) {
    cluster.admitNewcomer(client, {plan, boundary});
    hasPushed_[client] = 0;
  }
  void setReady(std::size_t client) {
    for (std::size_t device = 0; device < cluster.shape().numDevices; ++device)
      cluster.proxy(device).setReady(client, true);
  }
  void endNewcomer(std::size_t client) {
    for (std::size_t device = 0; device < cluster.shape().numDevices; ++device)
      cluster.proxy(device).newcomerEnded(client);
  }
  /// Goes over the boundary before `step`.
  void cross(std::size_t client, std::uint32_t step) {
    Client& worker = cluster.client(client);
    if (hasPushed_[client] != 0) {
      ASSERT_EQ(worker.pull(kBoundary, 0, nullptr, kPatienceSeconds), WaitStatus::kDone);
    }
    if (const std::uint32_t epoch = worker.newestEpoch(); epoch != epochs_[client]) {
      const Clients newcomers = worker.newcomersOf(epoch);
      EXPECT_FALSE(newcomers.empty());
      worker.enterEpoch(static_cast<std::uint8_t>(epoch), newcomers);
      epochs_[client] = epoch;
      const std::lock_guard<std::mutex> lock(mutex_);
      const Position position{step, newcomers, worker.steps(kGroup), worker.steps(kBoundary)};
      const auto [found, isFirst] = positions_.try_emplace(epoch, position);
      EXPECT_EQ(found->second.step, step) << "all enter an epoch before the same step";
      EXPECT_EQ(found->second.steps, position.steps);
      EXPECT_EQ(found->second.newcomers, newcomers);
    }
    ASSERT_EQ(worker.push(kBoundary, 0, kPresent, nullptr), WaitStatus::kDone);
    worker.flush();
    hasPushed_[client] = 1;
  }
  /// Waits until a newcomer is a member. @returns its first step; 0 if `isOver` becomes true before.
  std::uint32_t enter(std::size_t client, const std::atomic<bool>& isOver) {
    Client& worker = cluster.client(client);
    std::optional<Position> position;
    EXPECT_TRUE(eventually([&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = positions_.find(worker.memberSince(client));
      if (found != positions_.end()) position = found->second;
      return position || isOver;
    }));
    if (!position) return 0;
    worker.setSteps(kGroup, position->steps);
    worker.setSteps(kBoundary, position->boundarySteps);
    EXPECT_TRUE(eventually([&] { return worker.areStepsDone(kGroup) && worker.areStepsDone(kBoundary); }));
    Clients all(epochs_.size());
    std::iota(all.begin(), all.end(), 0);
    epochs_[client] = worker.memberSince(client);
    worker.enterEpoch(static_cast<std::uint8_t>(epochs_[client]), all);
    return position->step;
  }
  /// A step of these clients, which are all members.
  void takeStep(const Clients& clients, std::uint32_t step) {
    for (const std::size_t client : clients) cross(client, step);
    pushAndPull(clients, step);
  }
  void pushAndPull(const Clients& clients, std::uint32_t step) {
    for (const std::size_t client : clients) {
      for (const std::uint32_t tensor : {0, 1}) push(client, tensor, step);
    }
    for (const std::size_t client : clients) {
      for (const std::uint32_t tensor : {0, 1}) {
        pull(client, tensor);
        expectResult(client, tensor, step, clients);
      }
    }
  }
  /// The first step of a newcomer that is a member, when the others begin it.
  void begin(const Clients& others, std::size_t newcomer, std::uint32_t step) {
    for (const std::size_t client : others) cross(client, step);
    EXPECT_EQ(enter(newcomer, isNeverOver_), step);
    cross(newcomer, step);
  }
  void expectStandIns(const Clients& clients, const Clients& lost) {
    for (const std::size_t client : clients) EXPECT_EQ(cluster.client(client).standIns(kGroup), lost);
  }

  GroupPlan boundary;

 private:
  struct Position {
    std::uint32_t step = 0;
    Clients newcomers;
    std::vector<std::uint32_t> steps, boundarySteps;
  };
  static ClusterShape withEpochs(ClusterShape shape) {
    shape.hasEpochs = true;
    return shape;
  }

  std::vector<std::uint32_t> epochs_;  // of each client
  std::vector<char> hasPushed_;        // whether each client has pushed the boundary
  std::mutex mutex_;                   // guards positions_
  std::map<std::uint32_t, Position> positions_;
  std::atomic<bool> isNeverOver_{false};
};

class Newcomer : public testing::TestWithParam<ClusterShape> {
 protected:
  Newcomer() : all(GetParam().numClients) { std::iota(all.begin(), all.end(), 0); }
  Clients without(std::size_t lost) const {
    Clients others;
    std::copy_if(all.begin(), all.end(), std::back_inserter(others),
                 [&](auto client) { return client != lost; });
    return others;
  }
  Clients all;
};

TEST_P(Newcomer, ContributesFromTheSameStepOnAllWorkers) {
  for (const std::size_t lost : all) {
    const Clients others = without(lost);
    Training job(GetParam());
    job.takeStep(all, 1);
    job.lose(lost);
    job.takeStep(others, 2);
    job.admit(lost);
    job.takeStep(others, 3);
    job.setReady(lost);
    job.takeStep(others, 4);  // the completion of its boundary begins an epoch
    job.expectStandIns(others, {lost});
    job.begin(others, lost, 5);
    job.pushAndPull(all, 5);
    job.expectStandIns(all, {});
    job.takeStep(all, 6);
    job.expectStandIns(all, {});
    job.expectNoEvents();
  }
}

TEST_P(Newcomer, IsStoodInForAgainWhenItEndsAndReplacedAgain) {
  const std::size_t lost = 0;
  const Clients others = without(lost);
  Training job(GetParam());
  job.takeStep(all, 1);
  std::uint32_t step = 1;
  for (int generation = 0; generation < 3; ++generation) {
    job.lose(lost);
    job.takeStep(others, ++step);
    job.admit(lost);
    job.setReady(lost);
    job.takeStep(others, ++step);
    job.begin(others, lost, ++step);
    job.push(lost, 0, step);  // and not the other tensor
    for (const std::size_t client : others) {
      for (const std::uint32_t tensor : {0, 1}) job.push(client, tensor, step);
    }
    job.lose(lost);
    for (const std::size_t client : others) {
      for (const std::uint32_t tensor : {0, 1}) job.pull(client, tensor);
      job.expectResult(client, 0, step, all);
      job.expectResult(client, 1, step, others);
    }
    job.expectStandIns(others, {});  // of this step, which the first tensor has with it
    job.takeStep(others, ++step);
    job.expectStandIns(others, {lost});
    job.admit(lost);
    job.setReady(lost);
    job.takeStep(others, ++step);
    job.begin(others, lost, ++step);
    job.pushAndPull(all, step);
  }
  job.expectNoEvents();
}

TEST_P(Newcomer, MayEndBeforeItIsAMember) {
  const std::size_t lost = 1;
  const Clients others = without(lost);
  Training job(GetParam());
  job.takeStep(all, 1);
  job.lose(lost);
  for (std::uint32_t step = 2; step <= 4; ++step) {
    job.admit(lost);
    job.endNewcomer(lost);
    job.takeStep(others, step);
  }
  job.admit(lost);
  job.setReady(lost);
  job.takeStep(others, 5);
  job.begin(others, lost, 6);
  job.pushAndPull(all, 6);
  job.expectNoEvents();
}

TEST_P(Newcomer, MayEndWhenItIsAMemberThatHasPushedNothing) {
  const std::size_t lost = 1;
  const Clients others = without(lost);
  Training job(GetParam());
  job.takeStep(all, 1);
  job.lose(lost);
  job.takeStep(others, 2);
  job.admit(lost);
  job.setReady(lost);
  job.takeStep(others, 3);
  for (const std::size_t client : others) job.cross(client, 4);
  job.lose(lost);
  job.pushAndPull(others, 4);
  job.expectStandIns(others, {lost});
  job.takeStep(others, 5);
  job.expectNoEvents();
}

TEST_P(Newcomer, PushesNothingBeforeItIsAMember) {
  Training job(GetParam());
  job.takeStep(all, 1);
  job.lose(0);
  job.takeStep(without(0), 2);
  job.admit(0);
  EXPECT_THROW(job.cluster.client(0).push(kGroup, 1, kPresent, nullptr), std::logic_error);
  Descriptor descriptor;
  descriptor.group = kGroup;
  descriptor.shard = static_cast<std::uint32_t>(job.plan.shards.size()) - 1;
  descriptor.step = 3;
  descriptor.flags = kPresent;
  job.cluster.tell(0, 0, descriptor);
  std::vector<ProxyEvent> events;
  ASSERT_TRUE(eventually([&] {
    events = job.cluster.proxy(0).takeEvents();
    return !events.empty();
  }));
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].client, 0);
  EXPECT_NE(events[0].message.find("of which it is no member"), std::string::npos) << events[0].message;
}

// Workers end and come at any time, while contributions arrive at all devices.
TEST_P(Newcomer, TakesPartWithEqualResultsWheneverItComes) {
  constexpr std::uint32_t kSteps = 120;
  constexpr int kGenerations = 3;
  const std::size_t numClients = GetParam().numClients;
  std::mt19937 random(11);
  for (int round = 0; round < 4; ++round) {
    Training job(GetParam());
    const std::size_t lost = random() % numClients;
    std::vector<std::uint32_t> numPushed;  // of each worker in the place, before it ends
    for (int i = 0; i < kGenerations; ++i) numPushed.push_back(random() % 40);
    // By client, step and tensor; of workers in the lost place, those that have pulled.
    std::vector<std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t>> masks(numClients);
    std::atomic<bool> isOver{false};
    const auto train = [&](std::size_t client, std::uint32_t first, std::uint32_t numPushes) {
      for (std::uint32_t step = first, pushed = 0; step <= kSteps; ++step) {
        job.cross(client, step);
        for (const std::uint32_t tensor : {0, 1}) {
          if (pushed++ == numPushes) return false;
          job.push(client, tensor, step);
        }
        for (const std::uint32_t tensor : {0, 1}) {
          job.pull(client, tensor);
          float value = 0;
          std::memcpy(&value,
                      job.cluster.slots(job.plan, client) + (tensor == 0 ? 0 : job.plan.shards.back().offset),
                      sizeof(value));
          const auto mask = static_cast<std::uint32_t>(value) / (1 + step % kPeriod);
          Clients present;
          for (std::size_t each = 0; each < numClients; ++each) {
            if ((mask >> each & 1) != 0) present.push_back(each);
          }
          EXPECT_TRUE(job.isResult(client, tensor, step, present)) << "half a contribution";
          masks[client][{step, tensor}] = mask;
        }
      }
      return true;
    };
    std::thread place([&] {
      std::uint32_t first = 1;
      for (int generation = 0; generation < kGenerations && first > 0; ++generation) {
        const bool isLast = generation + 1 == kGenerations;
        if (train(lost, first, isLast ? 2 * kSteps + 2 : numPushed[generation])) return;
        job.lose(lost);
        job.admit(lost);
        job.setReady(lost);
        first = job.enter(lost, isOver);
      }
    });
    together(numClients, [&](std::size_t client) {
      if (client != lost) {
        EXPECT_TRUE(train(client, 1, 2 * kSteps + 2));
      }
    });
    isOver = true;
    place.join();
    const std::size_t witness = lost == 0 ? 1 : 0;
    ASSERT_EQ(masks[witness].size(), 2 * kSteps);
    for (std::size_t client = 0; client < numClients; ++client) {
      for (const auto& [where, mask] : masks[client]) {
        EXPECT_EQ(mask, masks[witness][where]) << "client " << client << ", step " << where.first;
        if (client == lost) {
          EXPECT_EQ(mask >> lost & 1, 1U) << "a member that has pushed counts";
        }
      }
    }
    for (const auto& [where, mask] : masks[witness])
      EXPECT_EQ(mask | 1U << lost, (1U << numClients) - 1) << "all others count in step " << where.first;
    job.expectNoEvents();
  }
}

INSTANTIATE_TEST_SUITE_P(Clusters, Newcomer,
                         testing::Values(ClusterShape{2, 1, 1}, ClusterShape{3, 2, 1}, ClusterShape{3, 2, 2},
                                         ClusterShape{5, 3, 2}),
                         nameOf);

TEST(NewcomerBeforeUpdate, SettingsAndResultsAreThoseOfMembers) {
  // A newcomer in the first place has settings of no step until it contributes itself.
  constexpr std::size_t kElements = 40'000;
  ClusterShape shape{3, 2, 1};
  shape.hasEpochs = true;
  GroupPlan plan =
      makePlan(kGroup, 3, {{kElements, DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect}}, 16'384);
  plan.hasOptimizer = true;
  Job job(shape, plan);
  job.cluster.start();
  auto* const parameters = reinterpret_cast<float*>(job.cluster.parameters(plan));
  std::fill_n(parameters, kElements, 8.F);
  for (const std::size_t client : {1, 2}) {
    UpdateSettings settings;
    settings.rule = UpdateRule::kSgd;
    settings.stepSize = 1;
    settings.updateNumber = 1;
    job.cluster.settings(plan, client)[0] = settings;
    std::fill_n(reinterpret_cast<float*>(job.cluster.slots(plan, client)), kElements,
                client == 1 ? 2.F : 4.F);
  }
  job.lose(0);
  job.cluster.admitNewcomer(0, {plan});
  for (const std::size_t client : {1, 2}) {
    ASSERT_EQ(job.cluster.client(client).push(kGroup, 0, kPresent | kUpdate, nullptr), WaitStatus::kDone);
    job.cluster.client(client).flush();
  }
  for (const std::size_t client : {1, 2}) job.pull(client, 0);
  EXPECT_EQ(std::count(parameters, parameters + kElements, 5.F), std::ptrdiff_t{kElements});
  EXPECT_EQ(job.cluster.client(0).updates(kGroup),
            (std::pair<std::uint32_t, std::vector<std::uint32_t>>{1, {1}}));
  job.expectNoEvents();
}

}  // namespace
}  // namespace coarse::test::membership_test
