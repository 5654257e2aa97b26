/// Emulated links and probes: the real data path, in the time that another machine's links would take.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "contributions.hpp"
#include "fixture.hpp"

namespace coarse::test::emulation_test {
namespace {

LinkTableValues separateLinks(const ClusterShape& shape, double gbytesPerSecond, double latencyUs) {
  return test::separateLinks(shape.numClients + shape.numDevices, gbytesPerSecond, latencyUs);
}

GroupPlan tensorOf(Algorithm algorithm, std::size_t numClients, std::uint32_t numElements,
                   std::uint32_t shardElements) {
  return makePlan(1, numClients, {{numElements, DType::kFloat32, ReduceOp::kSum, algorithm}}, shardElements);
}

GroupPlan exchangedTensor(std::size_t numClients, std::uint32_t numElements, std::uint32_t shardElements) {
  return tensorOf(Algorithm::kExchange, numClients, numElements, shardElements);
}

/// Registers a group; each client's contributions go to its own device, as rings require.
void addWithLocalRoutes(Cluster& cluster, const GroupPlan& plan) {
  cluster.addToProxies(plan);
  for (std::size_t client = 0; client < plan.numClients; ++client) {
    const auto device = static_cast<std::uint16_t>(client % cluster.shape().numDevices);
    cluster.addToClient(plan, client, std::vector<std::uint16_t>(plan.shards.size(), device));
  }
}

/// One step of all clients, each through its own device. @returns its longest seconds.
double step(Cluster& cluster, const GroupPlan& plan, std::uint32_t number, std::uint8_t flags = kPresent) {
  const std::size_t numElements = plan.slotBytes / sizeof(float);
  std::vector<std::size_t> everybody(plan.numClients);
  std::iota(everybody.begin(), everybody.end(), std::size_t{0});
  const Bytes expected = result(DType::kFloat32, ReduceOp::kSum, numElements, everybody, number, 1);
  std::vector<Bytes> buffers;
  for (std::size_t client = 0; client < plan.numClients; ++client)
    buffers.push_back(contribution(DType::kFloat32, numElements, client, number));
  const MonotonicNs begin = monotonicNow();
  std::vector<MonotonicNs> ends(plan.numClients);
  together(plan.numClients, [&](std::size_t client) {
    Client& own = cluster.client(client);
    ASSERT_EQ(own.push(plan.id, 0, flags, buffers[client].data()), WaitStatus::kDone);
    ASSERT_EQ(own.pull(plan.id, 0, buffers[client].data(), kPatienceSeconds), WaitStatus::kDone);
    ends[client] = monotonicNow();
    EXPECT_EQ(buffers[client], expected);
  });
  return static_cast<double>(*std::max_element(ends.begin(), ends.end()) - begin) / 1e9;
}

constexpr std::uint32_t kMiBOfFloats = 1 << 18;

// Nobody is faster than the links; how much slower a loaded machine is, only the benchmark judges.
class EveryMemory : public testing::TestWithParam<ClusterShape> {};
INSTANTIATE_TEST_SUITE_P(EmulatedLinks, EveryMemory,
                         testing::Values(ClusterShape{2, 2, 1}, kDeferred<2, 2, 1>),
                         [](const auto& info) { return nameOf(info); });

TEST_P(EveryMemory, CarriesPushReductionAndPullInNoLessThanTheirTime) {
  const ClusterShape shape = GetParam();
  Cluster cluster(shape, separateLinks(shape, 0.1, 1000));
  const GroupPlan plan = exchangedTensor(2, 2 * kMiBOfFloats, kMiBOfFloats);
  cluster.addGroup(plan);
  cluster.start();
  const double seconds = step(cluster, plan, 1);
  // Push and pull take 1 MiB per link each, the exchange half of it each way; four latencies.
  const double perMiB = (1 << 20) / 0.1e9;
  EXPECT_GE(seconds, perMiB * (1 + 0.5 + 0.5 + 1) + 4e-3 - 1e-6);
  EXPECT_LT(seconds, kPatienceSeconds);
  const Pacer pacer = cluster.pacer();
  EXPECT_EQ(pacer.statistics(0, 2).numBytes, std::uint64_t{1} << 20);
  EXPECT_EQ(pacer.statistics(0, 3).numBytes, std::uint64_t{1} << 20);
  EXPECT_EQ(pacer.statistics(2, 0).numBytes, std::uint64_t{1} << 20);
  EXPECT_EQ(pacer.statistics(2, 3).numBytes, std::uint64_t{2} << 20) << "half of two shards, there and back";
  EXPECT_GT(pacer.arrivals().numArrivals, 0U);
}

TEST_P(EveryMemory, CarriesTheStepsOfRings) {
  const ClusterShape shape = GetParam();
  Cluster cluster(shape, separateLinks(shape, 0.1, 1000));
  // Two shards, so two rings of opposite directions; each shard is one chunk of two messages.
  const std::uint32_t shardElements = 2 * kHostMessageBytes / sizeof(float);
  const GroupPlan plan = tensorOf(Algorithm::kRing, 2, 2 * shardElements, shardElements);
  addWithLocalRoutes(cluster, plan);
  cluster.start();
  const double seconds = step(cluster, plan, 1);
  const double perMessage = kHostMessageBytes / 0.1e9;
  // Both shards share the links to and from the workers. Their rings send both ways at once.
  EXPECT_GE(seconds, perMessage * (2 + 2 * 2 + 2) + 4e-3 - 1e-6);
  const Pacer pacer = cluster.pacer();
  EXPECT_EQ(pacer.statistics(2, 3).numBytes, 4 * kHostMessageBytes);
  EXPECT_EQ(pacer.statistics(3, 2).numBytes, 4 * kHostMessageBytes);
  for (std::size_t worker = 0; worker < 2; ++worker) {
    EXPECT_EQ(pacer.statistics(worker, 2 + worker).numBytes, plan.slotBytes);
    EXPECT_EQ(pacer.statistics(2 + worker, worker).numBytes, plan.slotBytes);
  }
}

TEST_P(EveryMemory, ReducesDirectlyAtOneDeviceInTurn) {
  const ClusterShape shape = GetParam();
  Cluster cluster(shape, separateLinks(shape, 0.1, 1000));
  const GroupPlan plan = tensorOf(Algorithm::kDirect, 2, kMiBOfFloats, kMiBOfFloats / 2);
  addWithLocalRoutes(cluster, plan);
  cluster.start();
  const double seconds = step(cluster, plan, 1);
  // One shard after the other is pushed, contributed, sent back and pulled, half a MiB each.
  EXPECT_GE(seconds, (1 << 19) / 0.1e9 * (2 + 1 + 1 + 1) + 4e-3 - 1e-6);
  const Pacer pacer = cluster.pacer();
  EXPECT_EQ(pacer.statistics(2, 3).numBytes, std::uint64_t{1} << 20) << "a contribution, and a result";
  EXPECT_EQ(pacer.statistics(3, 2).numBytes, std::uint64_t{1} << 20);
}

TEST(Rings, ReduceManyShardsStepAfterStep) {
  for (const std::size_t numCores : {1, 3}) {
    const ClusterShape shape{6, 3, numCores};
    Cluster cluster(shape, separateLinks(shape, 10, 1));
    const GroupPlan plan = tensorOf(Algorithm::kRing, 6, 40000, 900);
    addWithLocalRoutes(cluster, plan);
    cluster.start();
    for (std::uint32_t number = 1; number <= 4; ++number) step(cluster, plan, number);
  }
}

TEST(Rings, OfOneDeviceReduceThere) {
  const ClusterShape shape{3, 1, 1};
  Cluster cluster(shape, separateLinks(shape, 0.1, 5));
  const GroupPlan plan = tensorOf(Algorithm::kRing, 3, kMiBOfFloats, kMiBOfFloats);
  addWithLocalRoutes(cluster, plan);
  cluster.start();
  EXPECT_GE(step(cluster, plan, 1), 2 * (1 << 20) / 0.1e9 - 1e-6) << "push and pull";
}

TEST(Rings, CompleteWhatNobodyHasContributedTo) {
  const ClusterShape shape{2, 2, 1};
  Cluster cluster(shape, separateLinks(shape, 10, 1));
  const GroupPlan plan = tensorOf(Algorithm::kRing, 2, 100, 100);
  addWithLocalRoutes(cluster, plan);
  cluster.start();
  together(2, [&](std::size_t client) {
    Bytes kept(plan.slotBytes, std::byte{7});
    ASSERT_EQ(cluster.client(client).push(plan.id, 0, 0, kept.data()), WaitStatus::kDone);
    EXPECT_EQ(cluster.client(client).pull(plan.id, 0, kept.data(), kPatienceSeconds), WaitStatus::kDone);
  });
  EXPECT_EQ(cluster.pacer().statistics(2, 3).numBytes + cluster.pacer().statistics(3, 2).numBytes, 0U);
}

TEST(EmulatedDirectAllReduce, IsARingOverTheLinksBetweenWorkersAlone) {
  const ClusterShape shape{4, 2, 1};
  Cluster cluster(shape, separateLinks(shape, 0.1, 1000));
  const GroupPlan plan = exchangedTensor(4, kMiBOfFloats, kMiBOfFloats);
  cluster.addGroup(plan);
  cluster.start();
  const double seconds = step(cluster, plan, 1, kPresent | kDirectAllReduce);
  // Six iterations, in each of which a quarter of the tensor goes to the next worker.
  EXPECT_GE(seconds, 6 * ((1 << 18) / 0.1e9 + 1e-3) - 1e-6);
  const Pacer pacer = cluster.pacer();
  for (std::size_t worker = 0; worker < 4; ++worker) {
    EXPECT_EQ(pacer.statistics(worker, (worker + 1) % 4).numBytes, std::uint64_t{6} << 18);
    EXPECT_EQ(pacer.statistics((worker + 1) % 4, worker).numBytes, 0U);
    for (std::size_t device = 4; device < 6; ++device) {
      EXPECT_EQ(pacer.statistics(worker, device).numBytes, 0U);
      EXPECT_EQ(pacer.statistics(device, worker).numBytes, 0U);
    }
  }
}

/// Every worker sends `bytesToEach` to every other one, and nothing to a memory device.
void expectTrafficBetweenAllWorkers(const Pacer& pacer, std::size_t numWorkers, std::uint64_t bytesToEach) {
  for (std::size_t source = 0; source < numWorkers; ++source) {
    for (std::size_t target = 0; target < pacer.numEndpoints(); ++target) {
      if (source == target) continue;
      EXPECT_EQ(pacer.statistics(source, target).numBytes, target < numWorkers ? bytesToEach : 0);
    }
  }
}

TEST(EmulatedDirectAllReduce, AllGatherTakesOneLatency) {
  const ClusterShape shape{4, 2, 1};
  Cluster cluster(shape, separateLinks(shape, 0.1, 1000));
  const GroupPlan plan = exchangedTensor(4, kMiBOfFloats, kMiBOfFloats);
  cluster.addGroup(plan);
  cluster.start();
  EXPECT_GE(step(cluster, plan, 1, kPresent | kDirectAllReduce | kAllGather),
            (1 << 20) / 0.1e9 + 1e-3 - 1e-6);
  expectTrafficBetweenAllWorkers(cluster.pacer(), 4, 1 << 20);
}

TEST(EmulatedDirectAllReduce, AllToAllTakesTwoLatenciesAndTheBytesOfARing) {
  const ClusterShape shape{4, 2, 1};
  Cluster cluster(shape, separateLinks(shape, 0.1, 1000));
  const GroupPlan plan = exchangedTensor(4, kMiBOfFloats, kMiBOfFloats);
  cluster.addGroup(plan);
  cluster.start();
  EXPECT_GE(step(cluster, plan, 1, kPresent | kDirectAllReduce | kAllToAll),
            2 * ((1 << 18) / 0.1e9 + 1e-3) - 1e-6);
  expectTrafficBetweenAllWorkers(cluster.pacer(), 4, 2 << 18);
}

/// Bytes that workers send to each other, by source and target, in one step with a relay on all workers.
std::vector<std::uint64_t> relayedBytes(std::size_t numWorkers, Relay relay, double& seconds) {
  const ClusterShape shape{numWorkers, 1, 1};
  Cluster cluster(shape, separateLinks(shape, 0.1, 1000));
  const GroupPlan plan = exchangedTensor(numWorkers, kMiBOfFloats, kMiBOfFloats);
  cluster.addGroup(plan);
  for (std::size_t worker = 0; worker < numWorkers; ++worker)
    cluster.client(worker).setDirectAllReduceFlags(plan.id, {kDirectAllReduce},
                                                   {static_cast<std::uint8_t>(relay)});
  cluster.start();
  seconds = step(cluster, plan, 1);
  std::vector<std::uint64_t> bytes;
  for (std::size_t source = 0; source < numWorkers; ++source)
    for (std::size_t target = 0; target < numWorkers; ++target)
      bytes.push_back(source == target ? 0 : cluster.pacer().statistics(source, target).numBytes);
  return bytes;
}

constexpr std::uint64_t kHalf = 1 << 19;

TEST(EmulatedDirectAllReduce, TwoWayRingSendsHalfOfTheBytesEachWayAround) {
  double seconds = 0;
  const std::uint64_t each = 6 * (1 << 17);  // in 6 iterations half of a quarter
  const std::vector<std::uint64_t> expected{0, each, 0, each, each, 0, each, 0,
                                            0, each, 0, each, each, 0, each, 0};
  EXPECT_EQ(relayedBytes(4, Relay::kTwoWayRing, seconds), expected);
  EXPECT_GE(seconds, 6 * ((1 << 17) / 0.1e9 + 1e-3) - 1e-6);
}

TEST(EmulatedDirectAllReduce, TreesHaveOtherInnerWorkers) {
  double seconds = 0;
  // One tree: 0 - 2 - {1, 3}; the other one: 3 - 1 - {2, 0}.
  const std::vector<std::uint64_t> expected{0,     kHalf,     kHalf, 0,     kHalf, 0,     2 * kHalf, kHalf,
                                            kHalf, 2 * kHalf, 0,     kHalf, 0,     kHalf, kHalf,     0};
  EXPECT_EQ(relayedBytes(4, Relay::kTree, seconds), expected);
  EXPECT_GE(seconds, 4 * (kHalf / 0.1e9 + 1e-3) - 1e-6) << "two levels up and two down";
}

class Relays : public testing::TestWithParam<std::size_t> {};

TEST_P(Relays, MoveTheBytesOfAnAllReduce) {
  const std::size_t p = GetParam();
  for (const Relay relay : {Relay::kRing, Relay::kTwoWayRing, Relay::kTree}) {
    double seconds = 0;
    const std::vector<std::uint64_t> bytes = relayedBytes(p, relay, seconds);
    const double total = static_cast<double>(std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0}));
    EXPECT_NEAR(total / (2.0 * static_cast<double>(p - 1) * (1 << 20)), 1.0, 1e-4)
        << p << " workers, relay " << static_cast<int>(relay);
  }
}

INSTANTIATE_TEST_SUITE_P(Workers, Relays, testing::Values(2, 3, 5, 6));

TEST(EmulatedDirectAllReduce, WorkersWithOtherRelaysAreReported) {
  const ClusterShape shape{2, 1, 1};
  Cluster cluster(shape, separateLinks(shape, 10, 1));
  const GroupPlan plan = exchangedTensor(2, 100, 100);
  cluster.addGroup(plan);
  cluster.client(0).setDirectAllReduceFlags(plan.id, {kDirectAllReduce},
                                            {static_cast<std::uint8_t>(Relay::kTree)});
  cluster.client(1).setDirectAllReduceFlags(plan.id, {kDirectAllReduce});
  EXPECT_THROW(cluster.client(1).setDirectAllReduceFlags(plan.id, {kDirectAllReduce}, {kNumRelays}),
               std::invalid_argument);
  cluster.start();
  for (std::size_t worker = 0; worker < 2; ++worker) {
    ASSERT_EQ(cluster.client(worker).push(plan.id, 0, kPresent, nullptr), WaitStatus::kDone);
    cluster.client(worker).flush();
  }
  const auto events = cluster.events(0);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_NE(events[0].message.find("workers disagree on whether or how they reduce tensor #"),
            std::string::npos);
}

TEST(EmulatedDirectAllReduce, TakesTurnsWithMemoryDevicesAndAddsInTheSameOrder) {
  const ClusterShape shape{3, 3, 1};
  Cluster cluster(shape, separateLinks(shape, 10, 1));
  const GroupPlan plan = exchangedTensor(3, 10000, 3000);
  cluster.addGroup(plan);
  cluster.start();
  for (std::uint32_t number = 1; number <= 6; number += 2) {
    const std::uint8_t how = number == 3 ? kAllGather : number == 5 ? kAllToAll : 0;
    step(cluster, plan, number, kPresent | kDirectAllReduce | how);
    step(cluster, plan, number + 1);
  }
}

class Disagreement : public testing::TestWithParam<std::uint8_t> {};

TEST_P(Disagreement, OnDirectAllReduceIsReported) {
  const ClusterShape shape{2, 1, 1};
  Cluster cluster(shape, separateLinks(shape, 10, 1));
  const GroupPlan plan = exchangedTensor(2, 100, 100);
  cluster.addGroup(plan);
  cluster.start();
  ASSERT_EQ(cluster.client(0).push(plan.id, 0, kPresent | kDirectAllReduce, nullptr), WaitStatus::kDone);
  ASSERT_EQ(cluster.client(1).push(plan.id, 0, kPresent | GetParam(), nullptr), WaitStatus::kDone);
  cluster.client(0).flush();
  cluster.client(1).flush();
  const auto events = cluster.events(0);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_NE(events[0].message.find("workers disagree on whether or how they reduce tensor #"),
            std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(All, Disagreement,
                         testing::Values(0, kDirectAllReduce | kAllGather, kDirectAllReduce | kAllToAll));

TEST(EmulatedDirectAllReduce, IsRefusedWhereThereIsNone) {
  Cluster cluster({1, 1, 1});
  const GroupPlan plan = makePlan(1, 1, {{100, DType::kFloat32, ReduceOp::kSum, Algorithm::kRing}});
  cluster.addGroup(plan);
  cluster.start();
  ASSERT_EQ(cluster.client(0).push(plan.id, 0, kPresent | kDirectAllReduce, nullptr), WaitStatus::kDone);
  cluster.client(0).flush();
  const auto events = cluster.events(0);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_NE(events[0].message.find("cannot be reduced by direct all-reduce"), std::string::npos);
}

TEST(Routes, CanChangeBetweenSteps) {
  const ClusterShape shape{3, 3, 1};
  Cluster cluster(shape, separateLinks(shape, 10, 1));
  const GroupPlan plan = exchangedTensor(3, 10000, 3000);
  cluster.addGroup(plan);
  cluster.start();
  for (std::uint32_t number = 1; number <= 6; ++number) {
    step(cluster, plan, number);
    for (std::size_t client = 0; client < 3; ++client) {
      const auto device = static_cast<std::uint16_t>((client + number) % 3);
      cluster.client(client).setRoutes(plan.id, std::vector<std::uint16_t>(plan.shards.size(), device));
    }
  }
  EXPECT_THROW(cluster.client(0).setRoutes(plan.id, {0}), std::invalid_argument);
  EXPECT_THROW(cluster.client(0).setRoutes(plan.id, std::vector<std::uint16_t>(plan.shards.size(), 3)),
               std::invalid_argument);
}

TEST(EmulatedLinks, OneDeviceNeedsNoExchange) {
  const ClusterShape shape{3, 1, 1};
  Cluster cluster(shape, separateLinks(shape, 1, 5));
  const GroupPlan plan = exchangedTensor(3, 10000, 10000);
  cluster.addGroup(plan);
  cluster.start();
  for (std::uint32_t number = 1; number <= 3; ++number) step(cluster, plan, number);
}

TEST(EmulatedLinks, DegradeWhileInUse) {
  const ClusterShape shape{2, 1, 1};
  const LinkTableValues links = separateLinks(shape, 10, 0);
  Cluster cluster(shape, links);
  const GroupPlan plan = exchangedTensor(2, kMiBOfFloats, kMiBOfFloats);
  cluster.addGroup(plan);
  cluster.start();
  step(cluster, plan, 1);
  Pacer pacer = cluster.pacer();
  for (std::size_t bucket = 0; bucket < links.gbytesPerSecond.size(); ++bucket)
    pacer.setBandwidth(bucket, 0.02);
  EXPECT_GE(step(cluster, plan, 2), 2 * (1 << 20) / 0.02e9 - 1e-6);
}

TEST(EmulatedLinks, RefuseWhatWouldPassOverThem) {
  const ClusterShape shape{2, 2, 1};
  Cluster cluster(shape, separateLinks(shape, 10, 0));
  for (const Algorithm algorithm : {Algorithm::kGather, Algorithm::kNccl})
    EXPECT_THROW(cluster.addToProxies(tensorOf(algorithm, 2, 100, 100)), std::invalid_argument);
  GroupPlan updated = tensorOf(Algorithm::kDirect, 2, 100, 100);
  updated.hasOptimizer = true;
  EXPECT_THROW(cluster.addToProxies(updated), std::invalid_argument);
  EXPECT_THROW(Cluster(shape, separateLinks({1, 2, 1}, 10, 0)), std::invalid_argument)
      << "an endpoint is missing";
}

TEST(EmulatedLinks, AnEvictedWorkerIsToldOf) {
  const ClusterShape shape{1, 1, 1};
  Cluster cluster(shape, separateLinks(shape, 10, 0));
  cluster.addGroup(exchangedTensor(1, 100, 100));
  cluster.start();
  Descriptor descriptor;
  descriptor.group = 1;
  descriptor.shard = 99;
  descriptor.step = 1;
  descriptor.flags = kPresent;
  cluster.tell(0, 0, descriptor);
  const std::vector<ProxyEvent> events = cluster.events(0);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_NE(events[0].message.find("shard 99 of 1"), std::string::npos) << events[0].message;
}

// ---- probes ----

GroupPlan probeGroup(std::size_t numClients, std::uint32_t numTensors, std::uint32_t numBytes) {
  return makePlan(
      7, numClients,
      std::vector<TensorSpec>(numTensors, {numBytes, DType::kUInt8, ReduceOp::kSum, Algorithm::kProbe}));
}

constexpr std::uint32_t kProbeBytes = 1 << 20;

ClientProbe probeOf(ProbeKind kind, std::uint32_t tensor = 0, std::uint8_t target = 0) {
  return {tensor, 0, {kind, target, 1, kProbeBytes}};
}

TEST(Probes, CopyWhatTheySay) {
  const ClusterShape shape{2, 2, 1};
  Cluster cluster(shape);
  const GroupPlan plan = probeGroup(2, 2, kProbeBytes);
  cluster.addToProxies(plan);
  const auto own = cluster.addToClient(plan, 0), other = cluster.addToClient(plan, 1);
  cluster.start();
  std::memset(own->data(), 7, kProbeBytes);
  std::vector<double> seconds;
  const auto probe = [&](const ClientProbe& request) {
    EXPECT_EQ(cluster.client(0).probe(plan.id, {request}, kPatienceSeconds, seconds), WaitStatus::kDone);
    ASSERT_EQ(seconds.size(), 1U);
    EXPECT_GT(seconds[0], 0);
  };
  probe(probeOf(ProbeKind::kPush));
  std::memset(own->data(), 0, kProbeBytes);
  probe(probeOf(ProbeKind::kPull));
  EXPECT_EQ(own->data()[kProbeBytes - 1], std::byte{7}) << "what was pushed comes back";
  probe(probeOf(ProbeKind::kBetweenDevices, 0, 1));
  EXPECT_EQ(other->data()[0], std::byte{7}) << "worker 1's slots lie at device 1";
  std::memset(own->data(), 9, kProbeBytes);
  probe(probeOf(ProbeKind::kBetweenWorkers, 0, 1));
  EXPECT_EQ(other->data()[kProbeBytes - 1], std::byte{9});
}

TEST(Probes, TakeTheTimeOfTheirLinkBothWaysAtOnce) {
  const ClusterShape shape{2, 2, 1};
  LinkTableValues links = separateLinks(shape, 0.1, 100);
  links.timeDilation = 2;
  Cluster cluster(shape, links);
  const GroupPlan plan = probeGroup(2, 2, kProbeBytes);
  cluster.addToProxies(plan);
  cluster.addToClient(plan, 0);
  cluster.start();
  const double alone = 2 * (kProbeBytes / 0.1e9 + 100e-6);
  std::vector<double> seconds;
  for (const ProbeKind kind :
       {ProbeKind::kPush, ProbeKind::kPull, ProbeKind::kBetweenDevices, ProbeKind::kBetweenWorkers}) {
    ASSERT_EQ(cluster.client(0).probe(plan.id, {probeOf(kind, 0, 1)}, kPatienceSeconds, seconds),
              WaitStatus::kDone);
    EXPECT_GE(seconds[0], alone - 1e-6);
  }
  const MonotonicNs begin = monotonicNow();
  ASSERT_EQ(cluster.client(0).probe(plan.id, {probeOf(ProbeKind::kPush, 0), probeOf(ProbeKind::kPull, 1)},
                                    kPatienceSeconds, seconds),
            WaitStatus::kDone);
  EXPECT_GE(std::min(seconds[0], seconds[1]), alone - 1e-6);
  EXPECT_LE(std::max(seconds[0], seconds[1]), static_cast<double>(monotonicNow() - begin) / 1e9);
  const Pacer pacer = cluster.pacer();
  EXPECT_EQ(pacer.statistics(0, 2).numTransfers, 2U);
  EXPECT_EQ(pacer.statistics(2, 0).numTransfers, 2U);
  EXPECT_EQ(pacer.statistics(2, 3).numTransfers, 1U);
  EXPECT_EQ(pacer.statistics(0, 1).numTransfers, 1U);
}

TEST(Probes, RefuseToBePostedTwiceOrBeyondTheirDevices) {
  Cluster cluster({1, 1, 1});
  const GroupPlan plan = probeGroup(1, 1, kProbeBytes);
  cluster.addGroup(plan);
  std::vector<double> seconds;
  ClientProbe elsewhere = probeOf(ProbeKind::kPush);
  elsewhere.device = 1;
  EXPECT_THROW(cluster.client(0).probe(plan.id, {elsewhere}, 1, seconds), std::invalid_argument);
  const std::vector<ClientProbe> twice(2, probeOf(ProbeKind::kPush));
  EXPECT_THROW(cluster.client(0).probe(plan.id, twice, 1, seconds), std::invalid_argument);
}

class MalformedProbes : public testing::TestWithParam<ProbeRequest> {};

TEST_P(MalformedProbes, EvictTheirSender) {
  Cluster cluster({2, 1, 1});
  cluster.addGroup(probeGroup(2, 1, 100));
  cluster.start();
  Descriptor descriptor;
  descriptor.group = 7;
  descriptor.step = 1;
  GetParam().writeTo(descriptor);
  cluster.tell(0, 0, descriptor);
  const std::vector<ProxyEvent> events = cluster.events(0);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].client, 0);
  EXPECT_NE(events[0].message.find("probe"), std::string::npos) << events[0].message;
}

INSTANTIATE_TEST_SUITE_P(All, MalformedProbes,
                         testing::Values(ProbeRequest{static_cast<ProbeKind>(4), 0, 0, 10},
                                         ProbeRequest{ProbeKind::kPush, 0, 0, 101},
                                         ProbeRequest{ProbeKind::kPush, 2, 0, 10},
                                         ProbeRequest{ProbeKind::kBetweenDevices, 1, 0, 10},
                                         ProbeRequest{ProbeKind::kBetweenDevices, 0, 2, 10},
                                         ProbeRequest{ProbeKind::kBetweenWorkers, 2, 0, 10}));

}  // namespace
}  // namespace coarse::test::emulation_test
