/// Direct all-reduce in memory that the workers share: the bits of the memory devices, by the workers' own
/// hands.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <vector>

#include "contributions.hpp"
#include "fixture.hpp"

namespace coarse::test::direct_allreduce_test {
namespace {

constexpr std::uint8_t kByWorkers = kPresent | kDirectAllReduce | kAllToAll;

/// Where all clients of a test wait for each other.
class Gate {
 public:
  explicit Gate(std::size_t numThreads) : numThreads_(numThreads) {}
  void wait() {
    const std::size_t turn = numArrived_.fetch_add(1) / numThreads_;
    ASSERT_TRUE(eventually([&] { return numArrived_.load() >= (turn + 1) * numThreads_; }));
  }

 private:
  std::size_t numThreads_;
  std::atomic<std::size_t> numArrived_{0};
};

/// For every dtype, a tensor of less than a piece for each worker, and one of several shards.
std::vector<TensorSpec> everyKind(Algorithm algorithm) {
  std::vector<TensorSpec> tensors;
  for (const DType dtype : kEveryDType) {
    for (const ReduceOp op : kEveryOp) {
      tensors.push_back({7, dtype, op, algorithm});
      tensors.push_back({2011, dtype, op, algorithm});
    }
  }
  return tensors;
}

std::vector<std::uint32_t> allShards(const GroupPlan& plan) {
  std::vector<std::uint32_t> shards(plan.shards.size());
  std::iota(shards.begin(), shards.end(), 0);
  return shards;
}

struct Case {
  ClusterShape shape;
  Algorithm algorithm;
};

class WorkersReduce : public testing::TestWithParam<Case> {
 protected:
  /// Every client pushes all tensors at `step`, as `flags` by client say, and ends with all results.
  void synchronise(Cluster& cluster, const GroupPlan& plan, std::uint32_t step,
                   const std::vector<std::uint8_t>& flags) {
    Gate gate(plan.numClients);
    const bool byWorkers =
        std::all_of(flags.begin(), flags.end(), [](auto each) { return each == kByWorkers; });
    together(plan.numClients, [&](std::size_t client) {
      Client& self = cluster.client(client);
      for (const Shard& shard : plan.shards) {
        const Bytes bytes = contribution(shard.dtype, shard.numElements, client, step);
        std::memcpy(cluster.slots(plan, client) + shard.offset, bytes.data(), bytes.size());
      }
      for (std::uint32_t tensor = 0; tensor < plan.numTensors(); ++tensor)
        ASSERT_EQ(self.push(plan.id, tensor, flags[client], nullptr), WaitStatus::kDone);
      ASSERT_EQ(self.pullAll(plan.id, kPatienceSeconds), WaitStatus::kDone);
      if (!byWorkers) return;
      self.reducePieces(plan.id, allShards(plan));
      gate.wait();
      self.copyPieces(plan.id, allShards(plan));
      gate.wait();
    });
  }
  void expectResult(Cluster& cluster, const GroupPlan& plan, std::uint32_t step,
                    const std::vector<std::size_t>& clients) {
    for (std::size_t client = 0; client < plan.numClients; ++client) {
      for (const Shard& shard : plan.shards) {
        const Bytes expected = result(shard.dtype, shard.op, shard.numElements, clients, step,
                                      static_cast<std::uint32_t>(plan.numClients));
        ASSERT_EQ(std::memcmp(cluster.slots(plan, client) + shard.offset, expected.data(), expected.size()),
                  0)
            << "client " << client << ", tensor " << shard.tensor << ", step " << step;
      }
    }
  }
  static void open(Cluster& cluster, const GroupPlan& plan) {
    cluster.addGroup(plan);
    for (std::size_t client = 0; client < plan.numClients; ++client)
      cluster.client(client).addPeers(plan.id, cluster.slotsOf(plan));
    cluster.start();
  }
};

TEST_P(WorkersReduce, GivesTheBitsOfTheMemoryDevices) {
  Cluster cluster(GetParam().shape);
  const std::size_t numClients = GetParam().shape.numClients;
  const GroupPlan plan = makePlan(1, numClients, everyKind(GetParam().algorithm), 700);
  open(cluster, plan);
  std::vector<std::size_t> everybody(numClients);
  std::iota(everybody.begin(), everybody.end(), 0);
  for (std::uint32_t step = 1; step <= 6; ++step) {
    const std::uint8_t flags = step % 3 == 0 ? std::uint8_t{kPresent} : kByWorkers;
    synchronise(cluster, plan, step, std::vector<std::uint8_t>(numClients, flags));
    expectResult(cluster, plan, step, everybody);
  }
}

TEST_P(WorkersReduce, LeavesToMemoryDevicesWhatAWorkerHasNothingFor) {
  Cluster cluster(GetParam().shape);
  const std::size_t numClients = GetParam().shape.numClients;
  const GroupPlan plan = makePlan(1, numClients, everyKind(GetParam().algorithm), 700);
  open(cluster, plan);
  std::vector<std::uint8_t> flags(numClients, kByWorkers);
  flags[1] = kDirectAllReduce | kAllToAll;
  std::vector<std::size_t> others;
  for (std::size_t client = 0; client < numClients; ++client)
    if (client != 1) others.push_back(client);
  synchronise(cluster, plan, 1, flags);
  expectResult(cluster, plan, 1, others);
  EXPECT_EQ(cluster.client(0).contributors(plan.id, 0), numClients - 1) << "by which workers know";
}

INSTANTIATE_TEST_SUITE_P(Clusters, WorkersReduce,
                         testing::Values(Case{{2, 1, 1}, Algorithm::kDirect},
                                         Case{{2, 2, 2}, Algorithm::kGather},
                                         Case{{3, 2, 1}, Algorithm::kDirect},
                                         Case{{4, 4, 1}, Algorithm::kExchange}),
                         [](const auto& info) {
                           return nameOf({info.param.shape, info.index}) + "_" +
                                  std::to_string(static_cast<int>(info.param.algorithm));
                         });

TEST(OwnPieces, NeedTheSlotsOfAllWorkers) {
  Cluster cluster({2, 1, 1});
  const GroupPlan plan = makePlan(1, 2, {{100, DType::kFloat32, ReduceOp::kSum, Algorithm::kDirect}});
  cluster.addGroup(plan);
  Client& client = cluster.client(0);
  EXPECT_THROW(client.reducePieces(plan.id, {0}), std::invalid_argument);
  EXPECT_THROW(client.copyPieces(plan.id, {0}), std::invalid_argument);
  EXPECT_THROW(client.addPeers(plan.id, {cluster.slotsOf(plan)[0]}), std::invalid_argument);
  client.addPeers(plan.id, cluster.slotsOf(plan));
  EXPECT_THROW(client.reducePieces(plan.id, {1}), std::invalid_argument) << "there is one shard";
  EXPECT_THROW(client.setDirectAllReduceFlags(plan.id, {}), std::invalid_argument);
  EXPECT_THROW(client.setDirectAllReduceFlags(plan.id, {kPresent}), std::invalid_argument) << "not of a path";
}

}  // namespace
}  // namespace coarse::test::direct_allreduce_test
