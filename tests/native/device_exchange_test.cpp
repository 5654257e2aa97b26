/// DeviceExchange: the one result, with the bits of the direct algorithm, whichever devices hold the
/// contributions.
#include "coarse/device/device_exchange.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "contributions.hpp"
#include "fixture.hpp"

namespace coarse::test::device_exchange_test {
namespace {

/// For every dtype, a tensor that one device reduces, and one that is cut into pieces.
std::vector<TensorSpec> everyKind() {
  std::vector<TensorSpec> tensors;
  for (const DType dtype : kEveryDType) {
    const auto pieces = static_cast<std::uint32_t>(kSmallestExchangeBytes / itemBytes(dtype) + 13);
    for (const ReduceOp op : kEveryOp) {
      tensors.push_back({129, dtype, op, Algorithm::kExchange});
      tensors.push_back({pieces, dtype, op, Algorithm::kExchange});
    }
  }
  return tensors;
}

/// Devices by client: number `code` of all possible ones.
std::vector<std::uint16_t> routesOf(std::size_t code, std::size_t numClients, std::size_t numDevices) {
  std::vector<std::uint16_t> routes;
  for (std::size_t client = 0; client < numClients; ++client, code /= numDevices)
    routes.push_back(static_cast<std::uint16_t>(code % numDevices));
  return routes;
}

class Exchanges : public testing::TestWithParam<ClusterShape> {
 protected:
  /// All clients push what `fill` wrote to their slots, and wait for all results.
  template <typename Fill, typename Check>
  void synchronise(Cluster& cluster, const GroupPlan& plan, std::vector<std::vector<std::uint16_t>> routes,
                   Fill fill, Check check) {
    cluster.addToProxies(plan);
    together(plan.numClients, [&](std::size_t client) {
      const auto slots = cluster.addToClient(plan, client, routes[client]);
      fill(client, slots->data());
      const std::uint32_t numTensors = plan.shards.back().tensor + 1;
      for (std::uint32_t tensor = 0; tensor < numTensors; ++tensor)
        ASSERT_EQ(cluster.client(client).push(plan.id, tensor, kPresent, nullptr), WaitStatus::kDone);
      ASSERT_EQ(cluster.client(client).pullAll(plan.id, kPatienceSeconds), WaitStatus::kDone);
      check(client, slots->data());
      cluster.client(client).removeGroup(plan.id);
    });
    cluster.removeFromProxies(plan.id);
  }
};

TEST_P(Exchanges, EveryRouteOfEveryTypeAndOperation) {
  const std::size_t numClients = GetParam().numClients, numDevices = GetParam().numDevices;
  Cluster cluster(GetParam());
  cluster.start();
  std::size_t numRoutes = 1;
  for (std::size_t i = 0; i < numClients; ++i) numRoutes *= numDevices;
  for (std::size_t code = 0; code < numRoutes; ++code) {
    const GroupPlan plan = makePlan(static_cast<std::uint32_t>(code), numClients, everyKind());
    const std::vector<std::uint16_t> device = routesOf(code, numClients, numDevices);
    std::vector<std::vector<std::uint16_t>> routes;
    for (std::size_t client = 0; client < numClients; ++client)
      routes.emplace_back(plan.shards.size(), device[client]);
    std::vector<std::size_t> everybody(numClients);
    std::iota(everybody.begin(), everybody.end(), std::size_t{0});
    synchronise(
        cluster, plan, routes,
        [&](std::size_t client, std::byte* slots) {
          for (const Shard& shard : plan.shards) {
            const Bytes data = contribution(shard.dtype, shard.numElements, client, 1);
            std::memcpy(slots + shard.offset, data.data(), data.size());
          }
        },
        [&](std::size_t client, const std::byte* slots) {
          for (const Shard& shard : plan.shards) {
            const Bytes expected = result(shard.dtype, shard.op, shard.numElements, everybody, 1,
                                          static_cast<std::uint32_t>(numClients));
            ASSERT_EQ(std::memcmp(slots + shard.offset, expected.data(), expected.size()), 0)
                << "routes " << code << ", client " << client << ", dtype " << static_cast<int>(shard.dtype)
                << ", op " << static_cast<int>(shard.op) << ", " << shard.numElements << " elements";
          }
        });
  }
}

// Sums of these depend on the order of the additions.
TEST_P(Exchanges, RoundAsTheDirectAlgorithmWhateverTheRoutes) {
  const std::size_t numClients = GetParam().numClients, numDevices = GetParam().numDevices;
  Cluster cluster(GetParam());
  cluster.start();
  std::mt19937 random(7);
  std::vector<std::vector<float>> values(numClients, std::vector<float>(50021));
  std::lognormal_distribution<float> spread(0, 10);
  for (auto& ofClient : values) {
    for (float& value : ofClient) value = spread(random);
  }
  Bytes direct;
  for (std::uint32_t run = 0; run < 6; ++run) {
    const Algorithm algorithm = run == 0 ? Algorithm::kDirect : Algorithm::kExchange;
    const GroupPlan plan =
        makePlan(run, numClients, {{50021, DType::kFloat32, ReduceOp::kMean, algorithm}}, 20011);
    std::vector<std::vector<std::uint16_t>> routes(numClients);
    for (auto& ofClient : routes) {
      for (std::size_t shard = 0; shard < plan.shards.size(); ++shard)
        ofClient.push_back(static_cast<std::uint16_t>(random() % numDevices));
    }
    std::vector<Bytes> results(numClients);
    synchronise(
        cluster, plan, routes,
        [&](std::size_t client, std::byte* slots) {
          std::memcpy(slots, values[client].data(), values[client].size() * sizeof(float));
        },
        [&](std::size_t client, const std::byte* slots) {
          results[client].assign(slots, slots + plan.slotBytes);
        });
    if (run == 0) direct = results[0];
    for (const Bytes& got : results) ASSERT_EQ(got, direct) << "run " << run;
  }
}

TEST_P(Exchanges, AbsentContributionsAreNotReadButGetTheResult) {
  const std::size_t numClients = GetParam().numClients;
  Cluster cluster(GetParam());
  const GroupPlan plan = makePlan(1, numClients, everyKind());
  cluster.addGroup(plan);
  cluster.start();
  const auto numTensors = static_cast<std::uint32_t>(plan.shards.size());
  for (std::uint32_t step = 1; step <= numClients + 1; ++step) {
    const std::size_t only = step - 1;  // in the last step nobody
    together(numClients, [&](std::size_t client) {
      for (std::uint32_t tensor = 0; tensor < numTensors; ++tensor) {
        const Shard& shard = plan.shards[tensor];
        const Bytes data = contribution(shard.dtype, shard.numElements, client, step);
        ASSERT_EQ(cluster.client(client).push(1, tensor, client == only ? kPresent : 0, data.data()),
                  WaitStatus::kDone);
      }
      Bytes got;
      for (std::uint32_t tensor = 0; tensor < numTensors; ++tensor) {
        const Shard& shard = plan.shards[tensor];
        const auto resultOf = [&](std::size_t contributor, std::uint32_t inStep) {
          return result(shard.dtype, shard.op, shard.numElements, {contributor}, inStep,
                        static_cast<std::uint32_t>(numClients));
        };
        // What nobody contributes to is not brought to slots that lie elsewhere: there the last result stays.
        const Bytes before = GetParam().isDeferred
                                 ? resultOf(numClients - 1, step - 1)
                                 : contribution(shard.dtype, shard.numElements, client, step);
        const Bytes expected = only == numClients ? before : resultOf(only, step);
        got.resize(expected.size());
        ASSERT_EQ(cluster.client(client).pull(1, tensor, got.data(), kPatienceSeconds), WaitStatus::kDone);
        ASSERT_EQ(got, expected) << "step " << step << ", tensor " << tensor;
        ASSERT_EQ(cluster.client(client).contributors(1, tensor), only == numClients ? 0U : 1U);
      }
    });
  }
}

TEST_P(Exchanges, BuffersThatAreNotRegistered) {
  const std::size_t numClients = GetParam().numClients;
  Cluster cluster(GetParam());
  cluster.addGroup(makeDynamicPlan(1, numClients, 4, 100'000, Algorithm::kExchange));
  cluster.start();
  constexpr std::size_t kNumElements = 300'007;
  std::vector<std::size_t> everybody(numClients);
  std::iota(everybody.begin(), everybody.end(), std::size_t{0});
  together(numClients, [&](std::size_t client) {
    for (const DType dtype : {DType::kInt32, DType::kBFloat16}) {
      Bytes buffer = contribution(dtype, kNumElements, client, 1);
      ASSERT_EQ(cluster.client(client).allReduce(1, buffer.data(), kNumElements, dtype, ReduceOp::kSum, true,
                                                 kPatienceSeconds),
                WaitStatus::kDone);
      ASSERT_EQ(buffer, result(dtype, ReduceOp::kSum, kNumElements, everybody, 1, 1));
    }
  });
}

TEST_P(Exchanges, RoutesCanChangeBetweenSteps) {
  const std::size_t numClients = GetParam().numClients, numDevices = GetParam().numDevices;
  Cluster cluster(GetParam());
  const GroupPlan plan =
      makePlan(1, numClients, {{60'000, DType::kFloat32, ReduceOp::kSum, Algorithm::kExchange}}, 30'000);
  cluster.addGroup(plan);
  cluster.start();
  std::vector<std::size_t> everybody(numClients);
  std::iota(everybody.begin(), everybody.end(), std::size_t{0});
  together(numClients, [&](std::size_t client) {
    Client& own = cluster.client(client);
    for (std::uint32_t step = 1; step <= 10; ++step) {
      Bytes buffer = contribution(DType::kFloat32, 60'000, client, step);
      ASSERT_EQ(own.push(1, 0, kPresent, buffer.data()), WaitStatus::kDone);
      // Not for the shards that are under way.
      own.setRoutes(
          1, std::vector<std::uint16_t>(2, static_cast<std::uint16_t>((client * step + step) % numDevices)));
      ASSERT_EQ(own.pull(1, 0, buffer.data(), kPatienceSeconds), WaitStatus::kDone);
      ASSERT_EQ(buffer, result(DType::kFloat32, ReduceOp::kSum, 60'000, everybody, step, 1)) << step;
    }
    EXPECT_THROW(own.setRoutes(1, {0}), std::invalid_argument);
    EXPECT_THROW(own.setRoutes(1, std::vector<std::uint16_t>(2, numDevices)), std::invalid_argument);
  });
}

INSTANTIATE_TEST_SUITE_P(All, Exchanges,
                         testing::Values(ClusterShape{1, 1, 1}, ClusterShape{3, 1, 1}, ClusterShape{2, 2, 1},
                                         ClusterShape{3, 3, 1}, ClusterShape{4, 2, 2}, kDeferred<2, 2, 1>),
                         nameOf);

TEST(ExchangeSetUp, WithoutExchangeLogsRefusesAGroupThatNeedsThem) {
  const Memory doorbells(sizeof(Doorbell)), slots(4096), small(64);
  const Fd events(::eventfd(0, EFD_CLOEXEC));
  Proxy proxy(ProxyConfig{}, doorbells.fd, events);
  const GroupPlan plan = makePlan(1, 1, {{100, DType::kFloat32, ReduceOp::kSum, Algorithm::kExchange}});
  const Memory control(GroupControl::numBytes(1, 1));
  EXPECT_THROW(proxy.addGroup(plan, control.fd, {slots.fd}, true), std::invalid_argument);
  ProxyConfig config;
  config.exchangeLogsFd = small.fd;
  EXPECT_THROW(Proxy(config, doorbells.fd, events), std::invalid_argument);
}

}  // namespace
}  // namespace coarse::test::device_exchange_test
