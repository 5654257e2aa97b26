/// Reductions in batches, in parallel with the sync cores: which shards go together, when their results are
/// there, and that memory stays as long as anybody works in it.
#include "coarse/tensors/batched_compute.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "coarse/tensors/shard_runs.hpp"
#include "contributions.hpp"
#include "fixture.hpp"

namespace coarse::test::batched_compute_test {
namespace {

constexpr std::uint32_t kGroup = 1;
constexpr ClusterShape kShape = kDeferred<2, 1, 1>;

/// Sums of float32, each of four shards.
GroupPlan makeSumPlan(std::size_t numClients, std::size_t numTensors) {
  return makePlan(kGroup, numClients, std::vector<TensorSpec>(numTensors, {1000}), 300);
}

void pushAll(Cluster& cluster, const GroupPlan& plan, std::size_t client, std::uint32_t step) {
  for (std::uint32_t tensor = 0; tensor < plan.numTensors(); ++tensor) {
    const Bytes source = contribution(DType::kFloat32, 1000, client, step);
    ASSERT_EQ(cluster.client(client).push(kGroup, tensor, kPresent, source.data()), WaitStatus::kDone);
  }
  cluster.client(client).flush();
}

void expectSums(Cluster& cluster, const GroupPlan& plan, std::size_t client, std::uint32_t step) {
  const Bytes expected = result(DType::kFloat32, ReduceOp::kSum, 1000, {0, 1}, step, 2);
  for (std::uint32_t tensor = 0; tensor < plan.numTensors(); ++tensor) {
    Bytes found(expected.size());
    ASSERT_EQ(cluster.client(client).pull(kGroup, tensor, found.data(), kPatienceSeconds), WaitStatus::kDone);
    ASSERT_EQ(found, expected) << "tensor " << tensor << " of client " << client;
  }
}

TEST(Batches, TakeWhateverBecameReadyWhileOthersRan) {
  Cluster cluster(kShape);
  const GroupPlan plan = makeSumPlan(2, 100);
  cluster.start().addGroup(plan);
  cluster.gate().close();
  for (std::size_t client = 0; client < 2; ++client) pushAll(cluster, plan, client, 1);
  ASSERT_TRUE(eventually([&] { return cluster.control(plan).contributors(400 - 1).load() == 2; }));
  for (std::uint32_t shard = 0; shard < 400; ++shard)
    ASSERT_EQ(cluster.control(plan).done(0, shard).load(), 0U) << "a result before it was there";
  cluster.gate().open();
  for (std::size_t client = 0; client < 2; ++client) expectSums(cluster, plan, client, 1);
  // The ones that were started at once, and all others together.
  EXPECT_LE(cluster.gate().numPassed(), BatchedCompute::kMostStarted + 1);
}

TEST(Batches, KeepAGroupThatIsRemovedWhileTheyRun) {
  Cluster cluster(kShape);
  const GroupPlan plan = makeSumPlan(2, 3);
  cluster.start().addGroup(plan);
  cluster.gate().close();
  for (std::size_t client = 0; client < 2; ++client) pushAll(cluster, plan, client, 1);
  ASSERT_TRUE(eventually([&] { return cluster.control(plan).contributors(12 - 1).load() == 2; }));
  cluster.removeFromProxies(kGroup);
  cluster.gate().open();
  for (std::size_t client = 0; client < 2; ++client) expectSums(cluster, plan, client, 1);
}

TEST(Batches, AreFinishedByADeviceThatStops) {
  Cluster cluster(kShape);
  const GroupPlan plan = makeSumPlan(2, 3);
  cluster.start().addGroup(plan);
  cluster.gate().close();
  for (std::size_t client = 0; client < 2; ++client) pushAll(cluster, plan, client, 1);
  ASSERT_TRUE(eventually([&] { return cluster.control(plan).contributors(12 - 1).load() == 2; }));
  std::thread stopping([&] { cluster.proxy(0).stop(); });
  cluster.gate().open();
  stopping.join();
  for (std::uint32_t shard = 0; shard < 12; ++shard)
    EXPECT_EQ(cluster.control(plan).done(1, shard).load(), 1U);
}

// ---- which shards go together ----

/// Keeps what it is given, and has everything done at once.
class ListingRunner : public BatchRunner {
 public:
  struct Started {
    std::vector<std::uint32_t> shards;
    MonotonicNs notBefore;
  };
  explicit ListingRunner(std::vector<Started>& started) : started_(started) {}
  void start(const ShardBatch& batch, MonotonicNs notBefore) override {
    started_.push_back({{}, notBefore});
    for (const ShardTask& task : batch) started_.back().shards.push_back(task.entry.shard);
    ++numDone_;
  }
  bool conclude() override { return numDone_ > 0 && numDone_-- > 0; }
  void wait() override {}

 private:
  std::vector<Started>& started_;
  std::size_t numDone_ = 0;
};

TEST(Batches, HoldNothingForLinksOfOthers) {
  std::vector<ListingRunner::Started> started;
  BatchedCompute compute(std::make_unique<ListingRunner>(started), [](const ShardTask&) {});
  const MonotonicNs past = monotonicNow() - 1'000'000'000, future = past + 3'600'000'000'000;
  std::uint32_t shard = 0;
  for (const MonotonicNs notBefore :
       {MonotonicNs{0}, MonotonicNs{0}, past, past + 5, future, future, future + 1})
    compute.begin({nullptr, {kGroup, shard++, 1, 0}, {{0, 1}}, notBefore});
  compute.drain();
  ASSERT_EQ(started.size(), 4U);
  const std::vector<std::vector<std::uint32_t>> expected = {{0, 1}, {2, 3}, {4, 5}, {6}};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(started[i].shards, expected[i]);
  EXPECT_EQ(started[0].notBefore, 0);
  EXPECT_EQ(started[1].notBefore, past + 5);
  EXPECT_EQ(started[2].notBefore, future);
  EXPECT_EQ(started[3].notBefore, future + 1);
}

/// A group of two clients that have contributed to all shards.
class Runs : public testing::Test {
 protected:
  explicit Runs(GroupPlan plan = makePlan(kGroup, 2, {{1000}, {16}, {500}}, 300))
      : control_(GroupControl::numBytes(plan.shards.size(), 2)),
        slots_(plan.slotBytes),
        group_(plan, control_.fd, {slots_.fd, slots_.fd}) {
    for (std::uint32_t shard = 0; shard < plan.shards.size(); ++shard) setFlags(shard, kPresent);
  }

  void setFlags(std::uint32_t shard, std::uint8_t flags, std::size_t client = 0) {
    for (; client < 2; ++client) group_.control().contribution(shard, client).flags = flags;
  }
  /// First shard, number of shards and elements of each run.
  std::vector<std::vector<std::uint64_t>> runs(const std::vector<std::uint32_t>& shards) {
    ShardBatch batch;
    for (const std::uint32_t shard : shards) batch.push_back(task(shard));
    return runs(batch);
  }
  std::vector<std::vector<std::uint64_t>> runs(const ShardBatch& batch) {
    std::vector<std::vector<std::uint64_t>> found;
    for (const ShardRun& run : runsOf(batch))
      found.push_back({run.firstShard, run.numShards, run.numElements});
    return found;
  }
  ShardTask task(std::uint32_t shard, std::vector<ShardPiece> pieces = {}) {
    return {&group_, {kGroup, shard, 1, 0}, std::move(pieces), 0};
  }

 private:
  Memory control_, slots_;
  TensorGroup group_;
};

using Found = std::vector<std::vector<std::uint64_t>>;

TEST_F(Runs, AreWholeTensorsInWhateverOrderTheirShardsCame) {
  EXPECT_EQ(runs({3, 0, 4, 6, 2, 5, 1}), (Found{{0, 4, 1000}, {4, 1, 16}, {5, 2, 500}}));
}

TEST_F(Runs, EndWhereAShardIsMissing) { EXPECT_EQ(runs({0, 1, 3}), (Found{{0, 2, 600}, {3, 1, 100}})); }

TEST_F(Runs, EndWhereAnotherWorkerContributed) {
  setFlags(2, 0, 1);
  EXPECT_EQ(runs({0, 1, 2, 3}), (Found{{0, 2, 600}, {2, 1, 300}, {3, 1, 100}}));
}

TEST_F(Runs, LeaveShardsAloneThatAreMeasured) {
  for (std::uint32_t shard = 0; shard < 4; ++shard) setFlags(shard, kPresent | kMeasure);
  EXPECT_EQ(runs({0, 1, 2, 3}), (Found{{0, 1, 300}, {1, 1, 300}, {2, 1, 300}, {3, 1, 100}}));
}

TEST_F(Runs, LeavePiecesAloneButThoseThatAreAllOfAShard) {
  EXPECT_EQ(runs(ShardBatch{task(1), task(0, {{0, 300}}), task(2, {{0, 64}, {128, 300}}), task(3)}),
            (Found{{0, 2, 600}, {2, 1, 64}, {2, 1, 172}, {3, 1, 100}}));
  EXPECT_EQ(runsOf({task(2, {{0, 64}, {128, 300}})}).back().firstElement, 128U);
}

}  // namespace
}  // namespace coarse::test::batched_compute_test
