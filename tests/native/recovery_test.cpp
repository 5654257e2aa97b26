/// finishUpdates(): a step that memory devices have begun is one that all shards see, or none.
#include "coarse/recovery/recovery.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "fixture.hpp"

namespace coarse::test::recovery_test {
namespace {

constexpr std::uint32_t kGroup = 1;
constexpr std::uint32_t kElements[] = {50'000, 33};  // several shards, one
constexpr std::size_t kClients = 2;

GroupPlan makeUpdatedPlan() {
  GroupPlan plan = makePlan(kGroup, kClients,
                            {{kElements[0], DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect},
                             {kElements[1], DType::kFloat32, ReduceOp::kMean, Algorithm::kGather}},
                            16'384);
  plan.hasOptimizer = true;
  return plan;
}

/// Two workers whose slots hold gradients of 1, and whose settings have parameters of 8 lose as much.
class Job {
 public:
  explicit Job(const ClusterShape& shape = {kClients, 2, 1}) : plan(makeUpdatedPlan()), cluster(shape) {
    cluster.start().addGroup(plan);
    for (std::uint32_t tensor = 0; tensor < 2; ++tensor) {
      std::fill_n(parameter(tensor), kElements[tensor], 8.F);
      for (std::size_t client = 0; client < kClients; ++client) {
        std::fill_n(floats(cluster.slots(plan, client), tensor), kElements[tensor], 1.F);
        set(client, tensor, 1);
      }
    }
  }
  float* parameter(std::uint32_t tensor) { return floats(cluster.parameters(plan), tensor); }
  void set(std::size_t client, std::uint32_t tensor, std::uint32_t updateNumber, bool hasGradient = true) {
    UpdateSettings settings;
    settings.rule = UpdateRule::kSgd;
    settings.stepSize = 1;
    settings.updateNumber = updateNumber;
    settings.hasGradient = hasGradient ? 1 : 0;
    cluster.settings(plan, client)[tensor] = settings;
  }
  void push(std::size_t client, std::uint32_t tensor) {
    ASSERT_EQ(cluster.client(client).push(kGroup, tensor, kPresent | kUpdate | kReduced, nullptr),
              WaitStatus::kDone);
    cluster.client(client).flush();
  }
  void pull(std::size_t client, std::uint32_t tensor) {
    ASSERT_EQ(cluster.client(client).pull(kGroup, tensor, nullptr, kPatienceSeconds), WaitStatus::kDone);
  }
  /// What the home device makes of it when all workers have died.
  GroupUpdates settle() {
    for (std::size_t device = 0; device < cluster.shape().numDevices; ++device) cluster.proxy(device).stop();
    return cluster.proxy(0).finishGroupUpdates().at(0);
  }
  void expectParameters(float value) {
    for (std::uint32_t tensor = 0; tensor < 2; ++tensor) {
      for (std::size_t i = 0; i < kElements[tensor]; ++i) ASSERT_EQ(parameter(tensor)[i], value) << tensor;
    }
  }

  GroupPlan plan;
  Cluster cluster;

 private:
  float* floats(std::byte* base, std::uint32_t tensor) const {
    for (const Shard& shard : plan.shards) {
      if (shard.tensor == tensor) return reinterpret_cast<float*>(base + shard.offset);
    }
    return nullptr;
  }
};

using Numbers = std::vector<std::uint32_t>;

TEST(FinishedUpdates, AreSeenByAllShardsIfOneHasSeenThem) {
  Job job;
  for (const std::size_t client : {0, 1}) job.push(client, 1);
  for (const std::size_t client : {0, 1}) job.pull(client, 1);
  job.push(0, 0);  // the other worker dies before it pushes this one
  const GroupUpdates updates = job.settle();
  EXPECT_EQ(updates.problem, "");
  EXPECT_EQ(updates.step, 1U);
  EXPECT_EQ(updates.updateNumbers, (Numbers{1, 1}));
  job.expectParameters(7);
}

// Making what computes takes a GPU a while, and so does each batch.
TEST(FinishedUpdates, RunTogetherWhereOthersCompute) {
  Job job(kDeferred<kClients, 2, 1>);
  for (const std::size_t client : {0, 1}) job.push(client, 1);
  for (const std::size_t client : {0, 1}) job.pull(client, 1);
  const std::size_t numBefore = job.cluster.gate().numPassed();
  EXPECT_EQ(job.settle().problem, "");
  EXPECT_EQ(job.cluster.gate().numPassed(), numBefore + 1) << "for all shards of the other tensor";
  job.expectParameters(7);
}

TEST(FinishedUpdates, AreNoneIfNoShardHasSeenThem) {
  Job job;
  for (const std::uint32_t tensor : {0, 1}) job.push(0, tensor);
  const GroupUpdates updates = job.settle();
  EXPECT_EQ(updates.problem, "");
  EXPECT_EQ(updates.step, 0U);
  EXPECT_EQ(updates.updateNumbers, (Numbers{0, 0}));
  job.expectParameters(8);
}

TEST(FinishedUpdates, LeaveATensorWithoutGradientAsItIs) {
  for (const std::uint32_t numLoaded : {0, 50}) {  // updates of which its state was loaded
    Job job;
    for (const std::size_t client : {0, 1}) {
      job.set(client, 0, numLoaded + 1, false);
      job.push(client, 1);
    }
    for (const std::size_t client : {0, 1}) job.pull(client, 1);
    const GroupUpdates updates = job.settle();
    EXPECT_EQ(updates.problem, "");
    EXPECT_EQ(updates.step, 1U);
    EXPECT_EQ(updates.updateNumbers, (Numbers{numLoaded, 1}));
    EXPECT_EQ(job.parameter(0)[0], 8);
    EXPECT_EQ(job.parameter(1)[0], 7);
  }
}

TEST(FinishedUpdates, AreRefusedWhereWorkersDisagree) {
  Job job;
  job.set(1, 0, 2);
  for (const std::size_t client : {0, 1}) job.push(client, 1);
  for (const std::size_t client : {0, 1}) job.pull(client, 1);
  EXPECT_NE(job.settle().problem.find("number of the update 1 and 2"), std::string::npos);
  EXPECT_EQ(job.parameter(0)[0], 8);
}

TEST(FinishedUpdates, AreRefusedWhereShardsAreMoreThanAStepApart) {
  Job job;
  for (std::uint32_t step = 1; step <= 2; ++step) {
    for (const std::size_t client : {0, 1}) {
      job.set(client, 1, step);
      job.push(client, 1);
    }
    for (const std::size_t client : {0, 1}) job.pull(client, 1);
  }
  EXPECT_NE(job.settle().problem.find("has seen 0 steps, another one 2"), std::string::npos);
}

TEST(FinishedUpdates, GoOnFromWhatWasKept) {
  Job job;
  const Memory control(GroupControl::numBytes(job.plan.shards.size(), kClients)),
      parameters(job.plan.parameterBytes()), slots(job.plan.slotBytes), settings(job.plan.settingsBytes());
  TensorGroup group(job.plan, control.fd, {slots.fd, slots.fd},
                    {{settings.fd, settings.fd}, parameters.fd, -1, {}});
  group.control().initialise();
  EXPECT_THROW(noteUpdates(group, 5, {4}), std::invalid_argument);
  noteUpdates(group, 5, {4, 3});
  const GroupUpdates updates = finishUpdates(group);
  EXPECT_EQ(updates.step, 5U);
  EXPECT_EQ(updates.updateNumbers, (Numbers{4, 3}));
}

}  // namespace
}  // namespace coarse::test::recovery_test
