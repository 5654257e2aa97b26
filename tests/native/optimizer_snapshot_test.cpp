/// Snapshots of what an optimizer keeps, begun by workers between steps while memory devices update it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "coarse/tensors/group_snapshots.hpp"
#include "fixture.hpp"

namespace coarse::test::optimizer_snapshot_test {
namespace {

constexpr std::uint32_t kGroup = 1;
constexpr std::size_t kNumArrays = 2;  // parameter and momentum buffer

GroupPlan makeSnapshotPlan(std::size_t numClients) {
  GroupPlan plan = makePlan(kGroup, numClients,
                            {{20'003, DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect},
                             {33, DType::kFloat32, ReduceOp::kMean, Algorithm::kGather}},
                            4'096);
  plan.hasOptimizer = true;
  plan.numStates = kNumArrays - 1;
  return plan;
}

/// Every step adds 1 to all momentum buffers, and takes the buffer off every parameter.
UpdateSettings settingsOf(std::uint32_t step) {
  UpdateSettings settings;
  settings.rule = UpdateRule::kSgdMomentum;
  settings.stepSize = 1;
  settings.firstDecay = 1;
  settings.updateNumber = step;
  return settings;
}

float bufferAfter(std::uint32_t step) { return static_cast<float>(step); }
float parameterAfter(std::uint32_t step) { return -0.5F * static_cast<float>(step * (step + 1)); }

struct Training {
  Training(ClusterShape shape, std::size_t limitBytes)
      : cluster(shape), plan(makeSnapshotPlan(shape.numClients)) {
    cluster.start().addGroup(plan);
    cluster.snapshots(plan).store().setLimit(limitBytes);
  }

  void push(std::size_t client, std::uint32_t step) {
    std::byte* const slots = cluster.slots(plan, client);
    std::fill_n(cluster.settings(plan, client), plan.numTensors(), settingsOf(step));
    for (const Shard& shard : plan.shards)
      std::fill_n(reinterpret_cast<float*>(slots + shard.offset), shard.numElements, 1.F);
    for (std::uint32_t tensor = 0; tensor < plan.numTensors(); ++tensor)
      ASSERT_EQ(cluster.client(client).push(kGroup, tensor, kPresent | kUpdate, nullptr), WaitStatus::kDone);
    cluster.client(client).flush();
  }
  void takeStep(std::size_t client, std::uint32_t step) {
    push(client, step);
    ASSERT_EQ(cluster.client(client).pullAll(kGroup, kPatienceSeconds), WaitStatus::kDone);
  }

  void expectSnapshot(GroupSnapshots& reader, std::uint32_t snapshot, std::uint32_t step) {
    const std::array<float, kNumArrays> expected = {parameterAfter(step), bufferAfter(step)};
    for (std::uint32_t shard = 0; shard < plan.shards.size(); ++shard) {
      for (std::size_t array = 0; array < kNumArrays; ++array) {
        std::vector<float> found(plan.shards[shard].numElements);
        ASSERT_TRUE(reader.read(snapshot, shard, array, reinterpret_cast<std::byte*>(found.data())));
        EXPECT_EQ(found, std::vector<float>(found.size(), expected[array]))
            << "array " << array << " of shard " << shard << " after step " << step;
        reader.letGo(snapshot, shard, array);
      }
    }
    reader.store().release(snapshot);
  }

  Cluster cluster;
  GroupPlan plan;
};

class OptimizerSnapshots : public testing::TestWithParam<ClusterShape> {};

void trainWithSnapshots(ClusterShape shape, std::size_t limitBytes) {
  constexpr std::uint32_t kNumSteps = 60;
  Training training(shape, limitBytes);
  GroupSnapshots reader = training.cluster.snapshots(training.plan);
  std::atomic<std::uint32_t> stepOfSnapshot[kNumSteps + 2] = {};  // by snapshot, stored when it is begun
  std::atomic<bool> isOver{false};
  std::uint32_t numRead = 0;
  std::thread reading([&] {
    for (std::uint32_t snapshot = 1;;) {
      const bool wasOver = isOver;
      const std::uint32_t step = stepOfSnapshot[snapshot];
      if (step == 0 && wasOver) return;
      if (step == 0) continue;
      training.expectSnapshot(reader, snapshot++, step);
      ++numRead;
    }
  });
  together(shape.numClients, [&](std::size_t client) {
    SnapshotTrigger trigger = training.cluster.snapshotTrigger(training.plan);
    for (std::uint32_t step = 1; step <= kNumSteps; ++step) {
      training.takeStep(client, step);
      // Any worker may begin one, wherever the others are.
      if (step % shape.numClients != client) continue;
      if (const std::uint32_t snapshot = trigger.begin(); snapshot != 0) stepOfSnapshot[snapshot] = step;
    }
  });
  isOver = true;
  reading.join();
  EXPECT_GE(numRead, 2U);
  EXPECT_EQ(reader.store().statistics().numLost, 0U);
  EXPECT_EQ(reader.store().statistics().takenBytes, 0U);
}

TEST_P(OptimizerSnapshots, HoldTheStepAfterWhichTheyWereBegun) {
  trainWithSnapshots(GetParam(), std::size_t{1} << 30);
}

TEST_P(OptimizerSnapshots, HoldItInASmallPoolToo) { trainWithSnapshots(GetParam(), 40 << 10); }

INSTANTIATE_TEST_SUITE_P(Shapes, OptimizerSnapshots,
                         testing::Values(ClusterShape{2, 1, 1}, ClusterShape{2, 2, 1}, ClusterShape{3, 2, 2}),
                         nameOf);

TEST(OptimizerSnapshotEnds, ADeviceStopsAlthoughAnUpdateWaitsForRoom) {
  Training training({2, 1, 1}, 0);
  SnapshotTrigger trigger = training.cluster.snapshotTrigger(training.plan);
  ASSERT_EQ(trigger.begin(), 1U);
  for (const std::size_t client : {0, 1}) training.push(client, 1);
  GroupSnapshots reader = training.cluster.snapshots(training.plan);
  EXPECT_TRUE(eventually([&] { return reader.store().statistics().numWaits > 0; }));
  training.cluster.proxy(0).stop();
  EXPECT_TRUE(reader.store().isLost(1));
}

}  // namespace
}  // namespace coarse::test::optimizer_snapshot_test
