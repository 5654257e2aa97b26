/// Replica: whatever one memory device loses, and whenever, parameters and states of one whole step are left.
#include "coarse/tensors/replica.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "bytes.hpp"
#include "coarse/recovery/recovery.hpp"
#include "fixture.hpp"

namespace coarse::test::replica_test {
namespace {

using Numbers = std::vector<std::uint32_t>;

constexpr std::uint32_t kGroup = 1;
constexpr std::uint32_t kElements[] = {50'000, 33};  // several shards, one
constexpr std::size_t kClients = 2;

GroupPlan makeReplicatedPlan(DType dtype) {
  GroupPlan plan = makePlan(kGroup, kClients,
                            {{kElements[0], dtype, ReduceOp::kMean, Algorithm::kDirect},
                             {kElements[1], dtype, ReduceOp::kMean, Algorithm::kGather}},
                            16'384);
  plan.hasOptimizer = true;
  plan.numStates = 1;
  return plan;
}

/// A group of momentum SGD by a learning rate of 1, whose gradients are 1 everywhere, with its replica.
class ReplicatedGroup {
 public:
  explicit ReplicatedGroup(DType dtype = DType::kFloat32, bool isFilled = false)
      : plan(makeReplicatedPlan(dtype)),
        control(GroupControl::numBytes(plan.shards.size(), kClients)),
        parameters(plan.parameterBytes()),
        states(plan.keptBytes()),
        replicaControl(ReplicaControl::numBytes(plan.shards.size())),
        replicaParameters(plan.parameterBytes()),
        replicaStates(plan.keptBytes()) {
    for (std::size_t client = 0; client < kClients; ++client) {
      slots.emplace_back(plan.clientBytes());
      settings.emplace_back(plan.settingsBytes());
      for (std::uint32_t tensor = 0; tensor < 2; ++tensor) set(client, tensor, 1);
    }
    group = std::make_unique<TensorGroup>(
        plan, control.fd, regionsOf(slots),
        OptimizerFds{fdsOf(settings),
                     parameters.fd,
                     states.fd,
                     {},
                     {replicaControl.fd, replicaParameters.fd, replicaStates.fd, 0, 1, isFilled}});
    group->control().initialise();
  }
  void set(std::size_t client, std::uint32_t tensor, std::uint32_t updateNumber, bool hasGradient = true) {
    UpdateSettings each;
    each.rule = UpdateRule::kSgdMomentum;
    each.stepSize = 1;
    each.updateNumber = updateNumber;
    each.hasGradient = hasGradient ? 1 : 0;
    reinterpret_cast<UpdateSettings*>(settings[client].data())[tensor] = each;
  }
  /// All workers have prepared a step: slots and settings are whole.
  void prepare(std::uint32_t step) {
    for (std::size_t client = 0; client < kClients; ++client) {
      for (std::uint32_t tensor = 0; tensor < 2; ++tensor) set(client, tensor, step);
      for (const Shard& shard : plan.shards) fillOnes(slots[client].data() + shard.offset, shard);
    }
  }
  void fillOnes(std::byte* memory, const Shard& shard) const {
    if (shard.dtype == DType::kFloat32) {
      std::fill_n(reinterpret_cast<float*>(memory), shard.numElements, 1.F);
    } else {
      std::fill_n(reinterpret_cast<std::uint16_t*>(memory), shard.numElements, std::uint16_t{0x3F80});
    }
  }
  /// What a sync core of the owner does with a shard.
  void update(std::uint32_t shard) {
    for (std::size_t client = 0; client < kClients; ++client)
      group->control().contribution(shard, client).flags = kPresent | kUpdate | kReduced;
    updateShard(*group, shard);
    noteUpdate(*group, shard);
  }
  /// What one of the keeper does then.
  void copy(std::uint32_t shard) { group->replica()->copy(*group, {shard}, staging); }
  std::uint32_t numShards() const { return static_cast<std::uint32_t>(plan.shards.size()); }
  void takeStep(std::uint32_t step) {
    prepare(step);
    for (std::uint32_t shard = 0; shard < numShards(); ++shard) {
      update(shard);
      copy(shard);
    }
  }
  /// Whoever reads this memory reads what never was.
  static void lose(Memory& memory, std::size_t numBytes) { std::memset(memory.data(), 0xA5, numBytes); }
  void loseOwner() {
    lose(parameters, plan.parameterBytes());
    lose(states, plan.keptBytes());
    lose(control, GroupControl::numBytes(plan.shards.size(), kClients));
    loseClient(0);
  }
  void loseKeeper() {
    lose(replicaParameters, plan.parameterBytes());
    lose(replicaStates, plan.keptBytes());
    lose(replicaControl, ReplicaControl::numBytes(plan.shards.size()));
    loseClient(1);
  }
  void loseClient(std::size_t client) {
    lose(slots[client], plan.clientBytes());
    lose(settings[client], plan.settingsBytes());
  }
  Bytes bytes(const Memory& memory, std::size_t numBytes) const {
    return {memory.data(), memory.data() + numBytes};
  }
  Bytes owned() const {
    Bytes all = bytes(parameters, plan.parameterBytes());
    const Bytes more = bytes(states, plan.keptBytes());
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  Bytes replicated() const {
    Bytes all = bytes(replicaParameters, plan.parameterBytes());
    const Bytes more = bytes(replicaStates, plan.keptBytes());
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  GroupPlan plan;
  Memory control, parameters, states, replicaControl, replicaParameters, replicaStates;
  std::vector<Memory> slots, settings;
  std::unique_ptr<TensorGroup> group;
  ReplicaStaging staging{*hostMemory()};
};

/// Parameters and states after so many steps in which nothing was lost.
Bytes after(std::uint32_t numSteps, DType dtype = DType::kFloat32) {
  ReplicatedGroup undisturbed(dtype);
  for (std::uint32_t step = 1; step <= numSteps; ++step) undisturbed.takeStep(step);
  return undisturbed.owned();
}

class ReplicaOfDType : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, ReplicaOfDType, testing::Values(DType::kFloat32, DType::kBFloat16));

TEST_P(ReplicaOfDType, StandsInForAnOwnerThatIsLostAfterAnyUpdateOrCopy) {
  const std::uint32_t numShards = ReplicatedGroup().numShards();
  for (std::uint32_t updated = 0; updated <= numShards; ++updated) {
    for (std::uint32_t copied = 0; copied <= updated; ++copied) {
      ReplicatedGroup job(GetParam());
      job.takeStep(1);
      job.prepare(2);
      for (std::uint32_t shard = 0; shard < updated; ++shard) job.update(shard);
      for (std::uint32_t shard = 0; shard < copied; ++shard) job.copy(shard);
      job.loseOwner();
      const GroupUpdates updates = finishReplica(*job.group, {0}, true);
      const std::uint32_t step = copied > 0 ? 2 : 1;
      ASSERT_EQ(updates.problem, "");
      ASSERT_EQ(updates.step, step);
      ASSERT_EQ(updates.updateNumbers, (Numbers{step, step}));
      ASSERT_EQ(job.replicated(), after(step, GetParam())) << updated << " updated, " << copied << " copied";
    }
  }
}

TEST_P(ReplicaOfDType, IsNotNeededWhereItsKeeperIsLost) {
  const std::uint32_t numShards = ReplicatedGroup().numShards();
  for (std::uint32_t updated = 0; updated <= numShards; ++updated) {
    ReplicatedGroup job(GetParam());
    job.takeStep(1);
    job.prepare(2);
    for (std::uint32_t shard = 0; shard < updated; ++shard) job.update(shard);
    job.loseKeeper();
    const GroupUpdates updates = finishUpdates(*job.group, {1});
    const std::uint32_t step = updated > 0 ? 2 : 1;
    ASSERT_EQ(updates.problem, "");
    ASSERT_EQ(updates.step, step);
    ASSERT_EQ(job.owned(), after(step, GetParam())) << updated << " updated";
  }
}

TEST(Replica, BecomesWhatTheOwnerHasWhereNoneOfThemIsLost) {
  ReplicatedGroup job;
  job.takeStep(1);
  job.prepare(2);
  job.update(0);
  EXPECT_EQ(finishUpdates(*job.group).step, 2U);
  const GroupUpdates updates = finishReplica(*job.group, {}, false);
  EXPECT_EQ(updates.step, 2U);
  EXPECT_EQ(updates.updateNumbers, (Numbers{2, 2}));
  EXPECT_EQ(job.replicated(), after(2));
  EXPECT_EQ(job.owned(), after(2));
}

class ReplicaInMemory : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Memories, ReplicaInMemory, testing::Bool(),
                         [](const auto& info) { return info.param ? "deferred" : "host"; });

TEST_P(ReplicaInMemory, HasEveryStepThatAWorkerHasSeen) {
  constexpr std::uint32_t kSteps = 20;
  const ClusterShape shape{kClients, 3, 2, Scheduling::kQueues, GetParam(), true};
  const GroupPlan plan = makeReplicatedPlan(DType::kFloat32);
  Cluster cluster(shape);
  cluster.start().addGroup(plan);
  for (std::size_t client = 0; client < kClients; ++client)
    std::fill_n(reinterpret_cast<float*>(cluster.slots(plan, client)), plan.slotBytes / sizeof(float), 1.F);
  std::atomic<std::uint32_t> numSeen{0};
  together(kClients, [&](std::size_t client) {
    for (std::uint32_t step = 1; step <= kSteps; ++step) {
      for (std::uint32_t tensor = 0; tensor < 2; ++tensor) {
        UpdateSettings settings;
        settings.rule = UpdateRule::kSgdMomentum;
        settings.stepSize = 1;
        settings.updateNumber = step;
        cluster.settings(plan, client)[tensor] = settings;
      }
      for (std::uint32_t tensor = 0; tensor < 2; ++tensor) {
        ASSERT_EQ(cluster.client(client).push(kGroup, tensor, kPresent | kUpdate | kReduced, nullptr),
                  WaitStatus::kDone);
      }
      cluster.client(client).flush();
      for (std::uint32_t tensor = 0; tensor < 2; ++tensor) {
        ASSERT_EQ(cluster.client(client).pull(kGroup, tensor, nullptr, kPatienceSeconds), WaitStatus::kDone);
      }
      // Nobody begins the next step before both have looked.
      for (std::size_t i = 0; i < plan.parameterBytes() / sizeof(float); i += 997) {
        ASSERT_EQ(reinterpret_cast<float*>(cluster.replicatedParameters(plan))[i],
                  reinterpret_cast<float*>(cluster.parameters(plan))[i]);
      }
      ++numSeen;
      ASSERT_TRUE(eventually([&] { return numSeen.load() >= kClients * step; }));
    }
  });
  EXPECT_EQ(std::memcmp(cluster.parameters(plan), cluster.replicatedParameters(plan), plan.parameterBytes()),
            0);
  EXPECT_EQ(reinterpret_cast<float*>(cluster.parameters(plan))[0], -static_cast<float>(kSteps));
}

TEST(Replica, OfAFirstStepThatWasNotCopiedWholeIsNone) {
  ReplicatedGroup job;
  job.prepare(1);
  job.update(0);
  job.copy(0);
  job.loseOwner();
  EXPECT_EQ(finishReplica(*job.group, {0}, true).step, 0U);
}

TEST(Replica, OfWhatTheOwnerCouldNotFinishIsNone) {
  ReplicatedGroup job;
  job.takeStep(1);
  job.prepare(2);
  job.set(1, 1, 7);  // workers disagree
  job.update(0);
  EXPECT_NE(finishUpdates(*job.group).problem, "");
  EXPECT_NE(finishReplica(*job.group, {}, false).problem, "");
}

TEST(Replica, NeedsTheSlotsOfSomeWorkerToFinishAStep) {
  ReplicatedGroup job;
  job.takeStep(1);
  job.prepare(2);
  job.update(0);
  job.copy(0);
  EXPECT_EQ(finishReplica(*job.group, {0, 1}, true).problem, "the slots of all workers are lost");
}

TEST(Replica, LeavesATensorWithoutGradientAsItIs) {
  ReplicatedGroup job;
  job.takeStep(1);
  job.prepare(2);
  for (std::size_t client = 0; client < kClients; ++client) job.set(client, 1, 2, false);
  job.update(0);
  job.copy(0);
  job.loseOwner();
  EXPECT_EQ(finishReplica(*job.group, {0}, true).updateNumbers, (Numbers{2, 1}));
}

TEST(Replica, BeginsAsACopyUnlessItWasFilled) {
  for (const bool isFilled : {false, true}) {
    ReplicatedGroup job(DType::kFloat32, isFilled);
    job.prepare(1);
    for (std::uint32_t shard = 0; shard < job.numShards(); ++shard) job.update(shard);
    GroupUpdates updates;
    updates.step = 1;
    updates.updateNumbers = {1, 1};
    job.group->replica()->begin(*job.group, updates.step, updates.updateNumbers);
    EXPECT_EQ(job.replicated() == job.owned(), !isFilled);
    EXPECT_EQ(finishReplica(*job.group, {0}, true).updateNumbers, (Numbers{1, 1}));
  }
}

TEST(Replica, LiesInTheMemoryOfAnotherDevice) {
  const ReplicatedGroup job;
  const ReplicaFds fds{job.replicaControl.fd, job.replicaParameters.fd, job.replicaStates.fd, 1, 1, false};
  EXPECT_THROW(Replica(job.plan, *hostMemory(), fds), std::invalid_argument);
}

TEST(ShardSet, GivesEachShardToOneTaker) {
  constexpr std::size_t kShards = 1000;
  const Memory memory(ShardSet::numWords(kShards) * sizeof(std::uint64_t));
  const ShardSet set(reinterpret_cast<std::atomic<std::uint64_t>*>(memory.data()), kShards);
  std::vector<std::vector<std::uint32_t>> taken(3);
  std::atomic<std::size_t> numTaken{0};
  together(6, [&](std::size_t thread) {
    if (thread < 3) {
      for (std::uint32_t shard = static_cast<std::uint32_t>(thread); shard < kShards; shard += 3)
        set.add(shard);
      return;
    }
    const Deadline deadline;
    while (numTaken.load() < kShards && !deadline.isOver()) {
      std::uint32_t shard = 0;
      if (!set.take(shard)) continue;
      taken[thread - 3].push_back(shard);
      ++numTaken;
    }
  });
  std::multiset<std::uint32_t> all;
  for (const std::vector<std::uint32_t>& each : taken) all.insert(each.begin(), each.end());
  EXPECT_EQ(all.size(), kShards);
  EXPECT_EQ(std::set<std::uint32_t>(all.begin(), all.end()).size(), kShards);
  std::uint32_t shard = 0;
  EXPECT_FALSE(set.take(shard));
}

}  // namespace
}  // namespace coarse::test::replica_test
