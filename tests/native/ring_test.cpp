/// RingCore: whatever the devices, clients and lengths, all slots get the one exact result, whether the host
/// or the kernels of cuda_stand_in.cpp add.
#include "coarse/device/ring.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <numeric>
#include <vector>

#include "coarse/gpu/cuda_ring_compute.hpp"
#include "contributions.hpp"
#include "fixture.hpp"
#include "stand_in_kernels.hpp"

namespace coarse::test::ring_test {
namespace {

constexpr std::size_t kMessageBytes = 4096;

using MakeCompute = std::function<std::unique_ptr<RingCompute>()>;

/// Every device's part in one ring, over one group. `clientsOf[d]` are local to device d.
class Ring {
 public:
  /// @param linkTable of emulated links; -1 without.
  Ring(GroupPlan plan, std::vector<std::vector<std::size_t>> clientsOf, bool isForward = true,
       const MakeCompute& makeCompute = makeHostRingCompute, int linkTable = -1)
      : plan_(std::move(plan)),
        control_(GroupControl::numBytes(plan_.shards.size(), plan_.numClients)),
        buffers_(new RecvBuf[clientsOf.size()]()),
        doorbells_(new Doorbell[clientsOf.size()]()),
        links_(clientsOf.size()),
        numDone_(clientsOf.size()),
        doneAt_(clientsOf.size()) {
    for (std::size_t i = 0; i < plan_.numClients; ++i) slots_.emplace_back(plan_.slotBytes);
    for (std::size_t i = 0; i < clientsOf.size(); ++i) messages_.emplace_back(kRingDepth * kMessageBytes);
    group_ = std::make_unique<TensorGroup>(plan_, control_.fd, regionsOf(slots_));
    group_->control().initialise();
    const std::size_t p = clientsOf.size();
    for (std::size_t device = 0; device < p; ++device) {
      const std::size_t after = (device + 1) % p, before = (device + p - 1) % p;
      RingLinks links;
      links.log = log_.get();
      links.own = &buffers_[device];
      links.next = &buffers_[isForward ? after : before];
      links.ownMessages = messages_[device].data();
      links.nextMessages = messages_[isForward ? after : before].data();
      links.messageBytes = kMessageBytes;
      links.nextDoorbell = &doorbells_[isForward ? after : before];
      links.previousDoorbell = &doorbells_[isForward ? before : after];
      links.device = device;
      links.nextDevice = isForward ? after : before;
      links.position = isForward ? device : (p - device) % p;
      links.numDevices = p;
      if (linkTable >= 0)
        links_[device] = DeviceLinks(std::make_unique<Pacer>(linkTable), {plan_.numClients, p});
      cores_.push_back(std::make_unique<RingCore>(
          links, links_[device], makeCompute(), clientsOf[device],
          [this](std::uint32_t group) { return isKnown_ && group == plan_.id ? group_.get() : nullptr; },
          [this, device](TensorGroup& group, const RingEntry& entry, const ShardShape& shape) {
            EXPECT_EQ(&group, group_.get());
            EXPECT_EQ(shape.numElements, plan_.shards[entry.shard].numElements);
            EXPECT_EQ(entry.shard, numDone_[device] % plan_.shards.size()) << "not in the order of the log";
            ++numDone_[device];
            doneAt_[device] = timeOf(entry.completedAt, monotonicNow());
          }));
    }
  }

  std::size_t numDevices() const { return cores_.size(); }
  RingCore& core(std::size_t device) { return *cores_[device]; }
  std::size_t numDone(std::size_t device) const { return numDone_[device]; }
  /// From contribute() to the arrival of a device's last message over emulated links.
  MonotonicNs duration(std::size_t device) const { return doneAt_[device] - contributedAt_; }
  TensorGroup& group() { return *group_; }
  void forgetGroup(bool isForgotten) { isKnown_ = !isForgotten; }

  /// All clients contribute to all shards, with the flags that `flagsOf` gives for a client; then the shards
  /// enter the ring.
  void contribute(std::uint32_t step, const std::function<std::uint8_t(std::size_t)>& flagsOf) {
    contributedAt_ = monotonicNow();
    for (std::uint32_t shard = 0; shard < plan_.shards.size(); ++shard) {
      const Shard& planned = plan_.shards[shard];
      for (std::size_t client = 0; client < plan_.numClients; ++client) {
        Contribution& entry = group_->control().contribution(shard, client);
        entry.flags = flagsOf(client);
        entry.step.store(step, std::memory_order_release);
        const Bytes data = test::contribution(planned.dtype, planned.numElements, client, step);
        std::memcpy(group_->slot(client, planned), data.data(), data.size());
      }
      appendToRing(*log_, {plan_.id, shard, step, stampOf(contributedAt_)});
    }
  }

  /// One thread turns to all devices in order. @returns false if they wait for each other.
  bool driveByOneThread(std::size_t numShards) {
    while (true) {
      bool hasProgressed = false, isFinished = true;
      for (std::size_t device = 0; device < numDevices(); ++device) {
        hasProgressed |= cores_[device]->advance() || cores_[device]->isBusy();
        hasProgressed |= links_[device].runDue() || links_[device].untilNext().has_value();
        isFinished &= numDone_[device] == numShards;
      }
      if (isFinished) return true;
      if (!hasProgressed) return false;
    }
  }

  /// A thread per device: nothing but the ring orders what they do. @returns false if they do not get
  /// through.
  bool driveByThreads(std::size_t numShards) {
    std::atomic<std::size_t> numFinished{0};
    together(numDevices(), [&](std::size_t device) {
      numFinished += eventually([&] {
        while (cores_[device]->advance()) {
        }
        return numDone_[device] == numShards;
      });
    });
    return numFinished == numDevices();
  }

  /// Whether the slots of all clients hold the result of `present` at `step`.
  void expectResults(std::uint32_t step, const std::vector<std::size_t>& present, std::uint32_t divisor) {
    for (std::size_t i = 0; i < plan_.shards.size(); ++i) {
      const Shard& shard = plan_.shards[i];
      const Bytes expected = result(shard.dtype, shard.op, shard.numElements, present, step, divisor);
      for (std::size_t client = 0; client < plan_.numClients; ++client) {
        ASSERT_EQ(std::memcmp(group_->slot(client, shard), expected.data(), expected.size()), 0)
            << "shard " << i << ": " << shard.numElements << " of dtype " << static_cast<int>(shard.dtype)
            << ", op " << static_cast<int>(shard.op) << ", client " << client << " of " << plan_.numClients;
      }
    }
  }

 private:
  GroupPlan plan_;
  Memory control_;
  std::vector<Memory> slots_;
  std::unique_ptr<TensorGroup> group_;
  std::unique_ptr<RingLog> log_ = std::make_unique<RingLog>();
  std::unique_ptr<RecvBuf[]> buffers_;
  std::unique_ptr<Doorbell[]> doorbells_;
  std::vector<Memory> messages_;
  std::vector<DeviceLinks> links_;
  std::vector<std::unique_ptr<RingCore>> cores_;
  std::vector<std::size_t> numDone_;  // each by its device's thread
  std::vector<MonotonicNs> doneAt_;
  MonotonicNs contributedAt_ = 0;
  bool isKnown_ = true;
};

std::vector<std::size_t> upTo(std::size_t count) {
  std::vector<std::size_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), std::size_t{0});
  return numbers;
}

/// `perDevice` clients for each device, numbered across the devices.
std::vector<std::vector<std::size_t>> evenly(std::size_t numDevices, std::size_t perDevice) {
  std::vector<std::vector<std::size_t>> clientsOf(numDevices);
  for (std::size_t client = 0; client < numDevices * perDevice; ++client)
    clientsOf[client % numDevices].push_back(client);
  return clientsOf;
}

std::vector<TensorSpec> everyKindOf(const std::vector<std::uint32_t>& lengths) {
  std::vector<TensorSpec> tensors;
  for (const DType dtype : kEveryDType) {
    for (const ReduceOp op : kEveryOp) {
      for (const std::uint32_t numElements : lengths)
        tensors.push_back({numElements, dtype, op, Algorithm::kRing});
    }
  }
  return tensors;
}

std::uint8_t allPresent(std::size_t) { return kPresent; }

struct Drive {
  std::size_t numDevices;
  bool hasThreads;
  bool isOnGpu = false;
};

/// Steps of rings as kernels.
std::unique_ptr<RingCompute> makeStandInCompute() {
  static const CudaKernels kernels = standInKernels();
  return std::make_unique<CudaRingCompute>(std::make_shared<cuda::Context>(0), kernels,
                                           std::make_shared<DistantMemory>());
}

class RingOf : public testing::TestWithParam<Drive> {
 protected:
  std::size_t numDevices() const { return GetParam().numDevices; }
  static MakeCompute makeCompute() { return GetParam().isOnGpu ? makeStandInCompute : makeHostRingCompute; }
  void drive(Ring& ring, std::size_t numShards) {
    ASSERT_TRUE(GetParam().hasThreads ? ring.driveByThreads(numShards) : ring.driveByOneThread(numShards));
  }
  void check(const std::vector<TensorSpec>& tensors, std::vector<std::vector<std::size_t>> clientsOf,
             std::size_t numClients, bool isForward = true) {
    Ring ring(makePlan(1, numClients, tensors), std::move(clientsOf), isForward, makeCompute());
    for (std::uint32_t step = 1; step <= 2; ++step) {
      ring.contribute(step, allPresent);
      ASSERT_NO_FATAL_FAILURE(drive(ring, step * tensors.size()));
      ASSERT_NO_FATAL_FAILURE(
          ring.expectResults(step, upTo(numClients), static_cast<std::uint32_t>(numClients)));
    }
  }
};

TEST_P(RingOf, EveryTypeOperationAndOddLength) {
  check(everyKindOf({1, 2, 3, 4, 37, 1001}), evenly(numDevices(), 1), numDevices());
}

TEST_P(RingOf, BothDirections) {
  check(everyKindOf({5, 1001}), evenly(numDevices(), 1), numDevices(), false);
}

TEST_P(RingOf, SeveralClientsPerDevice) {
  check(everyKindOf({3, 517}), evenly(numDevices(), 2), 2 * numDevices());
}

TEST_P(RingOf, ShardsOfMoreThanOneChunk) {
  std::vector<TensorSpec> tensors;
  for (const DType dtype : kEveryDType) {
    const std::size_t perEntry = kMessageBytes / std::max<std::size_t>(itemBytes(dtype), 2);
    tensors.push_back(
        {static_cast<std::uint32_t>(numDevices() * perEntry + 13), dtype, ReduceOp::kMean, Algorithm::kRing});
  }
  check(tensors, evenly(numDevices(), 1), numDevices());
}

TEST_P(RingOf, DevicesWithoutClientsPassThingsOn) {
  for (std::size_t home = 0; home < numDevices(); ++home) {
    std::vector<std::vector<std::size_t>> clientsOf(numDevices());
    clientsOf[home] = {0, 1};
    ASSERT_NO_FATAL_FAILURE(check(everyKindOf({2, 129}), clientsOf, 2));
  }
}

TEST_P(RingOf, AbsentContributionsAreNotReadButGetTheResult) {
  const std::size_t numClients = 2 * numDevices();
  const std::vector<TensorSpec> tensors = everyKindOf({3, 129});
  for (std::size_t only = 0; only < numClients; only += 3) {
    Ring ring(makePlan(1, numClients, tensors), evenly(numDevices(), 2), true, makeCompute());
    ring.contribute(1, [&](std::size_t client) -> std::uint8_t { return client == only ? kPresent : 0; });
    ASSERT_NO_FATAL_FAILURE(drive(ring, tensors.size()));
    ASSERT_NO_FATAL_FAILURE(ring.expectResults(1, {only}, static_cast<std::uint32_t>(numClients)));
  }
}

TEST_P(RingOf, WhoHasRunOutOfInputsDoesNotCountInAMean) {
  const std::vector<TensorSpec> tensors = everyKindOf({129});
  Ring ring(makePlan(1, numDevices(), tensors), evenly(numDevices(), 1), true, makeCompute());
  ring.contribute(1, [](std::size_t client) -> std::uint8_t { return client == 0 ? kJoined : kPresent; });
  ASSERT_NO_FATAL_FAILURE(drive(ring, tensors.size()));
  std::vector<std::size_t> present = upTo(numDevices());
  present.erase(present.begin());
  ring.expectResults(1, present, static_cast<std::uint32_t>(present.size()));
}

TEST_P(RingOf, NobodyPresentCompletesAndWritesNothing) {
  const std::vector<TensorSpec> tensors = everyKindOf({129});
  const GroupPlan plan = makePlan(1, numDevices(), tensors);
  Ring ring(plan, evenly(numDevices(), 1), true, makeCompute());
  ring.contribute(1, [](std::size_t) -> std::uint8_t { return 0; });
  ASSERT_NO_FATAL_FAILURE(drive(ring, tensors.size()));
  for (const Shard& shard : plan.shards) {
    for (std::size_t client = 0; client < numDevices(); ++client) {
      const Bytes before = contribution(shard.dtype, shard.numElements, client, 1);
      ASSERT_EQ(std::memcmp(ring.group().slot(client, shard), before.data(), before.size()), 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, RingOf,
                         testing::Values(Drive{2, false}, Drive{3, false}, Drive{4, false}, Drive{5, false},
                                         Drive{2, true}, Drive{3, true}, Drive{4, true}, Drive{5, true},
                                         Drive{2, false, true}, Drive{3, true, true}),
                         [](const auto& info) {
                           return std::to_string(info.param.numDevices) + "devices_" +
                                  (info.param.hasThreads ? "aThreadEach" : "oneThread") +
                                  (info.param.isOnGpu ? "_gpu" : "");
                         });

TEST(RingCoreAlone, SendsAheadAndThenReturnsWithoutWaiting) {
  Ring ring(makePlan(1, 2, {{1000}}), evenly(2, 1));
  EXPECT_FALSE(ring.core(0).advance()) << "nothing in the log";
  ring.contribute(1, allPresent);
  EXPECT_TRUE(ring.core(0).advance()) << "sends its own entry";
  EXPECT_FALSE(ring.core(0).advance()) << "waits for its neighbour's entry, and returns";
  EXPECT_TRUE(ring.core(0).isWorkingOn(ring.group()));
  EXPECT_TRUE(ring.driveByOneThread(1));
  EXPECT_FALSE(ring.core(0).isWorkingOn(ring.group()));
}

TEST(RingCoreAlone, WaitsForAGroupThatItDoesNotKnowYet) {
  Ring ring(makePlan(1, 2, {{1000}}), evenly(2, 1));
  ring.contribute(1, allPresent);
  ring.forgetGroup(true);
  EXPECT_FALSE(ring.core(0).advance());
  EXPECT_FALSE(ring.core(0).isWorkingOn(ring.group()));
  ring.forgetGroup(false);
  EXPECT_TRUE(ring.driveByOneThread(1));
  ring.expectResults(1, {0, 1}, 1);
}

// ---- over emulated links ----

/// A worker at each of `numDevices` devices, and between all of them links that share nothing.
LinkTableValues separateLinks(std::size_t numDevices, double gbytesPerSecond, double latencyUs) {
  LinkTableValues values;
  values.paths.assign(2 * numDevices, std::vector<std::optional<PathValues>>(2 * numDevices));
  for (std::size_t source = 0; source < values.paths.size(); ++source) {
    for (std::size_t target = 0; target < values.paths.size(); ++target) {
      if (source == target) continue;
      values.paths[source][target] =
          PathValues{latencyUs, {static_cast<std::uint32_t>(values.gbytesPerSecond.size())}};
      values.gbytesPerSecond.push_back(gbytesPerSecond);
    }
  }
  return values;
}

class Links {
 public:
  explicit Links(const LinkTableValues& values)
      : memory_(Pacer::numBytes(values.paths.size(), values.gbytesPerSecond.size())),
        numDevices_(values.paths.size() / 2) {
    Pacer::write(memory_.fd, values);
  }
  int fd() const { return memory_.fd; }
  std::uint64_t bytesBetween(std::size_t device, std::size_t other) const {
    return Pacer(memory_.fd).statistics(numDevices_ + device, numDevices_ + other).numBytes;
  }

 private:
  Memory memory_;
  std::size_t numDevices_;
};

// What a device learns late does not delay the next message, so times are exact on the slowest machine.
constexpr double kRoundingNs = 100;
constexpr std::size_t kNsPerByte = 100;  // 0.01 GB/s
constexpr std::size_t kLatencyNs = 50'000;

class PacedRingOf : public testing::TestWithParam<std::size_t> {
 protected:
  std::size_t p() const { return GetParam(); }
  LinkTableValues links() const { return separateLinks(p(), 1.0 / kNsPerByte, kLatencyNs / 1e3); }
  GroupPlan tensor(std::size_t numElements, DType dtype = DType::kFloat32) const {
    return makePlan(1, p(),
                    {{static_cast<std::uint32_t>(numElements), dtype, ReduceOp::kMean, Algorithm::kRing}});
  }
  /// Reduces one tensor once, and checks the result.
  void run(Ring& ring) {
    ring.contribute(1, allPresent);
    ASSERT_TRUE(ring.driveByOneThread(1));
    ring.expectResults(1, upTo(p()), static_cast<std::uint32_t>(p()));
  }
  void expectDuration(const Ring& ring, std::size_t nanoseconds) {
    for (std::size_t device = 0; device < p(); ++device)
      EXPECT_NEAR(static_cast<double>(ring.duration(device)), static_cast<double>(nanoseconds), kRoundingNs);
  }
};
INSTANTIATE_TEST_SUITE_P(EmulatedLinks, PacedRingOf, testing::Values(2, 3, 4));

TEST_P(PacedRingOf, CarriesAShareToTheNextDeviceInEachOfItsSteps) {
  for (const bool isForward : {true, false}) {
    const Links table(links());
    Ring ring(tensor(p() * 256), evenly(p(), 1), isForward, makeHostRingCompute, table.fd());
    run(ring);
    expectDuration(ring, 2 * (p() - 1) * (256 * sizeof(float) * kNsPerByte + kLatencyNs));
    for (std::size_t device = 0; device < p(); ++device) {
      const std::size_t after = (device + 1) % p(), before = (device + p() - 1) % p();
      EXPECT_EQ(table.bytesBetween(device, isForward ? after : before), 2 * (p() - 1) * 256 * sizeof(float));
      if (p() > 2) {
        EXPECT_EQ(table.bytesBetween(device, isForward ? before : after), 0U);
      }
    }
  }
}

TEST_P(PacedRingOf, TakesTheStepsOfEachChunk) {
  const Links table(links());
  Ring ring(tensor(2 * p() * kMessageBytes / sizeof(float)), evenly(p(), 1), true, makeHostRingCompute,
            table.fd());
  run(ring);
  expectDuration(ring, 2 * 2 * (p() - 1) * (kMessageBytes * kNsPerByte + kLatencyNs));
}

TEST_P(PacedRingOf, CarriesSixteenBitsAsThirtyTwo) {
  const Links table(links());
  Ring ring(tensor(p() * 256, DType::kBFloat16), evenly(p(), 1), true, makeHostRingCompute, table.fd());
  run(ring);
  EXPECT_EQ(table.bytesBetween(0, 1), 2 * (p() - 1) * 256 * sizeof(float));
}

TEST(PacedRing, CarriesNothingOfAnAbsentContribution) {
  const Links table(separateLinks(2, 1, 1));
  Ring ring(makePlan(1, 2, {{512, DType::kFloat32, ReduceOp::kSum, Algorithm::kRing}}), evenly(2, 1), true,
            makeHostRingCompute, table.fd());
  ring.contribute(1, [](std::size_t client) -> std::uint8_t { return client == 0 ? kPresent : 0; });
  ASSERT_TRUE(ring.driveByOneThread(1));
  ring.expectResults(1, {0}, 2);
  EXPECT_EQ(table.bytesBetween(0, 1), 2 * 256 * sizeof(float));
  EXPECT_EQ(table.bytesBetween(1, 0), 256 * sizeof(float)) << "the finished half alone";
}

TEST(PacedRing, SendsNoFurtherAheadThanItsBuffersAreDeep) {
  constexpr std::size_t kDevices = 6;
  constexpr double kLongUs = 1000;
  LinkTableValues values = separateLinks(kDevices, 1000, 0);
  values.paths[kDevices][kDevices + 1]->latencyUs = kLongUs;
  const Links table(values);
  Ring ring(makePlan(1, kDevices, {{kDevices * 64, DType::kFloat32, ReduceOp::kSum, Algorithm::kRing}}),
            evenly(kDevices, 1), true, makeHostRingCompute, table.fd());
  ring.contribute(1, allPresent);
  ASSERT_TRUE(ring.driveByOneThread(1));
  // The ten messages of device 0 travel in groups of four, four and two. Without a limit six would travel at
  // once.
  EXPECT_NEAR(static_cast<double>(ring.duration(1)), 3 * kLongUs * 1e3, 1000);
}

}  // namespace
}  // namespace coarse::test::ring_test
