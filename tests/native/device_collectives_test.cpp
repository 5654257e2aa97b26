/// DeviceCollectives: all devices begin the same batches in the same order, whichever device proposes what
/// and when, and nothing that was proposed is lost.
#include "coarse/device/device_collectives.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fixture.hpp"

namespace coarse::test::device_collectives_test {
namespace {

using Shards = std::vector<std::uint32_t>;

Shards upTo(std::uint32_t end, std::uint32_t begin = 0) {
  Shards shards(end - begin);
  std::iota(shards.begin(), shards.end(), begin);
  return shards;
}

Shards shardsOf(const ShardBatch& batch) {
  Shards shards;
  for (const ShardTask& task : batch) shards.push_back(task.entry.shard);
  return shards;
}

/// Notes what it is given, and is done with it when the test says.
class NotingRunner : public BatchRunner {
 public:
  void start(const ShardBatch& batch, MonotonicNs) override {
    given_.push_back(&batch);
    batches_.push_back(shardsOf(batch));
    mostUnderWay_ = std::max(mostUnderWay_, given_.size());
  }
  bool conclude() override {
    if (numDone_ == 0) return false;
    --numDone_;
    EXPECT_EQ(shardsOf(*given_.front()), batches_[batches_.size() - given_.size()]) << "a batch has gone";
    given_.pop_front();
    return true;
  }
  void wait() override {
    if (isBroken_) throw std::runtime_error("the others are gone");
    if (numDone_ == 0) finishOldest();
  }

  void finishOldest() { ++numDone_; }
  void breakDown() { isBroken_ = true; }
  /// All that were started.
  const std::vector<Shards>& batches() const { return batches_; }
  std::size_t numUnderWay() const { return given_.size(); }
  std::size_t mostUnderWay() const { return mostUnderWay_; }

 private:
  std::deque<const ShardBatch*> given_;
  std::vector<Shards> batches_;
  std::size_t numDone_ = 0;
  std::size_t mostUnderWay_ = 0;
  bool isBroken_ = false;
};

/// A shard that a device was told of.
struct Finished {
  RingEntry entry;
  ShardShape shape;
};

/// The collectives of all devices, and one group. Client c is local to device c % numDevices.
class Devices {
 public:
  Devices(GroupPlan plan, std::size_t numDevices)
      : plan_(std::move(plan)),
        doorbells_(new Doorbell[numDevices]()),
        control_(GroupControl::numBytes(plan_.shards.size(), plan_.numClients)),
        finished_(numDevices),
        isKnown_(numDevices, true) {
    for (std::size_t i = 0; i < plan_.numClients; ++i) slots_.emplace_back(plan_.clientBytes());
    group_ = std::make_unique<TensorGroup>(plan_, control_.fd, regionsOf(slots_));
    group_->control().initialise();
    CollectiveMemory memory{logs_.fd, {}, nullptr, hostMemory()};
    memory.clientsOf.resize(numDevices);
    for (std::size_t client = 0; client < plan_.numClients; ++client)
      memory.clientsOf[client % numDevices].push_back(client);
    for (std::size_t device = 0; device < numDevices; ++device) {
      runners_.push_back(std::make_shared<NotingRunner>());
      memory.runner = runners_.back();
      devices_.push_back(std::make_unique<DeviceCollectives>(
          memory, device, numDevices, doorbells_.get(),
          [this, device](std::uint32_t id) {
            return isKnown_[device] && id == plan_.id ? group_.get() : nullptr;
          },
          [this, device](TensorGroup& group, const RingEntry& entry, const ShardShape& shape) {
            EXPECT_EQ(&group, group_.get());
            finished_[device].push_back({entry, shape});
          }));
    }
  }

  std::size_t numDevices() const { return devices_.size(); }
  TensorGroup& group() { return *group_; }
  DeviceCollectives& operator[](std::size_t device) { return *devices_[device]; }
  NotingRunner& runner(std::size_t device) { return *runners_[device]; }
  const std::vector<Finished>& finished(std::size_t device) const { return finished_[device]; }
  std::uint32_t numRings(std::size_t device) const { return doorbells_[device].rings.load(); }
  void know(std::size_t device, bool isKnown) { isKnown_[device] = isKnown; }

  void contribute(std::uint32_t shard, const std::vector<std::uint8_t>& flags) {
    for (std::size_t client = 0; client < flags.size(); ++client)
      group_->control().contribution(shard, client).flags = flags[client];
  }
  void propose(std::size_t device, const Shards& shards, std::uint32_t step = 1) {
    for (const std::uint32_t shard : shards) devices_[device]->propose({plan_.id, shard, step, 99});
  }
  /// Until nobody has anything to do.
  void advance() {
    for (bool progressed = true; progressed;) {
      progressed = false;
      for (auto& device : devices_) progressed |= device->advance();
    }
  }
  void finishOldest() {
    for (auto& runner : runners_) runner->finishOldest();
    advance();
  }
  void expectBatches(const std::vector<Shards>& batches) {
    for (std::size_t device = 0; device < numDevices(); ++device)
      EXPECT_EQ(runners_[device]->batches(), batches) << "device " << device;
  }

 private:
  GroupPlan plan_;
  Memory logs_{sizeof(CollectiveLogs)};
  std::unique_ptr<Doorbell[]> doorbells_;
  Memory control_;
  std::vector<Memory> slots_;
  std::unique_ptr<TensorGroup> group_;
  std::vector<std::vector<Finished>> finished_;  // each by its device's thread
  std::vector<char> isKnown_;                    // not bits
  std::vector<std::shared_ptr<NotingRunner>> runners_;
  std::vector<std::unique_ptr<DeviceCollectives>> devices_;
};

/// A tensor of shards of one number each.
GroupPlan makeShards(std::uint32_t numShards, std::size_t numClients) {
  return makePlan(1, numClients, {{numShards, DType::kFloat32, ReduceOp::kSum, Algorithm::kNccl}}, 1);
}

class CollectivesOf : public testing::TestWithParam<std::size_t> {
 protected:
  std::size_t numDevices() const { return GetParam(); }
};

TEST_P(CollectivesOf, BeginTheSameBatchesInTheSameOrderWhoeverProposes) {
  constexpr std::uint32_t kNumShards = 500, kNumSteps = 5;
  Devices devices(makeShards(kNumShards, numDevices()), numDevices());
  std::vector<std::atomic<std::size_t>> numThrough(kNumSteps + 1);
  numThrough[0] = numDevices();
  together(numDevices(), [&](std::size_t device) {
    std::mt19937 random(static_cast<unsigned>(device));
    Shards mine;  // the device with the last contribution to a shard proposes its step
    const auto work = [&] {
      if (!mine.empty() && random() % 3 != 0) {
        devices.propose(device, {mine.back()}, devices.finished(device).size() / kNumShards + 1);
        mine.pop_back();
      }
      if (devices.runner(device).numUnderWay() > 0 && random() % 4 == 0)
        devices.runner(device).finishOldest();
      devices[device].advance();
    };
    for (std::uint32_t step = 1; step <= kNumSteps; ++step) {
      // Nobody pushes the next step before all have the results of this one.
      ASSERT_TRUE(eventually([&] { return numThrough[step - 1] == numDevices(); }));
      for (std::uint32_t shard = 0; shard < kNumShards; ++shard) {
        if ((shard + step) % numDevices() == device) mine.push_back(shard);
      }
      std::shuffle(mine.begin(), mine.end(), random);
      ASSERT_TRUE(eventually([&] {
        work();
        return devices.finished(device).size() == step * kNumShards;
      }));
      ++numThrough[step];
    }
  });
  devices.expectBatches(devices.runner(0).batches());
  for (std::size_t device = 0; device < numDevices(); ++device) {
    EXPECT_LE(devices.runner(device).mostUnderWay(), BatchedCompute::kMostStarted);
    const std::vector<Finished>& finished = devices.finished(device);
    for (std::uint32_t step = 1; step <= kNumSteps; ++step) {
      std::set<std::uint32_t> shards;
      for (std::size_t i = (step - 1) * kNumShards; i < step * kNumShards; ++i) {
        ASSERT_EQ(finished[i].entry.step, step);
        ASSERT_EQ(finished[i].entry.completedAt, 0U) << "is nobody's but the logs'";
        shards.insert(finished[i].entry.shard);
      }
      ASSERT_EQ(shards.size(), kNumShards) << "step " << step << " at device " << device;
    }
  }
}

TEST_P(CollectivesOf, PutTogetherWhatIsProposedWhileBatchesRun) {
  Devices devices(makeShards(8, numDevices()), numDevices());
  devices.advance();
  devices.expectBatches({});
  devices.propose(1, {5});
  devices.advance();
  devices.propose(0, {2});
  devices.advance();
  devices.expectBatches({{5}, {2}});
  devices.propose(1, {7});
  devices.advance();
  devices.propose(0, {0});
  devices.propose(1, {3});
  devices.advance();
  devices.expectBatches({{5}, {2}});
  devices.finishOldest();
  devices.expectBatches({{5}, {2}, {7, 0, 3}});
  EXPECT_EQ(devices.finished(1).size(), 1U);
  devices.finishOldest();
  devices.finishOldest();
  EXPECT_EQ(devices.finished(1).size(), 5U);
  for (std::size_t device = 0; device < numDevices(); ++device) {
    EXPECT_EQ(devices.runner(device).mostUnderWay(), BatchedCompute::kMostStarted);
    EXPECT_FALSE(devices[device].isBusy());
  }
}

TEST_P(CollectivesOf, TakeMoreShardsThanABatchAndMoreOverTimeThanTheLogsKeep) {
  constexpr auto kMost = static_cast<std::uint32_t>(BatchedCompute::kMostShards);
  constexpr std::uint32_t kNumShards = kMost + 900, kNumSteps = 4;
  static_assert(kNumShards * kNumSteps > kRingLogCapacity && kNumShards < kRingLogCapacity);
  Devices devices(makeShards(kNumShards, numDevices()), numDevices());
  std::vector<Shards> expected;
  for (std::uint32_t step = 1; step <= kNumSteps; ++step) {
    devices.propose(step % numDevices(), upTo(kNumShards), step);
    devices.advance();
    expected.insert(expected.end(), {upTo(kMost), upTo(kNumShards, kMost)});
    devices.expectBatches(expected);
    devices.finishOldest();
    devices.finishOldest();
    ASSERT_EQ(devices.finished(numDevices() - 1).size(), step * kNumShards);
  }
}

TEST_P(CollectivesOf, WaitForAGroupThatADeviceDoesNotKnowYet) {
  const std::size_t last = numDevices() - 1;
  Devices devices(makeShards(4, numDevices()), numDevices());
  devices.know(last, false);
  devices.propose(0, {0, 1});
  devices.advance();
  EXPECT_EQ(devices.runner(0).numUnderWay(), 1U);
  EXPECT_EQ(devices.runner(last).numUnderWay(), 0U);
  EXPECT_FALSE(devices[last].isBusy()) << "what comes is rung for";
  EXPECT_TRUE(devices[last].isWorkingOn(devices.group())) << "it stays when it comes and goes";
  devices.propose(last, {2});
  devices.advance();
  devices.know(last, true);
  devices.advance();
  devices.expectBatches({{0, 1}, {2}});
}

TEST_P(CollectivesOf, RingForWhoeverHasToGoOn) {
  Devices devices(makeShards(4, numDevices()), numDevices());
  devices.propose(1, {0});
  EXPECT_EQ(devices.numRings(0), 1U);
  devices[0].advance();
  EXPECT_EQ(devices.numRings(0), 1U);
  for (std::size_t device = 1; device < numDevices(); ++device) EXPECT_EQ(devices.numRings(device), 1U);
  devices.propose(0, {1});
  EXPECT_EQ(devices.numRings(0), 1U) << "it goes on by itself";
}

TEST_P(CollectivesOf, WorkOnAGroupFromItsBatchToTheEnd) {
  Devices devices(makeShards(4, numDevices()), numDevices());
  const auto expectWorking = [&](bool isWorking) {
    for (std::size_t device = 0; device < numDevices(); ++device) {
      EXPECT_EQ(devices[device].isWorkingOn(devices.group()), isWorking) << device;
      EXPECT_EQ(devices[device].isBusy(), isWorking) << device;
    }
  };
  expectWorking(false);
  devices.propose(0, {3});
  devices.advance();
  expectWorking(true);
  const GroupPlan otherPlan = makePlan(2, 1, {{1}});
  const Memory control(GroupControl::numBytes(1, 1)), slot(64);
  const TensorGroup other(otherPlan, control.fd, {slot.fd});
  EXPECT_FALSE(devices[0].isWorkingOn(other));
  devices.finishOldest();
  expectWorking(false);
}

TEST_P(CollectivesOf, DrainToTheEndOfWhatWasBegun) {
  Devices devices(makeShards(4, numDevices()), numDevices());
  devices.propose(0, {0});
  devices.advance();
  devices.propose(0, {1, 2});
  devices.advance();
  devices.propose(0, {3});
  for (std::size_t device = 0; device < numDevices(); ++device) {
    devices[device].drain();
    EXPECT_EQ(devices.finished(device).size(), 3U);
    EXPECT_FALSE(devices[device].isBusy());
  }
}

TEST_P(CollectivesOf, DrainAlthoughTheOthersAreGone) {
  Devices devices(makeShards(4, numDevices()), numDevices());
  devices.propose(0, {0, 1});
  devices.advance();
  devices.runner(0).breakDown();
  devices[0].drain();
  EXPECT_FALSE(devices[0].isBusy());
  EXPECT_FALSE(devices[0].isWorkingOn(devices.group()));
  EXPECT_TRUE(devices.finished(0).empty());
}

TEST_P(CollectivesOf, TellWhatAShardWasInItsStep) {
  Devices devices(makeDynamicPlan(1, numDevices(), 1, 4096, Algorithm::kNccl), numDevices());
  const auto give = [&](std::size_t client, std::uint32_t numElements, DType dtype) {
    Contribution& entry = devices.group().control().contribution(0, client);
    entry.numElements = numElements;
    entry.dtype = static_cast<std::uint8_t>(dtype);
  };
  for (std::size_t client = 0; client < numDevices(); ++client) give(client, 100, DType::kInt64);
  devices.propose(0, {0});
  devices.advance();
  give(0, 7, DType::kUInt8);  // whose device was done first
  devices.finishOldest();
  for (std::size_t device = 0; device < numDevices(); ++device) {
    ASSERT_EQ(devices.finished(device).size(), 1U);
    EXPECT_EQ(devices.finished(device)[0].shape.numElements, 100U);
    EXPECT_EQ(devices.finished(device)[0].shape.dtype, DType::kInt64);
  }
}

TEST_P(CollectivesOf, ReduceSumsAndMeansToWhichEachDeviceContributes) {
  const std::size_t numClients = 2 * numDevices();
  Devices devices(makePlan(1, numClients,
                           {{9, DType::kFloat32, ReduceOp::kSum, Algorithm::kNccl},
                            {9, DType::kInt32, ReduceOp::kMean, Algorithm::kNccl},
                            {9, DType::kFloat32, ReduceOp::kMax, Algorithm::kNccl}}),
                  numDevices());
  const auto canReduce = [&](std::uint32_t shard, const std::vector<std::uint8_t>& flags) {
    devices.contribute(shard, flags);
    return devices[0].canReduce(devices.group(), shard);
  };
  std::vector<std::uint8_t> flags(numClients, kPresent);
  EXPECT_TRUE(canReduce(0, flags));
  EXPECT_TRUE(canReduce(1, flags));
  EXPECT_FALSE(canReduce(2, flags)) << "a maximum";
  flags[1] = 0;
  EXPECT_TRUE(canReduce(0, flags)) << "the device's other client contributes";
  flags[1 + numDevices()] = kJoined;
  EXPECT_FALSE(canReduce(0, flags));
  flags[1] = kPresent;
  EXPECT_TRUE(canReduce(0, flags));
}

INSTANTIATE_TEST_SUITE_P(All, CollectivesOf, testing::Values(2, 3),
                         [](const auto& info) { return std::to_string(info.param) + "devices"; });

TEST(CollectivesSetUp, RefusesWhatIsMissingUnsealedOrTooSmall) {
  const Memory logs(sizeof(CollectiveLogs)), small(64);
  const Fd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed, sizeof(CollectiveLogs)), 0);
  const auto runner = std::make_shared<NotingRunner>();
  Doorbell doorbells[2]{};
  const auto make = [&](int logsFd, std::size_t numClientLists, std::shared_ptr<BatchRunner> reduces,
                        std::shared_ptr<const TensorMemory> lies) {
    const CollectiveMemory memory{logsFd, std::vector<std::vector<std::size_t>>(numClientLists),
                                  std::move(reduces), std::move(lies)};
    DeviceCollectives(memory, 0, 2, doorbells, nullptr, nullptr);
  };
  EXPECT_NO_THROW(make(logs.fd, 2, runner, hostMemory()));
  EXPECT_THROW(make(small.fd, 2, runner, hostMemory()), std::invalid_argument);
  EXPECT_THROW(make(unsealed, 2, runner, hostMemory()), std::invalid_argument);
  EXPECT_THROW(make(logs.fd, 1, runner, hostMemory()), std::invalid_argument);
  EXPECT_THROW(make(logs.fd, 3, runner, hostMemory()), std::invalid_argument);
  EXPECT_THROW(make(logs.fd, 2, nullptr, hostMemory()), std::invalid_argument);
  EXPECT_THROW(make(logs.fd, 2, runner, nullptr), std::invalid_argument);
}

}  // namespace
}  // namespace coarse::test::device_collectives_test
