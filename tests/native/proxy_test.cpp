/// Proxy: what it refuses, what it reports, and that nothing a worker sends brings it down.
#include "coarse/device/proxy.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "contributions.hpp"
#include "fixture.hpp"

namespace coarse::test::proxy_test {
namespace {

std::string schedulingName(Scheduling scheduling) {
  return scheduling == Scheduling::kQueues ? "queues" : "fcfs";
}

Descriptor descriptorOf(std::uint32_t group, std::uint32_t shard, std::uint32_t step) {
  Descriptor descriptor;
  descriptor.group = group;
  descriptor.shard = shard;
  descriptor.step = step;
  descriptor.flags = kPresent;
  return descriptor;
}

/// As a memory device marks its record of a lost worker.
Descriptor markedDescriptor() {
  Descriptor descriptor = descriptorOf(1, 0, 1);
  descriptor.numElements = 1;
  return descriptor;
}

Descriptor dynamicDescriptor(std::uint32_t numElements, std::uint8_t dtype, std::uint8_t op) {
  Descriptor descriptor = descriptorOf(2, 0, 1);
  descriptor.numElements = numElements;
  descriptor.dtype = dtype;
  descriptor.op = op;
  return descriptor;
}

// ---- what cannot be set up ----

TEST(ProxyConfigs, RefuseNumbersThatCannotBe) {
  const auto validate = [](auto change) {
    ProxyConfig config;
    config.numDevices = 2;
    config.numClients = 2;
    change(config);
    config.validate();
  };
  EXPECT_NO_THROW(validate([](ProxyConfig& config) { config.device = 1; }));
  EXPECT_NO_THROW(validate([](ProxyConfig& config) { config.numClients = 256; }));
  EXPECT_THROW(validate([](ProxyConfig& config) { config.device = 2; }), std::invalid_argument);
  EXPECT_THROW(validate([](ProxyConfig& config) { config.numDevices = 0; }), std::invalid_argument);
  EXPECT_THROW(validate([](ProxyConfig& config) { config.numClients = 0; }), std::invalid_argument);
  EXPECT_THROW(validate([](ProxyConfig& config) { config.numClients = 257; }), std::invalid_argument);
  EXPECT_THROW(validate([](ProxyConfig& config) { config.numSyncCores = 0; }), std::invalid_argument);
  EXPECT_THROW(validate([](ProxyConfig& config) { config.localClients = {2}; }), std::invalid_argument);
}

TEST(ProxySetUp, RefusesMemoryThatIsUnsealedOrTooSmall) {
  const Memory doorbells(sizeof(Doorbell)), logs(sizeof(RingLogs)), rings(sizeof(RingSegment)), small(64);
  const Memory messages(ringMessagesBytes(512));
  const Fd events(::eventfd(0, EFD_CLOEXEC));
  const auto make = [&](int doorbellsFd, int logsFd, std::vector<int> ringFds, std::vector<Region> regions) {
    const RingMemory memory{logsFd, std::move(ringFds), std::move(regions), 512};
    return std::make_unique<Proxy>(ProxyConfig{}, doorbellsFd, events, memory);
  };
  const auto proxy = make(doorbells.fd, logs.fd, {rings.fd}, {messages.fd});
  EXPECT_THROW(make(events, logs.fd, {rings.fd}, {messages.fd}), std::invalid_argument);
  EXPECT_THROW(make(doorbells.fd, small.fd, {rings.fd}, {messages.fd}), std::invalid_argument);
  EXPECT_THROW(make(doorbells.fd, logs.fd, {small.fd}, {messages.fd}), std::invalid_argument);
  EXPECT_THROW(make(doorbells.fd, logs.fd, {rings.fd}, {small.fd}), std::invalid_argument);
  EXPECT_THROW(make(doorbells.fd, logs.fd, {rings.fd}, {}), std::invalid_argument);
  EXPECT_THROW(make(doorbells.fd, logs.fd, {rings.fd, rings.fd}, {messages.fd}), std::invalid_argument);
  EXPECT_THROW(proxy->addClient(0, small.fd), std::invalid_argument);
  EXPECT_THROW(proxy->start(), std::logic_error) << "its client is not known yet";
}

TEST(ProxySetUp, WithoutOthersReducesByItselfWhateverTheAlgorithm) {
  const Memory doorbells(sizeof(Doorbell));
  const Fd events(::eventfd(0, EFD_CLOEXEC));
  for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kNccl}) {
    Proxy proxy(ProxyConfig{}, doorbells.fd, events);
    GroupPlan plan = makePlan(1, 1, {{100}});
    plan.shards[0].algorithm = algorithm;
    const Memory control(GroupControl::numBytes(plan.shards.size(), 1)), slots(plan.slotBytes);
    EXPECT_NO_THROW(proxy.addGroup(plan, control.fd, {slots.fd}, true));
  }
}

TEST(ProxySetUp, WithoutRingsOrCollectivesRefusesAGroupThatNeedsThem) {
  const Memory doorbells(2 * sizeof(Doorbell)), slots(4096);
  const Fd events(::eventfd(0, EFD_CLOEXEC));
  ProxyConfig config;
  config.numDevices = 2;
  Proxy proxy(config, doorbells.fd, events);
  GroupPlan plan = makePlan(1, 1, {{100}});
  const Memory control(GroupControl::numBytes(plan.shards.size(), 1));
  plan.shards[0].algorithm = Algorithm::kRing;
  EXPECT_THROW(proxy.addGroup(plan, control.fd, {slots.fd}, true), std::invalid_argument);
  plan.shards[0].algorithm = Algorithm::kNccl;
  EXPECT_THROW(proxy.addGroup(plan, control.fd, {slots.fd}, true), std::invalid_argument);
  plan.shards[0].algorithm = Algorithm::kDirect;
  EXPECT_NO_THROW(proxy.addGroup(plan, control.fd, {slots.fd}, true));
}

TEST(ProxyGroups, RefuseWhatDoesNotFit) {
  Cluster cluster({1, 1, 1});
  const GroupPlan plan = makePlan(1, 1, {{100}});
  const Memory control(GroupControl::numBytes(1, 1)), slots(plan.slotBytes), small(8);
  Proxy& proxy = cluster.start().proxy(0);
  EXPECT_THROW(proxy.addGroup(plan, small.fd, {slots.fd}, true), std::invalid_argument);
  EXPECT_THROW(proxy.addGroup(plan, control.fd, {small.fd}, true), std::invalid_argument);
  EXPECT_THROW(proxy.addGroup(plan, control.fd, {}, true), std::invalid_argument);
  EXPECT_THROW(proxy.addGroup(makePlan(1, 2, {{100}}), control.fd, {slots.fd, slots.fd}, true),
               std::invalid_argument)
      << "the job has one client";
  proxy.addGroup(plan, control.fd, {slots.fd}, true);
  EXPECT_THROW(proxy.addGroup(plan, control.fd, {slots.fd}, true), std::invalid_argument) << "it is there";
  proxy.removeGroup(1);
  proxy.removeGroup(1);
  proxy.addGroup(plan, control.fd, {slots.fd}, false);
}

TEST(GroupPlans, RefuseShardsOutsideTheSlots) {
  GroupPlan plan = makePlan(1, 1, {{100}});
  EXPECT_NO_THROW(plan.validate());
  const auto refused = [&](auto change) {
    GroupPlan changed = plan;
    change(changed.shards[0]);
    EXPECT_THROW(changed.validate(), std::invalid_argument);
  };
  refused([](Shard& shard) { shard.numElements = 101; });
  refused([](Shard& shard) { shard.offset = 4; });
  refused([](Shard& shard) { shard.offset = 2, shard.numElements = 1; });
  refused([](Shard& shard) { shard.offset = ~std::uint64_t{0} - 3, shard.numElements = 1; });
  refused([](Shard& shard) { shard.dtype = static_cast<DType>(99); });
}

// ---- descriptors that cannot be ----

struct Malformed {
  const char* name;
  Descriptor descriptor;
  const char* complaint;
};

class MalformedDescriptors : public testing::TestWithParam<std::tuple<Malformed, Scheduling>> {
 protected:
  MalformedDescriptors() {
    cluster_.addGroup(makePlan(1, 3, {{100}, {100}}));
    cluster_.addGroup(makeDynamicPlan(2, 3, 2, 256, Algorithm::kDirect));
    cluster_.start();
  }
  Cluster cluster_{ClusterShape{3, 1, 1, std::get<Scheduling>(GetParam())}};
};

TEST_P(MalformedDescriptors, EvictTheirSenderAndNothingElse) {
  const Malformed& malformed = std::get<Malformed>(GetParam());
  // The second sender shows that the sync core survived the first.
  for (const int client : {1, 2}) {
    cluster_.tell(static_cast<std::size_t>(client), 0, malformed.descriptor);
    const std::vector<ProxyEvent> events = cluster_.events(0);
    ASSERT_EQ(events.size(), 1u);
    EXPECT_EQ(events[0].client, client);
    EXPECT_NE(events[0].message.find(malformed.complaint), std::string::npos) << events[0].message;
  }
  EXPECT_EQ(cluster_.proxy(0).lastStep(1), 0u);
  EXPECT_EQ(cluster_.proxy(0).statistics().numShards, 0u);
}

constexpr std::uint32_t kHuge = 0xffffffff;

INSTANTIATE_TEST_SUITE_P(
    All, MalformedDescriptors,
    testing::Combine(
        testing::Values(
            Malformed{"unknownGroup", descriptorOf(7, 0, 1), "tensor group 7 is not registered"},
            Malformed{"shardAfterTheLast", descriptorOf(1, 2, 1), "shard 2 of 2"},
            Malformed{"shardFarOutside", descriptorOf(1, kHuge, 1), "shard 4294967295 of 2"},
            Malformed{"stepZero", descriptorOf(1, 0, 0), "step 0 of shard 0 although step 0"},
            Malformed{"stepOfTheFuture", descriptorOf(1, 0, 2), "step 2 of shard 0 although step 0"},
            Malformed{"stepFarAway", descriptorOf(1, 0, kHuge), "step 4294967295"},
            Malformed{"markOfALostWorker", markedDescriptor(), "only records of lost workers have"},
            Malformed{"dynamicShardTooLong", dynamicDescriptor(65, 0, 0), "260 bytes in a slot of fewer"},
            Malformed{"dynamicShardFarTooLong", dynamicDescriptor(kHuge, 1, 0), "bytes in a slot of fewer"},
            Malformed{"unknownDType", dynamicDescriptor(1, 7, 0), "unknown dtype or op"},
            Malformed{"unknownOp", dynamicDescriptor(1, 0, 3), "unknown dtype or op"}),
        testing::Values(Scheduling::kQueues, Scheduling::kFcfs)),
    [](const auto& info) {
      return std::string(std::get<Malformed>(info.param).name) + "_" +
             schedulingName(std::get<Scheduling>(info.param));
    });

TEST(Evictions, FollowAShardPushedTwice) {
  Cluster cluster({2, 1, 1});
  cluster.addGroup(makePlan(1, 2, {{100}}));
  cluster.start();
  cluster.tell(0, 0, descriptorOf(1, 0, 1));
  cluster.tell(0, 0, descriptorOf(1, 0, 1));
  const std::vector<ProxyEvent> events = cluster.events(0);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].client, 0);
  EXPECT_NE(events[0].message.find("although step 1 was its last"), std::string::npos) << events[0].message;
}

TEST(Evictions, FollowAShardThatAnotherMemoryDeviceIsTaking) {
  Cluster cluster({2, 2, 1});
  const GroupPlan plan = makePlan(1, 2, {{100}});
  cluster.addGroup(plan);
  cluster.start();
  // As it is when the worker has told both at once, and device 0 has got no further than its claim.
  ASSERT_TRUE(cluster.control(plan).claim(0, 0, 1));
  cluster.tell(0, 1, descriptorOf(1, 0, 1));
  const std::vector<ProxyEvent> events = cluster.events(1);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].client, 0);
  EXPECT_NE(events[0].message.find("which another memory device has taken"), std::string::npos)
      << events[0].message;
  EXPECT_EQ(cluster.control(plan).arrivals(0).load(), 0u) << "it was counted";
}

TEST(Evictions, FollowAShardToldToTwoMemoryDevicesAndItCountsOnce) {
  constexpr std::size_t kNumRaces = 200;
  for (std::size_t race = 0; race < kNumRaces; ++race) {
    Cluster cluster({2, 2, 1});
    const GroupPlan plan = makePlan(1, 2, {{1}});
    cluster.addGroup(plan);
    for (const std::size_t device : {0, 1}) cluster.tell(0, device, descriptorOf(1, 0, 1));
    cluster.start();
    std::size_t numEvents = 0;
    ASSERT_TRUE(eventually([&] {
      for (const std::size_t device : {0, 1}) {
        for (const ProxyEvent& event : cluster.proxy(device).takeEvents()) {
          EXPECT_EQ(event.client, 0);
          ++numEvents;
        }
      }
      return numEvents > 0 && cluster.control(plan).arrivals(0).load() > 0;
    }));
    EXPECT_EQ(numEvents, 1u);
    EXPECT_EQ(cluster.control(plan).arrivals(0).load(), 1u);
  }
}

TEST(Evictions, FollowAPushToARemovedGroup) {
  Cluster cluster({1, 1, 1});
  cluster.addGroup(makePlan(1, 1, {{100}}));
  cluster.start().removeFromProxies(1);
  cluster.tell(0, 0, descriptorOf(1, 0, 1));
  const std::vector<ProxyEvent> events = cluster.events(0);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_NE(events[0].message.find("not registered"), std::string::npos) << events[0].message;
}

TEST(Evictions, HappenOnceAndEndAllThatTheClientSends) {
  for (const Scheduling scheduling : {Scheduling::kQueues, Scheduling::kFcfs}) {
    Cluster cluster({2, 1, 1, scheduling});
    cluster.addGroup(makePlan(1, 2, {{100}}));
    // Garbage in the whole queue, even where no descriptor was pushed.
    std::mt19937_64 random(7);
    DescriptorQueue& queue = cluster.queue(0, 0);
    for (std::uint64_t i = 0; i < kDescriptorCapacity; ++i) {
      const std::uint64_t noise[3] = {random(), random(), random()};
      std::memcpy(&queue.cells[i].descriptor, noise, sizeof(Descriptor));
      queue.cells[i].commit.store(i + 1, std::memory_order_release);
    }
    cluster.start();
    EXPECT_TRUE(eventually([&] { return queue.consumed.load() == kDescriptorCapacity; })) << "not drained";
    const std::vector<ProxyEvent> events = cluster.events(0);
    ASSERT_EQ(events.size(), 1u);
    EXPECT_EQ(events[0].client, 0);
  }
}

TEST(Disagreement, OnADynamicShardIsNobodysFaultInParticular) {
  struct Other {
    Descriptor descriptor;
    const char* text;
  };
  for (const auto& [descriptor, text] :
       {Other{dynamicDescriptor(11, 0, 0), "11 elements of dtype 0 with op 0"},
        Other{dynamicDescriptor(10, 4, 0), "10 elements of dtype 4 with op 0"},
        Other{dynamicDescriptor(10, 0, 2), "10 elements of dtype 0 with op 2"}}) {
    Cluster cluster({2, 1, 1});
    cluster.addGroup(makeDynamicPlan(2, 2, 1, 256, Algorithm::kDirect));
    cluster.start();
    cluster.tell(0, 0, dynamicDescriptor(10, 0, 0));
    cluster.tell(1, 0, descriptor);
    const std::vector<ProxyEvent> events = cluster.events(0);
    ASSERT_EQ(events.size(), 1u);
    EXPECT_EQ(events[0].client, -1);
    EXPECT_NE(events[0].message.find(std::string("worker 1 gave ") + text), std::string::npos)
        << events[0].message;
  }
}

TEST(Disagreement, IsFoundWhereAClientOnlyReceives) {
  Cluster cluster({2, 1, 1});
  cluster.addGroup(makeDynamicPlan(2, 2, 1, 256, Algorithm::kDirect));
  cluster.start();
  Descriptor absent = dynamicDescriptor(20, 0, 0);
  absent.flags = 0;
  cluster.tell(0, 0, absent);
  cluster.tell(1, 0, dynamicDescriptor(10, 0, 0));
  const std::vector<ProxyEvent> events = cluster.events(0);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_NE(events[0].message.find("workers disagree on a buffer"), std::string::npos) << events[0].message;
}

// ---- leaving ----

class Leaving : public testing::Test {
 protected:
  Leaving() { cluster_.start().addGroup(plan_); }
  void finishStep(std::uint32_t step) {
    for (const std::size_t client : {0, 1}) cluster_.tell(client, client, descriptorOf(1, 0, step));
    ASSERT_TRUE(eventually([&] { return cluster_.control(plan_).done(1, 0).load() == step; }));
  }
  const GroupPlan plan_ = makePlan(1, 2, {{100}});
  Cluster cluster_{ClusterShape{2, 2, 1}};
};

TEST_F(Leaving, BetweenStepsIsNoEvent) {
  finishStep(1);
  for (const std::size_t device : {0, 1}) {
    cluster_.proxy(device).clientLeft(0);
    EXPECT_TRUE(cluster_.proxy(device).takeEvents().empty());
  }
}

TEST_F(Leaving, WhileOthersWaitIsAnEventAtEveryDevice) {
  finishStep(1);
  cluster_.tell(1, 1, descriptorOf(1, 0, 2));
  ASSERT_TRUE(eventually([&] { return cluster_.control(plan_).arrivals(0).load() == 1; }));
  for (const std::size_t device : {0, 1}) {
    cluster_.proxy(device).clientLeft(0);
    const std::vector<ProxyEvent> events = cluster_.events(device);
    ASSERT_FALSE(events.empty());
    EXPECT_TRUE(events[0].message.empty()) << events[0].message;
  }
}

TEST_F(Leaving, IsAnEventWhenAnotherClientPushesAfterwards) {
  finishStep(1);
  for (const std::size_t device : {0, 1}) cluster_.proxy(device).clientLeft(0);
  cluster_.tell(1, 1, descriptorOf(1, 0, 2));
  const std::vector<ProxyEvent> events = cluster_.events(1);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].client, 1);
  EXPECT_TRUE(events[0].message.empty());
}

TEST(LeavingInARace, IsToldByThePushOrByTheLeaving) {
  for (int round = 0; round < 20; ++round) {
    Cluster cluster({2, 1, 1});
    cluster.start().addGroup(makePlan(1, 2, {{100}}));
    together(2, [&](std::size_t thread) {
      if (thread == 0)
        cluster.tell(1, 0, descriptorOf(1, 0, 1));
      else
        cluster.proxy(0).clientLeft(0);
    });
    ASSERT_FALSE(cluster.events(0).empty()) << "worker 1 would wait for ever";
  }
}

// ---- scheduling ----

struct Orders {
  const char* name;
  Scheduling scheduling;
  std::size_t numDevices;
  bool areOpposite;
  bool completes;
};

class SchedulingOf : public testing::TestWithParam<Orders> {};

/// COARSE paper, Fig 10: two workers push two tensors, each to its own device.
TEST_P(SchedulingOf, TwoTensorsPushedByTwoWorkers) {
  const Orders& orders = GetParam();
  const auto numDevices = static_cast<std::uint16_t>(orders.numDevices);
  for (const Algorithm algorithm : {Algorithm::kGather, Algorithm::kDirect, Algorithm::kRing}) {
    Cluster cluster({2, orders.numDevices, 1, orders.scheduling});
    const GroupPlan plan = makePlan(1, 2,
                                    {{100, DType::kFloat32, ReduceOp::kSum, algorithm},
                                     {300, DType::kFloat32, ReduceOp::kSum, algorithm}});
    cluster.start().addToProxies(plan);
    together(2, [&](std::size_t rank) {
      const auto device = static_cast<std::uint16_t>(rank % numDevices);
      cluster.addToClient(plan, rank, {device, device});
      Client& client = cluster.client(rank);
      const std::uint32_t first = orders.areOpposite ? static_cast<std::uint32_t>(rank) : 0;
      for (std::uint32_t step = 1; step <= 5; ++step) {
        for (const std::uint32_t tensor : {first, 1 - first})
          ASSERT_EQ(client.push(1, tensor, kPresent, nullptr), WaitStatus::kDone);
        const WaitStatus status = client.pullAll(1, orders.completes ? kPatienceSeconds : kMomentSeconds);
        ASSERT_EQ(status, orders.completes ? WaitStatus::kDone : WaitStatus::kTimedOut);
        if (!orders.completes) return;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, SchedulingOf,
    testing::Values(
        Orders{"QueuesTakeOppositeOrders", Scheduling::kQueues, 2, true, true},
        Orders{"QueuesOfOneDeviceTakeOppositeOrders", Scheduling::kQueues, 1, true, true},
        Orders{"FirstComeFirstServeBlocksOnOppositeOrders", Scheduling::kFcfs, 2, true, false},
        Orders{"FirstComeFirstServeOfOneDeviceBlocksOnOppositeOrders", Scheduling::kFcfs, 1, true, false},
        Orders{"FirstComeFirstServeTakesTheSameOrder", Scheduling::kFcfs, 2, false, true},
        Orders{"FirstComeFirstServeOfOneDeviceTakesTheSameOrder", Scheduling::kFcfs, 1, false, true}),
    [](const auto& info) { return std::string(info.param.name); });

// ---- lives of groups and proxies ----

TEST(ProxyLives, GroupsGoAsSoonAsTheClientsHaveTheirResults) {
  // Devices 1 and 2 have no clients: their sync cores may be in a ring when the only client is done with it.
  for (const Scheduling scheduling : {Scheduling::kQueues, Scheduling::kFcfs}) {
    Cluster cluster({1, 3, 2, scheduling});
    cluster.start();
    for (std::uint32_t group = 1; group <= 40; ++group) {
      cluster.addGroup(makePlan(group, 1, {{999, DType::kFloat32, ReduceOp::kSum, Algorithm::kRing}}, 100));
      ASSERT_EQ(cluster.client(0).push(group, 0, kPresent, nullptr), WaitStatus::kDone);
      ASSERT_EQ(cluster.client(0).pull(group, 0, nullptr, kPatienceSeconds), WaitStatus::kDone);
      cluster.client(0).removeGroup(group);
      cluster.removeFromProxies(group);
    }
  }
}

TEST(ProxyLives, StopIsIdempotentAndGroupsCanGoAfterwards) {
  Cluster cluster({1, 2, 2});
  cluster.start().addGroup(makePlan(1, 1, {{100}}));
  cluster.proxy(0).stop();
  cluster.proxy(0).stop();
  cluster.proxy(0).removeGroup(1);
}

TEST(ProxyLives, ADeadSyncCoreHoldsUpNoOther) {
  constexpr std::uint32_t kNumShards = 4;
  Cluster cluster({1, 1, 1});
  const GroupPlan plan = makePlan(1, 1, {{kNumShards}}, 1);
  cluster.addGroup(plan);
  // As a sync core of another device leaves it that dies between its claim of a cell and its release, and as
  // it is when the queue comes round to that cell.
  const GroupControl control = cluster.control(plan);
  control.readyCell(0).sequence.store(1);
  control.readyHead().value.store(kNumShards);
  control.readyTail().value.store(kNumShards);
  cluster.start();
  for (int step = 0; step < 3; ++step) {
    ASSERT_EQ(cluster.client(0).push(1, 0, kPresent, nullptr), WaitStatus::kDone);
    ASSERT_EQ(cluster.client(0).pull(1, 0, nullptr, kPatienceSeconds), WaitStatus::kDone);
  }
  EXPECT_EQ(cluster.proxy(0).statistics().numShards, 3 * kNumShards);
  cluster.removeFromProxies(1);
}

TEST(ProxyLives, NeverStartedIsFine) { Cluster cluster({2, 2, 1}); }

TEST(ProxyLives, CountTheirWork) {
  Cluster cluster({2, 2, 1});
  const GroupPlan plan = makePlan(1, 2, {{1000, DType::kFloat32}, {10, DType::kFloat64}}, 100);
  cluster.start().addGroup(plan);
  constexpr std::uint32_t kNumSteps = 3;
  together(2, [&](std::size_t rank) {
    for (std::uint32_t step = 1; step <= kNumSteps; ++step) {
      for (const std::uint32_t tensor : {0u, 1u})
        ASSERT_EQ(cluster.client(rank).push(1, tensor, kPresent, nullptr), WaitStatus::kDone);
      ASSERT_EQ(cluster.client(rank).pullAll(1, kPatienceSeconds), WaitStatus::kDone);
    }
  });
  std::uint64_t numShards = 0, numBytes = 0;
  for (const std::size_t device : {0, 1}) {
    numShards += cluster.proxy(device).statistics().numShards;
    numBytes += cluster.proxy(device).statistics().numBytes;
  }
  EXPECT_EQ(numShards, kNumSteps * plan.shards.size());
  EXPECT_EQ(numBytes, kNumSteps * (1000 * 4 + 10 * 8));
  EXPECT_EQ(std::max(cluster.proxy(0).lastStep(0), cluster.proxy(1).lastStep(0)), kNumSteps);
}

}  // namespace
}  // namespace coarse::test::proxy_test
