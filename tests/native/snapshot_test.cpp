/// Snapshots of memory that is updated in place: their contents, their cost, and updates concurrent with
/// readers at any point.
#include "coarse/snapshot/snapshot.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "fixture.hpp"

namespace coarse::test::snapshot_test {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kPlentyOfBytes = std::size_t{1} << 40;
const std::vector<std::size_t> kBlockBytes = {4 * kPageBytes, kPageBytes, 12, 3 * kPageBytes + 4};

/// Blocks of words that two memory devices update in place, and the memory that both share.
class Blocks {
 public:
  explicit Blocks(std::size_t limitBytes = kPlentyOfBytes, milliseconds patience = milliseconds(30'000),
                  std::vector<std::size_t> blockBytes = kBlockBytes)
      : request_(sizeof(SnapshotRequest)),
        control_(SnapshotControl::numBytes(blockBytes.size())),
        poolFd_(createSparseSealedMemory("test", SparsePool::numBytes(blockBytes))),
        trigger_(request_.fd, control_.fd, 0) {
    for (const std::size_t numBytes : blockBytes) words_.emplace_back(numBytes / sizeof(std::uint32_t));
    for (int device = 0; device < 2; ++device)
      stores_.push_back(std::make_unique<SnapshotStore>(
          blockBytes, SnapshotFds{request_.fd, control_.fd, poolFd_}, patience));
    stores_[0]->setLimit(limitBytes);
  }

  std::size_t size() const { return words_.size(); }
  SnapshotStore& store(std::size_t device) { return *stores_[device]; }
  SnapshotStore& reader() { return *stores_[0]; }
  std::uint32_t begin() { return trigger_.begin(); }
  const SnapshotTrigger& trigger() const { return trigger_; }
  std::atomic<std::uint32_t>& begun() { return reinterpret_cast<SnapshotRequest*>(request_.data())->begun; }

  /// Writes `value` to every word of a block, as the sync core of a device does.
  void update(std::size_t block, std::uint32_t value, std::size_t device = 1) {
    store(device).keep(block, bytes(block));
    std::fill(words_[block].begin(), words_[block].end(), value);
  }
  void updateAll(std::uint32_t value) {
    for (std::size_t block = 0; block < size(); ++block) update(block, value);
  }
  /// @returns the words of a block in a snapshot; empty if they cannot be read.
  std::vector<std::uint32_t> read(std::uint32_t snapshot, std::size_t block) {
    std::vector<std::uint32_t> found(words_[block].size());
    const bool isThere =
        reader().read(snapshot, block, bytes(block), reinterpret_cast<std::byte*>(found.data()));
    return isThere ? found : std::vector<std::uint32_t>();
  }
  void expect(std::uint32_t snapshot, std::size_t block, std::uint32_t value) {
    EXPECT_EQ(read(snapshot, block), std::vector<std::uint32_t>(words_[block].size(), value))
        << "block " << block << " in snapshot " << snapshot;
  }
  void expectAll(std::uint32_t snapshot, std::uint32_t value) {
    for (std::size_t block = 0; block < size(); ++block) expect(snapshot, block, value);
  }
  /// What the system has given for the pool.
  std::size_t residentBytes() const {
    struct stat status{};
    if (::fstat(poolFd_, &status) != 0) std::abort();
    return static_cast<std::size_t>(status.st_blocks) * 512;
  }

 private:
  const std::byte* bytes(std::size_t block) const {
    return reinterpret_cast<const std::byte*>(words_[block].data());
  }

  Memory request_, control_;
  Fd poolFd_;
  SnapshotTrigger trigger_;
  std::vector<std::vector<std::uint32_t>> words_;
  std::vector<std::unique_ptr<SnapshotStore>> stores_;
};

TEST(Snapshots, SeeWhatWasThereWhenTheyBegan) {
  Blocks blocks;
  blocks.updateAll(7);
  const std::uint32_t snapshot = blocks.begin();
  ASSERT_EQ(snapshot, 1U);
  blocks.expectAll(snapshot, 7);
  blocks.update(0, 8);
  blocks.update(2, 8);
  blocks.expectAll(snapshot, 7);
  blocks.update(0, 9);
  blocks.updateAll(10);
  blocks.expectAll(snapshot, 7);
}

TEST(Snapshots, CostOneCopyOfWhatChangesAndNothingElse) {
  Blocks blocks;
  blocks.updateAll(1);
  EXPECT_EQ(blocks.reader().statistics().keptBytes, 0U);
  const std::uint32_t snapshot = blocks.begin();
  EXPECT_EQ(blocks.residentBytes(), 0U);
  for (std::uint32_t value = 2; value < 5; ++value) {
    blocks.update(0, value);
    blocks.update(2, value);
  }
  const SnapshotStatistics statistics = blocks.reader().statistics();
  EXPECT_EQ(statistics.keptBytes, kBlockBytes[0] + kBlockBytes[2]);
  EXPECT_EQ(statistics.takenBytes, kBlockBytes[0] + kPageBytes);
  EXPECT_EQ(blocks.residentBytes(), statistics.takenBytes);
  blocks.reader().letGo(snapshot, 0);
  EXPECT_EQ(blocks.residentBytes(), kPageBytes);
  blocks.reader().release(snapshot);
  EXPECT_EQ(blocks.residentBytes(), 0U);
  EXPECT_EQ(blocks.reader().statistics().takenBytes, 0U);
  EXPECT_EQ(blocks.reader().statistics().peakBytes, statistics.takenBytes);
}

TEST(Snapshots, ShareMemoryThatWasTakenAheadAndKeepIt) {
  Blocks blocks;
  blocks.updateAll(1);
  std::size_t wholeBytes = 0;
  for (std::size_t block = 0; block < blocks.size(); ++block) {
    EXPECT_TRUE(blocks.reader().warm(block));
    wholeBytes += versionBytes(kBlockBytes[block]);
  }
  EXPECT_EQ(blocks.residentBytes(), wholeBytes);
  for (std::uint32_t value = 2; value < 12; ++value) {
    const std::uint32_t snapshot = blocks.begin();
    blocks.updateAll(value);
    EXPECT_EQ(blocks.residentBytes(), wholeBytes) << "nothing is taken any more";
    EXPECT_EQ(blocks.reader().statistics().takenBytes, wholeBytes);
    blocks.expectAll(snapshot, value - 1);
    blocks.reader().letGo(snapshot, 0);
    EXPECT_TRUE(blocks.read(snapshot, 0).empty());
    blocks.reader().release(snapshot);
    EXPECT_EQ(blocks.reader().statistics().takenBytes, 0U);
    EXPECT_EQ(blocks.residentBytes(), wholeBytes) << "nothing is given back";
  }
}

TEST(Snapshots, BesideOneAnotherTakeMemoryBeyondWhatIsShared) {
  Blocks blocks;
  for (std::size_t block = 0; block < blocks.size(); ++block) EXPECT_TRUE(blocks.reader().warm(block));
  const std::size_t wholeBytes = blocks.residentBytes();
  blocks.updateAll(1);
  const std::uint32_t first = blocks.begin();
  const std::uint32_t second = blocks.begin();  // both refer to the version that the first update overwrites
  blocks.updateAll(2);
  const std::uint32_t third = blocks.begin();
  blocks.updateAll(3);
  EXPECT_EQ(blocks.residentBytes(), 3 * wholeBytes);
  blocks.reader().release(first);
  blocks.expectAll(second, 1);
  blocks.expectAll(third, 2);
  blocks.reader().release(second);
  blocks.reader().release(third);
  EXPECT_EQ(blocks.residentBytes(), wholeBytes);
  const std::uint32_t fourth = blocks.begin();
  blocks.updateAll(4);
  blocks.expectAll(fourth, 3);
  EXPECT_EQ(blocks.residentBytes(), wholeBytes);
}

TEST(Snapshots, TakeNothingAheadWhereTheLimitHoldsNoWholeOne) {
  Blocks blocks(5 * kPageBytes);
  EXPECT_FALSE(blocks.reader().warm(0));
  EXPECT_EQ(blocks.residentBytes(), 0U);
}

TEST(Snapshots, AreIndependentOfEachOther) {
  Blocks blocks;
  std::vector<std::uint32_t> snapshots;
  for (std::uint32_t value = 1; value <= kMostSnapshots; ++value) {
    blocks.updateAll(value);
    snapshots.push_back(blocks.begin());
  }
  blocks.update(1, 99);
  blocks.reader().release(snapshots[1]);
  for (const std::uint32_t value : {1U, 3U, 4U}) blocks.expectAll(snapshots[value - 1], value);
  EXPECT_TRUE(blocks.read(snapshots[1], 0).empty());
  EXPECT_TRUE(blocks.read(snapshots[1], 1).empty());
}

TEST(Snapshots, AreRefusedBeyondAsManyAsThereCanBe) {
  Blocks blocks;
  for (std::uint32_t i = 1; i <= kMostSnapshots; ++i) ASSERT_EQ(blocks.begin(), i);
  EXPECT_EQ(blocks.begin(), 0U);
  blocks.reader().release(2);
  EXPECT_EQ(blocks.begin(), 0U);  // places are taken in turn
  blocks.reader().release(1);
  EXPECT_EQ(blocks.begin(), kMostSnapshots + 1);
  EXPECT_EQ(blocks.begin(), kMostSnapshots + 2);
}

TEST(Snapshots, NeedNoCopyOfWhatTheyHaveLetGo) {
  Blocks blocks;
  const std::uint32_t snapshot = blocks.begin();
  blocks.reader().letGo(snapshot, 0);
  blocks.updateAll(5);
  EXPECT_EQ(blocks.reader().statistics().takenBytes, 2 * kPageBytes + 4 * kPageBytes);
  EXPECT_TRUE(blocks.read(snapshot, 0).empty());
  blocks.expect(snapshot, 1, 0);
}

TEST(Snapshots, ReleaseIsIdempotentAndSparesLaterOnes) {
  Blocks blocks;
  for (std::uint32_t round = 1; round <= 3 * kMostSnapshots; ++round) {
    blocks.updateAll(round);
    const std::uint32_t snapshot = blocks.begin();
    ASSERT_EQ(snapshot, round);
    blocks.updateAll(0);
    blocks.reader().release(snapshot == 1 ? 0 : snapshot - 1);
    blocks.expectAll(snapshot, round);
    blocks.reader().release(snapshot);
    blocks.reader().release(snapshot);
    EXPECT_FALSE(blocks.reader().isLive(snapshot));
    EXPECT_EQ(blocks.residentBytes(), 0U);
  }
}

TEST(Snapshots, WhatWasNeverBegunCannotBeRead) {
  Blocks blocks;
  EXPECT_TRUE(blocks.read(0, 0).empty());
  EXPECT_TRUE(blocks.read(1, 0).empty());
  blocks.reader().release(1);
  EXPECT_EQ(blocks.begin(), 1U);
  blocks.expectAll(1, 0);
}

TEST(Snapshots, SurviveAWorkerThatWritesAnythingToTheCounter) {
  Blocks blocks(2 * kPageBytes, milliseconds(1));
  for (const std::uint32_t begun : {4'000'000'000U, 3U, ~0U, 0U, 1U}) {
    blocks.begun() = begun;
    blocks.updateAll(begun);
    for (std::uint32_t snapshot = 0; snapshot < 6; ++snapshot) {
      blocks.read(snapshot, 0);
      blocks.reader().release(snapshot);
      blocks.reader().release(begun - snapshot);
    }
  }
  EXPECT_EQ(blocks.reader().statistics().takenBytes, 0U);
  EXPECT_EQ(blocks.residentBytes(), 0U);
}

TEST(Snapshots, StayRightWhateverAWorkerWritesToTheCounter) {
  for (const std::uint32_t begun : {4'000'000'000U, ~0U, 7U, 1U, 0U}) {
    Blocks blocks(kPlentyOfBytes, milliseconds(30'000));
    blocks.updateAll(1);
    ASSERT_EQ(blocks.begin(), 1U);
    blocks.reader().release(1);
    const std::uint32_t snapshot = blocks.begin();
    blocks.update(0, 2);  // devices have seen that it has begun
    blocks.begun() = begun;
    blocks.updateAll(3);
    EXPECT_EQ(blocks.reader().statistics().numWaits, 0U)
        << "nobody waits for a snapshot that was never begun";
    EXPECT_EQ(blocks.reader().statistics().impossible, std::max(begun, 1U));
    EXPECT_EQ(blocks.trigger().impossible(), std::max(begun, 1U));
    EXPECT_EQ(blocks.begin(), 0U);
    blocks.expectAll(snapshot, 1);
    blocks.reader().release(snapshot);
    blocks.reader().release(begun);
    EXPECT_EQ(blocks.residentBytes(), 0U);
  }
}

TEST(Snapshots, AreNotSuspectedWhileWorkersBeginAndReleaseThem) {
  Blocks blocks;
  std::atomic<bool> isOver{false};
  std::thread updating([&] {
    for (std::uint32_t value = 0; !isOver; ++value) blocks.updateAll(value);
  });
  for (std::uint32_t i = 0; i < 2'000; ++i) {
    const std::uint32_t snapshot = blocks.begin();
    EXPECT_EQ(blocks.trigger().impossible(), 0U);
    blocks.reader().release(snapshot);
  }
  isOver = true;
  updating.join();
  EXPECT_EQ(blocks.reader().statistics().impossible, 0U);
}

// ---- a pool that is too small ----

TEST(SnapshotPools, HoldUpUpdatesUntilSomethingIsFreed) {
  Blocks blocks(4 * kPageBytes);
  blocks.updateAll(1);
  const std::uint32_t snapshot = blocks.begin();
  blocks.update(0, 2);
  std::atomic<bool> isUpdated{false};
  std::thread updating([&] {
    blocks.update(3, 2);
    isUpdated = true;
  });
  EXPECT_TRUE(eventually([&] { return blocks.reader().statistics().numWaits == 1; }));
  EXPECT_FALSE(isUpdated);
  blocks.expectAll(snapshot, 1);
  blocks.reader().letGo(snapshot, 0);
  updating.join();
  blocks.expect(snapshot, 3, 1);
  const SnapshotStatistics statistics = blocks.reader().statistics();
  EXPECT_EQ(statistics.peakBytes, 4 * kPageBytes);
  EXPECT_GT(statistics.waitedSeconds, 0);
  EXPECT_EQ(statistics.numLost, 0U);
}

TEST(SnapshotPools, LetAnUpdateGoOnWhenItsBlockWasReadMeanwhile) {
  Blocks blocks(4 * kPageBytes);
  const std::uint32_t snapshot = blocks.begin();
  blocks.update(0, 2);
  std::thread updating([&] { blocks.update(3, 2); });
  EXPECT_TRUE(eventually([&] { return blocks.reader().statistics().numWaits == 1; }));
  blocks.expect(snapshot, 3, 0);
  blocks.reader().letGo(snapshot, 3);
  updating.join();
  EXPECT_EQ(blocks.reader().statistics().takenBytes, 4 * kPageBytes);
}

TEST(SnapshotPools, GiveUpTheOldestSnapshotWhenNothingIsFreed) {
  Blocks blocks(5 * kPageBytes, milliseconds(20));
  blocks.updateAll(1);
  const std::uint32_t older = blocks.begin();
  blocks.update(0, 2);
  const std::uint32_t newer = blocks.begin();
  blocks.update(0, 3);  // a second copy does not fit in addition to the first
  EXPECT_TRUE(blocks.reader().isLost(older));
  EXPECT_TRUE(blocks.read(older, 0).empty());
  EXPECT_TRUE(blocks.read(older, 1).empty());
  blocks.expect(newer, 0, 2);
  blocks.expect(newer, 3, 1);
  EXPECT_EQ(blocks.reader().statistics().numLost, 1U);
  EXPECT_EQ(blocks.reader().statistics().lostOf, 1U) << "client 0 has begun it, it says";
  EXPECT_EQ(blocks.residentBytes(), 4 * kPageBytes);
  blocks.reader().release(older);
  blocks.reader().release(newer);
  EXPECT_EQ(blocks.residentBytes(), 0U);
}

TEST(SnapshotPools, HoldTheLargestBlockWhateverTheirLimit) {
  Blocks blocks(0);
  const std::uint32_t snapshot = blocks.begin();
  blocks.update(0, 1);
  blocks.expect(snapshot, 0, 0);
  EXPECT_EQ(blocks.reader().statistics().limitBytes, 4 * kPageBytes);
}

TEST(SnapshotPools, DoNotHoldUpTheEndOfADevice) {
  Blocks blocks(4 * kPageBytes);
  const std::uint32_t snapshot = blocks.begin();
  blocks.update(0, 1);
  std::thread updating([&] { blocks.update(3, 2); });
  EXPECT_TRUE(eventually([&] { return blocks.reader().statistics().numWaits == 1; }));
  blocks.store(1).stopWaiting();
  updating.join();
  EXPECT_TRUE(blocks.reader().isLost(snapshot));
}

TEST(SnapshotPools, RefuseMemoryThatIsTooSmall) {
  Memory request(sizeof(SnapshotRequest)), control(SnapshotControl::numBytes(2)), pool(kPageBytes);
  const std::vector<std::size_t> blockBytes = {kPageBytes, kPageBytes};
  const auto make = [&](SnapshotFds fds) { SnapshotStore store(blockBytes, fds); };
  EXPECT_THROW(make({request.fd, control.fd, pool.fd}), std::invalid_argument);
  EXPECT_THROW(make({request.fd, request.fd, pool.fd}), std::invalid_argument);
}

// ---- everything at once ----

/// Lets a fixed number of threads pass together.
class Barrier {
 public:
  explicit Barrier(std::size_t count) : count_(count) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::size_t round = round_;
    if (++numWaiting_ == count_) {
      numWaiting_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round; });
  }

 private:
  std::size_t count_, numWaiting_ = 0, round_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
};

/// Two devices update all blocks in steps, as fast as they can, while a reader checks every snapshot that was
/// begun between two steps.
void train(std::size_t limitBytes, std::uint32_t numSteps, bool isWarm = false) {
  constexpr std::size_t kNumBlocks = 24;
  std::vector<std::size_t> blockBytes;
  for (std::size_t i = 0; i < kNumBlocks; ++i) blockBytes.push_back((i % 5 * 3000 + 64) / 4 * 4);
  Blocks blocks(limitBytes, milliseconds(30'000), blockBytes);
  for (std::size_t block = 0; isWarm && block < kNumBlocks; ++block) EXPECT_TRUE(blocks.reader().warm(block));
  const std::size_t takenAheadBytes = blocks.residentBytes();
  std::mutex mutex;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> begun;  // snapshot, and the step it was begun after
  std::atomic<bool> isOver{false};
  std::uint32_t numRead = 0;
  std::thread reader([&] {
    while (true) {
      const bool wasOver = isOver;
      std::pair<std::uint32_t, std::uint32_t> next{0, 0};
      {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!begun.empty()) {
          next = begun.front();
          begun.erase(begun.begin());
        }
      }
      if (next.first == 0 && wasOver) return;
      if (next.first == 0) continue;
      for (std::size_t block = 0; block < blocks.size(); ++block) {
        blocks.expect(next.first, block, next.second);
        blocks.reader().letGo(next.first, block);
      }
      blocks.reader().release(next.first);
      ++numRead;
    }
  });
  Barrier betweenSteps(2);
  together(2, [&](std::size_t device) {
    for (std::uint32_t step = 1; step <= numSteps; ++step) {
      for (std::size_t block = device; block < kNumBlocks; block += 2) blocks.update(block, step, device);
      betweenSteps.wait();
      if (device == 0) {
        if (const std::uint32_t snapshot = blocks.begin(); snapshot != 0) {
          const std::lock_guard<std::mutex> lock(mutex);
          begun.emplace_back(snapshot, step);
        }
      }
      betweenSteps.wait();
    }
  });
  isOver = true;
  reader.join();
  EXPECT_GE(numRead, 2U);
  const SnapshotStatistics statistics = blocks.reader().statistics();
  EXPECT_EQ(statistics.numLost, 0U);
  EXPECT_LE(statistics.peakBytes, std::max(limitBytes, std::size_t{4} * kPageBytes));
  EXPECT_EQ(statistics.takenBytes, 0U);
  EXPECT_EQ(blocks.residentBytes(), takenAheadBytes);
}

TEST(SnapshotRaces, UpdatesAndReadersMeetInMemoryThatWasTakenAhead) { train(kPlentyOfBytes, 300, true); }
TEST(SnapshotRaces, UpdatesAndReadersMeetAnywhere) { train(kPlentyOfBytes, 300); }
TEST(SnapshotRaces, UpdatesAndReadersMeetInASmallPool) { train(4 * kPageBytes, 300); }

TEST(SnapshotRaces, WorkersBeginSnapshotsAtOnce) {
  Blocks blocks;
  std::array<std::uint32_t, kMostSnapshots + 2> numbers{};
  together(numbers.size(), [&](std::size_t i) { numbers[i] = blocks.begin(); });
  std::sort(numbers.begin(), numbers.end());
  EXPECT_EQ(numbers, (std::array<std::uint32_t, kMostSnapshots + 2>{0, 0, 1, 2, 3, 4}));
}

}  // namespace
}  // namespace coarse::test::snapshot_test
