/// The ready queue of a group gives each shard to exactly one taker; a ring's log shows all devices one
/// order.
#include "coarse/shared_memory/shard_queue.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <set>
#include <vector>

#include "fixture.hpp"

namespace coarse::test::shard_queue_test {
namespace {

/// The control memory of a group, on the heap.
struct ControlMemory {
  explicit ControlMemory(std::size_t numShards, std::size_t numClients = 1)
      : lines((GroupControl::numBytes(numShards, numClients) + kCacheLineBytes - 1) / kCacheLineBytes),
        control(reinterpret_cast<std::byte*>(lines.data()), numShards, numClients) {
    control.initialise();
  }
  struct alignas(kCacheLineBytes) Line {
    std::byte bytes[kCacheLineBytes];
  };
  std::vector<Line> lines;
  GroupControl control;
};

TEST(ReadyQueue, HasACellPerShardInAPowerOfTwo) {
  const std::vector<std::pair<std::size_t, std::uint64_t>> expected = {
      {1, 1}, {2, 2}, {3, 4}, {4, 4}, {5, 8}, {64, 64}, {65, 128}, {4096, 4096}};
  for (const auto& [numShards, capacity] : expected)
    EXPECT_EQ(ControlMemory(numShards).control.capacity(), capacity) << numShards;
}

TEST(ReadyQueue, GivesShardsInOrderAndThenNothing) {
  for (const std::uint32_t numShards : {1u, 2u, 3u, 8u}) {
    const ControlMemory memory(numShards);
    ReadyShard ready;
    for (std::uint32_t step = 1; step <= 5; ++step) {
      EXPECT_FALSE(popReady(memory.control, ready));
      for (std::uint32_t shard = 0; shard < numShards; ++shard)
        ASSERT_TRUE(pushReady(memory.control, {shard, step}));
      for (std::uint32_t shard = 0; shard < numShards; ++shard) {
        ASSERT_TRUE(popReady(memory.control, ready));
        EXPECT_EQ(ready.shard, shard);
        EXPECT_EQ(ready.step, step);
      }
    }
    EXPECT_FALSE(popReady(memory.control, ready));
  }
}

TEST(ReadyQueue, DoesNotWaitForAConsumerThatDiedHoldingACell) {
  for (const std::uint32_t numShards : {2u, 4u, 8u}) {
    const ControlMemory memory(numShards);
    for (std::uint32_t shard = 0; shard < numShards; ++shard)
      ASSERT_TRUE(pushReady(memory.control, {shard, 1}));
    memory.control.readyHead().value.fetch_add(1);  // it has claimed shard 0, and never lets go
    ReadyShard ready;
    for (std::uint32_t shard = 1; shard < numShards; ++shard) {
      ASSERT_TRUE(popReady(memory.control, ready));
      EXPECT_EQ(ready.shard, shard);
    }
    EXPECT_FALSE(pushReady(memory.control, {1, 2}));
    EXPECT_FALSE(popReady(memory.control, ready)) << "nothing was appended";
    memory.control.readyCell(0).sequence.store(memory.control.capacity());  // it was only interrupted
    ASSERT_TRUE(pushReady(memory.control, {1, 2}));
    ASSERT_TRUE(popReady(memory.control, ready));
    EXPECT_EQ(ready.shard, 1u);
    EXPECT_EQ(ready.step, 2u);
  }
}

TEST(Claims, GiveAContributionToOneMemoryDeviceOfAll) {
  constexpr std::size_t kNumDevices = 4, kNumShards = 3, kNumClients = 2;
  constexpr std::uint32_t kNumSteps = 1000;
  const ControlMemory memory(kNumShards, kNumClients);
  std::vector<std::atomic<std::uint32_t>> numWinners(kNumSteps + 1);
  std::atomic<std::uint32_t> numAsked{0};
  together(kNumDevices, [&](std::size_t) {
    for (std::uint32_t step = 1; step <= kNumSteps; ++step) {
      numWinners[step].fetch_add(memory.control.claim(1, 1, step) ? 1 : 0);
      numAsked.fetch_add(1);
      ASSERT_TRUE(eventually([&] { return numAsked.load() >= step * kNumDevices; }));
    }
  });
  for (std::uint32_t step = 1; step <= kNumSteps; ++step) EXPECT_EQ(numWinners[step].load(), 1u) << step;
  EXPECT_FALSE(memory.control.claim(1, 1, kNumSteps)) << "again";
  EXPECT_FALSE(memory.control.claim(1, 1, kNumSteps + 2)) << "a step was left out";
  EXPECT_TRUE(memory.control.claim(1, 0, 1)) << "another client's";
  EXPECT_TRUE(memory.control.claim(0, 1, 1)) << "another shard's";
}

struct Crew {
  std::uint32_t numShards;
  std::size_t numProducers;
  std::size_t numConsumers;
};

class ReadyQueueOfThreads : public testing::TestWithParam<Crew> {};

TEST_P(ReadyQueueOfThreads, GivesEachShardToExactlyOneConsumer) {
  const auto [numShards, numProducers, numConsumers] = GetParam();
  const std::uint32_t numSteps = std::max(100u, 3000u / numShards);
  const ControlMemory memory(numShards);
  std::vector<std::uint32_t> data(numShards,
                                  0);  // of a shard: written before it is pushed, read by who takes it
  std::vector<std::atomic<std::uint32_t>> finished(
      numShards);  // step; a shard comes again only after its last
  std::atomic<std::uint64_t> numTaken{0};
  const std::uint64_t total = std::uint64_t{numShards} * numSteps;

  const auto produce = [&](std::size_t producer) {
    for (std::uint32_t step = 1; step <= numSteps; ++step) {
      for (std::uint32_t shard = static_cast<std::uint32_t>(producer); shard < numShards;
           shard += static_cast<std::uint32_t>(numProducers)) {
        ASSERT_TRUE(eventually([&] { return finished[shard].load(std::memory_order_acquire) == step - 1; }));
        data[shard] = step;
        // A consumer of the last lap may be between its claim and its release.
        ASSERT_TRUE(eventually([&] { return pushReady(memory.control, {shard, step}); }));
      }
    }
  };
  const auto consume = [&] {
    ReadyShard ready;
    ASSERT_TRUE(eventually([&] {
      while (popReady(memory.control, ready)) {
        EXPECT_LT(ready.shard, numShards);
        EXPECT_EQ(data[ready.shard], ready.step);
        EXPECT_EQ(finished[ready.shard].exchange(ready.step, std::memory_order_acq_rel), ready.step - 1)
            << "shard " << ready.shard << " was taken twice or out of turn";
        numTaken.fetch_add(1, std::memory_order_relaxed);
      }
      return numTaken.load(std::memory_order_relaxed) >= total;
    }));
  };
  together(numProducers + numConsumers, [&](std::size_t i) { i < numProducers ? produce(i) : consume(); });
  EXPECT_EQ(numTaken.load(), total);
  ReadyShard ready;
  EXPECT_FALSE(popReady(memory.control, ready));
}

INSTANTIATE_TEST_SUITE_P(All, ReadyQueueOfThreads,
                         testing::Values(Crew{1, 1, 1}, Crew{1, 1, 3}, Crew{2, 2, 2}, Crew{3, 3, 2},
                                         Crew{4, 1, 4}, Crew{8, 4, 1}, Crew{64, 3, 3}, Crew{1000, 2, 3}),
                         [](const auto& info) {
                           return std::to_string(info.param.numShards) + "shards_" +
                                  std::to_string(info.param.numProducers) + "producers_" +
                                  std::to_string(info.param.numConsumers) + "consumers";
                         });

class RingOrder : public testing::Test {
 protected:
  std::unique_ptr<RingLog> log_ = std::make_unique<RingLog>();  // zero, as new shared memory
};

TEST_F(RingOrder, ShowEntriesOnceTheyAreAppended) {
  RingEntry entry;
  EXPECT_FALSE(readRing(*log_, 0, entry));
  appendToRing(*log_, {7, 8, 9});
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(readRing(*log_, 0, entry)) << "every device reads it";
    EXPECT_EQ(entry.group, 7u);
    EXPECT_EQ(entry.shard, 8u);
    EXPECT_EQ(entry.step, 9u);
  }
  EXPECT_FALSE(readRing(*log_, 1, entry));
}

TEST_F(RingOrder, GoOnForManyLaps) {
  RingEntry entry;
  for (std::uint32_t i = 0; i < 3 * kRingLogCapacity; ++i) {
    ASSERT_FALSE(readRing(*log_, i, entry)) << "an entry of the lap before, at " << i;
    appendToRing(*log_, {1, i, 2 * i});
    ASSERT_TRUE(readRing(*log_, i, entry));
    ASSERT_EQ(entry.shard, i);
    ASSERT_EQ(entry.step, 2 * i);
  }
}

TEST_F(RingOrder, ShowAllReadersOneOrder) {
  constexpr std::size_t kNumWriters = 3, kNumReaders = 3;
  constexpr std::uint32_t kEach = 1000;
  std::vector<std::uint32_t> data(kNumWriters * kEach);  // written before the entry, read after it
  std::vector<std::vector<std::uint32_t>> orders(kNumReaders);
  together(kNumWriters + kNumReaders, [&](std::size_t thread) {
    if (thread < kNumWriters) {
      for (std::uint32_t i = 0; i < kEach; ++i) {
        const auto shard = static_cast<std::uint32_t>(thread) * kEach + i;
        data[shard] = shard + 1;
        appendToRing(*log_, {0, shard, 1});
      }
      return;
    }
    std::vector<std::uint32_t>& order = orders[thread - kNumWriters];
    for (std::uint64_t position = 0; position < kNumWriters * kEach; ++position) {
      RingEntry entry;
      ASSERT_TRUE(eventually([&] { return readRing(*log_, position, entry); }));
      ASSERT_EQ(data.at(entry.shard), entry.shard + 1);
      order.push_back(entry.shard);
    }
  });
  EXPECT_EQ(std::set<std::uint32_t>(orders[0].begin(), orders[0].end()).size(), kNumWriters * kEach);
  for (const auto& order : orders) EXPECT_EQ(order, orders[0]);
}

}  // namespace
}  // namespace coarse::test::shard_queue_test
