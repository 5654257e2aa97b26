/// NcclRunner: whatever the devices, clients, types and lengths, all slots get the one exact result; who
/// waits in vain is told so, and nothing works in memory any more. Driver and NCCL are those of
/// cuda_stand_in.cpp and nccl_stand_in.cpp, and devices are threads.
#include "coarse/gpu/nccl_runner.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "contributions.hpp"
#include "fixture.hpp"
#include "stand_in_kernels.hpp"

namespace coarse::test::nccl_runner_test {
namespace {

/// A GPU with what reduces there, and its view of one group.
class Device {
 public:
  Device(const GroupPlan& plan, int number, const std::vector<std::size_t>& localClients,
         std::unique_ptr<nccl::Communicator> communicator, cuda::SharedContext context,
         const NcclLimits& limits)
      : plan_(plan),
        random_(static_cast<unsigned>(number)),
        memory_(std::make_shared<CudaTensorMemory>(std::move(context), standInKernels())),
        runner_(std::make_unique<NcclRunner>(std::move(communicator), memory_, localClients, limits)) {}

  /// @param slots of all clients, which any GPU reaches.
  void map(int controlFd, const std::vector<Region>& slots) {
    group_ =
        std::make_unique<TensorGroup>(plan_, controlFd, slots, OptimizerFds(), std::vector<int>(), memory_);
  }
  TensorGroup& group() { return *group_; }
  NcclRunner& runner() { return *runner_; }
  void end() { runner_.reset(); }

  /// Begins a batch of shards, which this device has heard of in an order of its own.
  void start(std::vector<std::uint32_t> shards) {
    std::shuffle(shards.begin(), shards.end(), random_);
    ShardBatch batch;
    for (const std::uint32_t shard : shards) batch.push_back({group_.get(), {plan_.id, shard, 1, 0}, {}, 0});
    runner_->start(batch, 0);
  }
  void finish() {
    ASSERT_NO_THROW(runner_->wait());
    ASSERT_NO_THROW(EXPECT_TRUE(runner_->conclude()));
  }

 private:
  GroupPlan plan_;
  std::mt19937 random_;
  std::shared_ptr<const CudaTensorMemory> memory_;
  std::unique_ptr<TensorGroup> group_;
  std::unique_ptr<NcclRunner> runner_;
};

/// One group in the memory of several GPUs. Client c is local to device c % numDevices.
class Devices {
 public:
  Devices(GroupPlan plan, std::size_t numDevices, const NcclLimits& limits)
      : plan_(std::move(plan)), control_(GroupControl::numBytes(plan_.shards.size(), plan_.numClients)) {
    const auto library = std::make_shared<nccl::Library>();
    const nccl::UniqueId id = library->makeUniqueId();
    std::vector<cuda::SharedContext> contexts;
    std::vector<std::vector<std::size_t>> clientsOf(numDevices);
    for (std::size_t i = 0; i < numDevices; ++i)
      contexts.push_back(std::make_shared<cuda::Context>(static_cast<int>(i)));
    std::vector<Region> slots;
    for (std::size_t client = 0; client < plan_.numClients; ++client) {
      clientsOf[client % numDevices].push_back(client);
      const auto memory = cuda::DeviceMemory::allocate(contexts[client % numDevices],
                                                       std::max<std::size_t>(plan_.clientBytes(), 1));
      slots.emplace_back(fds_.emplace_back(memory.exportFd()), 0, memory.numBytes());
    }
    devices_.resize(numDevices);
    together(numDevices, [&](std::size_t i) {
      const int rank = static_cast<int>(i);
      auto communicator =
          std::make_unique<nccl::Communicator>(library, id, rank, static_cast<int>(numDevices), contexts[i]);
      devices_[i] =
          std::make_unique<Device>(plan_, rank, clientsOf[i], std::move(communicator), contexts[i], limits);
      devices_[i]->map(control_.fd, slots);
    });
    devices_[0]->group().control().initialise();
  }

  Device& operator[](std::size_t device) { return *devices_[device]; }
  const GroupPlan& plan() const { return plan_; }
  std::vector<std::uint32_t> allShards() const {
    std::vector<std::uint32_t> shards(plan_.shards.size());
    std::iota(shards.begin(), shards.end(), 0U);
    return shards;
  }

  /// All clients give something, whether it counts or not.
  void contribute(std::uint32_t step, const std::vector<std::uint8_t>& flags) {
    for (std::size_t client = 0; client < plan_.numClients; ++client) {
      for (std::uint32_t i = 0; i < plan_.shards.size(); ++i) {
        Contribution& entry = ofClient(client).control().contribution(i, client);
        entry.flags = flags[client];
        entry.step.store(step, std::memory_order_release);
      }
      const Bytes slot = slotOf([&](const TensorSpec& tensor) {
        return contribution(tensor.dtype, tensor.numElements, client, step);
      });
      std::memcpy(slotBytes(client), slot.data(), slot.size());
    }
  }
  /// Whether the slots of all clients hold the results of `present`, and what lies between is as it was.
  void expectResults(std::uint32_t step, const std::vector<std::size_t>& present, std::uint32_t divisor) {
    const Bytes expected = slotOf([&](const TensorSpec& tensor) {
      return result(tensor.dtype, tensor.op, tensor.numElements, present, step, divisor);
    });
    for (std::size_t client = 0; client < plan_.numClients; ++client) {
      const std::byte* const found = slotBytes(client);
      const auto differ = std::mismatch(expected.begin(), expected.end(), found).first;
      const auto offset = static_cast<std::size_t>(differ - expected.begin());
      ASSERT_EQ(offset, expected.size()) << "client " << client << " at step " << step << ": " << at(offset);
    }
  }
  /// Each device in a thread of its own.
  template <typename Function>
  void forEach(Function function) {
    together(devices_.size(), [&](std::size_t device) { function(*devices_[device]); });
  }

 private:
  TensorGroup& ofClient(std::size_t client) { return devices_[client % devices_.size()]->group(); }
  std::byte* slotBytes(std::size_t client) { return ofClient(client).slot(client, plan_.shards[0]); }
  /// A client's slot, zeros where there is no tensor.
  template <typename BytesOf>
  Bytes slotOf(BytesOf bytesOf) const {
    Bytes slot(plan_.slotBytes);
    for (std::size_t first = 0; first < plan_.shards.size();) {
      const Shard& shard = plan_.shards[first];
      TensorSpec tensor{0, shard.dtype, shard.op, shard.algorithm};
      for (; first < plan_.shards.size() && plan_.shards[first].tensor == shard.tensor; ++first)
        tensor.numElements += plan_.shards[first].numElements;
      const Bytes bytes = bytesOf(tensor);
      std::memcpy(slot.data() + shard.offset, bytes.data(), bytes.size());
    }
    return slot;
  }
  std::string at(std::size_t offset) const {
    const auto after = std::find_if(plan_.shards.begin(), plan_.shards.end(),
                                    [=](const Shard& shard) { return shard.offset > offset; });
    const Shard& shard = *std::prev(after);
    return "byte " + std::to_string(offset - shard.offset) + " of shard " +
           std::to_string(after - plan_.shards.begin() - 1) + ", " + std::to_string(shard.numElements) +
           " of dtype " + std::to_string(static_cast<int>(shard.dtype)) + ", op " +
           std::to_string(static_cast<int>(shard.op));
  }

  const Variable numGpus_{"STAND_IN_GPUS", "3"};
  GroupPlan plan_;
  Memory control_;
  std::vector<Fd> fds_;
  std::vector<std::unique_ptr<Device>> devices_;
};

/// Sums and means of each type; tensors of more than `shardElements` are several shards.
GroupPlan makeVariousPlan(std::size_t numClients, const std::vector<std::uint32_t>& lengths,
                          std::uint32_t shardElements) {
  std::vector<TensorSpec> tensors;
  for (const DType dtype : kEveryDType) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean}) {
      for (const std::uint32_t numElements : lengths)
        tensors.push_back({numElements, dtype, op, Algorithm::kNccl});
    }
  }
  return makePlan(1, numClients, tensors, shardElements);
}

/// A time limit for a busy machine, which is slow under a sanitizer.
NcclLimits patient() {
  NcclLimits limits;
  limits.patience = std::chrono::seconds(60);
  return limits;
}

/// Bytes that no piece or round of numbers fills exactly, so that there are many.
NcclLimits fewBytes() {
  NcclLimits limits = patient();
  limits.pieceBytes = 1500;
  limits.roundBytes = 5000;
  return limits;
}

struct Shape {
  std::size_t numDevices;
  std::size_t numClients;
};

class NcclReduces : public testing::TestWithParam<Shape> {
 protected:
  std::size_t numDevices() const { return GetParam().numDevices; }
  std::size_t numClients() const { return GetParam().numClients; }
  std::vector<std::size_t> everybody() const {
    std::vector<std::size_t> clients(numClients());
    std::iota(clients.begin(), clients.end(), std::size_t{0});
    return clients;
  }
  std::uint32_t divisor() const { return static_cast<std::uint32_t>(numClients()); }
  /// Some steps to which all contribute.
  void check(GroupPlan plan, const NcclLimits& limits = patient()) {
    Devices devices(std::move(plan), numDevices(), limits);
    for (std::uint32_t step = 1; step <= 3; ++step) {
      devices.contribute(step, std::vector<std::uint8_t>(numClients(), kPresent));
      devices.forEach([&](Device& device) {
        device.start(devices.allShards());
        device.finish();
      });
      ASSERT_NO_FATAL_FAILURE(devices.expectResults(step, everybody(), divisor()));
    }
  }
};

TEST_P(NcclReduces, EveryTypeAndOddLength) {
  check(makeVariousPlan(numClients(), {1, 2, 3, 37, 1001}, 1 << 30));
}

TEST_P(NcclReduces, ShardsInTheOrderOfTheirTensorsWhateverThatOfABatch) {
  check(makeVariousPlan(numClients(), {1001}, 77));
}

TEST_P(NcclReduces, WhatIsLongerThanPiecesAndRounds) {
  check(makeVariousPlan(numClients(), {1, 749, 5003}, 1201), fewBytes());
}

// More of them than one launch takes.
TEST_P(NcclReduces, ManySmallTensors) {
  std::vector<TensorSpec> tensors(400, {5, DType::kBFloat16, ReduceOp::kMean, Algorithm::kNccl});
  check(makePlan(1, numClients(), tensors));
}

TEST_P(NcclReduces, ForWhoeverIsAbsentOrHasJoinedToo) {
  const GroupPlan plan = makeVariousPlan(numClients(), {3, 129}, 50);
  for (const std::uint8_t absence : {std::uint8_t{0}, std::uint8_t{kJoined}}) {
    Devices devices(plan, numDevices(), patient());
    std::vector<std::uint8_t> flags(numClients(), kPresent);
    // One client of each device stays.
    std::vector<std::size_t> present = everybody();
    for (std::size_t client = numDevices(); client < numClients(); ++client) {
      const std::size_t absent = client % 2 == 0 ? client : client - numDevices();
      flags[absent] = absence;
      present.erase(std::find(present.begin(), present.end(), absent));
    }
    devices.contribute(1, flags);
    devices.forEach([&](Device& device) {
      device.start(devices.allShards());
      device.finish();
    });
    const std::size_t numCounted = absence == kJoined ? present.size() : numClients();
    ASSERT_NO_FATAL_FAILURE(devices.expectResults(1, present, static_cast<std::uint32_t>(numCounted)));
  }
}

TEST_P(NcclReduces, TwoBatchesUnderWay) {
  Devices devices(makeVariousPlan(numClients(), {1, 300}, 100), numDevices(), fewBytes());
  std::vector<std::uint32_t> odd, even;
  for (const std::uint32_t shard : devices.allShards()) (shard % 2 == 0 ? even : odd).push_back(shard);
  for (std::uint32_t step = 1; step <= 3; ++step) {
    devices.contribute(step, std::vector<std::uint8_t>(numClients(), kPresent));
    devices[0].start(odd);
    devices[0].start(even);
    EXPECT_FALSE(devices[0].runner().conclude()) << "without the others";
    devices.forEach([&](Device& device) {
      if (&device != &devices[0]) {
        device.start(odd);
        device.start(even);
      }
      device.finish();
      device.finish();
    });
    ASSERT_NO_FATAL_FAILURE(devices.expectResults(step, everybody(), divisor()));
  }
}

TEST_P(NcclReduces, AfterItsDevicesWereConnected) {
  Devices devices(makeVariousPlan(numClients(), {37}, 1 << 30), numDevices(), fewBytes());
  devices.contribute(1, std::vector<std::uint8_t>(numClients(), kPresent));
  devices.forEach([&](Device& device) {
    device.runner().connect();
    device.start(devices.allShards());
    device.finish();
  });
  devices.expectResults(1, everybody(), divisor());
}

INSTANTIATE_TEST_SUITE_P(All, NcclReduces,
                         testing::Values(Shape{2, 2}, Shape{3, 3}, Shape{2, 3}, Shape{2, 4}, Shape{3, 6}),
                         [](const auto& info) {
                           return std::to_string(info.param.numDevices) + "devices_" +
                                  std::to_string(info.param.numClients) + "clients";
                         });

NcclLimits littlePatience() {
  NcclLimits limits;
  limits.patience = std::chrono::milliseconds(50);
  return limits;
}

/// Means of two clients each, which kernels finish behind NCCL.
GroupPlan makeMeans() {
  return makePlan(1, 4, {{5003, DType::kBFloat16, ReduceOp::kMean, Algorithm::kNccl}});
}

TEST(NcclRunnerAlone, EndsWhatOthersNeverComeTo) {
  Devices devices(makeMeans(), 2, littlePatience());
  devices.contribute(1, std::vector<std::uint8_t>(4, kPresent));
  devices[0].start(devices.allShards());
  devices[0].start({});
  EXPECT_FALSE(devices[0].runner().conclude());
  EXPECT_THROW(devices[0].runner().wait(), nccl::Error);
  EXPECT_THROW(devices[0].runner().conclude(), nccl::Error);
  EXPECT_THROW(devices[0].start(devices.allShards()), nccl::Error);
}

TEST(NcclRunnerAlone, LeavesNothingUnderWayWhenItGoes) {
  Devices devices(makeMeans(), 2, littlePatience());
  devices.contribute(1, std::vector<std::uint8_t>(4, kPresent));
  devices[0].start(devices.allShards());
  devices[0].start(devices.allShards());
  devices[0].end();
}

TEST(NcclRunnerAlone, FailsWhereDevicesDoNotAgreeOnABatch) {
  const TensorSpec one{5, DType::kFloat32, ReduceOp::kSum, Algorithm::kNccl};
  const TensorSpec other{6, DType::kFloat32, ReduceOp::kSum, Algorithm::kNccl};
  Devices devices(makePlan(1, 2, {one, other}), 2, {});
  devices.contribute(1, {kPresent, kPresent});
  std::uint32_t shard = 0;
  for (const std::size_t device : {0, 1}) devices[device].start({shard++});
  devices.forEach([](Device& device) {
    EXPECT_THROW(
        {
          device.runner().wait();
          device.runner().conclude();
        },
        nccl::Error);
  });
}

TEST(NcclRunnerAlone, RefusesRoundsWithoutRoomForAPiece) {
  const auto validate = [](std::size_t pieceBytes, std::size_t roundBytes) {
    NcclLimits limits;
    limits.pieceBytes = pieceBytes;
    limits.roundBytes = roundBytes;
    limits.validate();
  };
  EXPECT_NO_THROW(validate(8, 512));
  EXPECT_NO_THROW(validate(1024, 1024));
  EXPECT_THROW(validate(7, 512), std::invalid_argument);
  EXPECT_THROW(validate(8, 511), std::invalid_argument);
  EXPECT_THROW(validate(1025, 1535), std::invalid_argument);
  const auto library = std::make_shared<nccl::Library>();
  const auto context = std::make_shared<cuda::Context>(0);
  const auto alone = std::make_shared<nccl::Communicator>(library, library->makeUniqueId(), 0, 1, context);
  const auto memory = std::make_shared<CudaTensorMemory>(context, standInKernels());
  NcclLimits limits;
  limits.roundBytes = limits.pieceBytes - 1;
  EXPECT_THROW(NcclRunner(alone, memory, {0}, limits), std::invalid_argument);
}

}  // namespace
}  // namespace coarse::test::nccl_runner_test
