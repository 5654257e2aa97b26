/// Pacer: transfers arrive when the links of another machine would have carried them.
#include "coarse/emulation/pacer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <vector>

#include "fixture.hpp"

namespace coarse::test::pacer_test {
namespace {

constexpr std::size_t kMiB = 1 << 20;

/// Two endpoints, 10 us apart, 1 GB/s each way; a third one that shares the bucket from 0 to 1.
LinkTableValues twoLinks() {
  LinkTableValues values;
  values.gbytesPerSecond = {1, 1};
  values.paths.assign(3, std::vector<std::optional<PathValues>>(3));
  values.paths[0][1] = PathValues{10, {0}};
  values.paths[1][0] = PathValues{10, {1}};
  values.paths[2][1] = PathValues{0, {0}};
  values.paths[2][0] = PathValues{0, {0, 1}};
  return values;
}

class Pacing : public testing::Test {
 protected:
  explicit Pacing(LinkTableValues values = twoLinks())
      : memory_(Pacer::numBytes(values.paths.size(), values.gbytesPerSecond.size())) {
    Pacer::write(memory_.fd, values);
    pacer_ = std::make_unique<Pacer>(memory_.fd);
    begin_ = monotonicNow();
  }
  /// @returns when it arrives, counted from `begin_`, at which all of them are asked for.
  MonotonicNs arrival(std::size_t source, std::size_t target, std::size_t numBytes) {
    return pacer_->reserve(source, target, numBytes, begin_) - begin_;
  }
  Memory memory_;
  std::unique_ptr<Pacer> pacer_;
  MonotonicNs begin_ = 0;
};

TEST_F(Pacing, TakesTheTimeOfItsBytesAndTheLatency) {
  EXPECT_NEAR(arrival(0, 1, kMiB), 1'048'576 + 10'000, 1);
  EXPECT_NEAR(arrival(0, 1, kMiB), 2 * 1'048'576 + 10'000, 1) << "latencies overlap, bytes do not";
  EXPECT_NEAR(arrival(1, 0, kMiB), 1'048'576 + 10'000, 1) << "the other direction is free";
  EXPECT_NEAR(arrival(1, 0, 0), 10'000, 1) << "nothing to carry waits for nothing";
}

TEST_F(Pacing, APathThatDoesNotExistTakesNoTime) { EXPECT_EQ(arrival(1, 1, kMiB), 0); }

TEST_F(Pacing, PathsThatShareABucketShareItsRate) {
  MonotonicNs lastOfOne = 0, lastOfOther = 0;
  for (int i = 0; i < 100; ++i) {
    lastOfOne = arrival(0, 1, kMiB);
    lastOfOther = arrival(2, 1, kMiB);
  }
  EXPECT_NEAR(lastOfOne, 199 * 1'048'576 + 10'000, 200);
  EXPECT_NEAR(lastOfOther, 200 * 1'048'576, 200);
}

TEST_F(Pacing, TheSlowestBucketOfAPathDecides) {
  arrival(1, 0, 3 * kMiB);  // keeps bucket 1 busy
  EXPECT_NEAR(arrival(2, 0, kMiB), 4 * 1'048'576, 4);
}

TEST_F(Pacing, ManyThreadsGetTheRateAndNotMore) {
  constexpr std::size_t kNumThreads = 4, kPerThread = 5000, kBytes = 1000;
  std::vector<MonotonicNs> last(kNumThreads);
  together(kNumThreads, [&](std::size_t thread) {
    Pacer own(memory_.fd);
    for (std::size_t i = 0; i < kPerThread; ++i)
      last[thread] = std::max(last[thread], own.reserve(0, 1, kBytes, begin_));
  });
  const double expected = kNumThreads * kPerThread * kBytes + 10'000;
  const auto measured = static_cast<double>(*std::max_element(last.begin(), last.end()) - begin_);
  EXPECT_GE(measured, expected - 100);
  EXPECT_LE(measured, expected + 100);
  EXPECT_EQ(pacer_->statistics(0, 1).numBytes, kNumThreads * kPerThread * kBytes);
  EXPECT_EQ(pacer_->statistics(0, 1).numTransfers, kNumThreads * kPerThread);
}

TEST_F(Pacing, WhatIsNoticedLateCountsFromWhenItWasAskedFor) {
  ASSERT_TRUE(eventually([&] { return monotonicNow() - begin_ > 1'000'000; }));
  EXPECT_NEAR(arrival(0, 1, 1000), 11'000, 1);
}

TEST_F(Pacing, NeverCountsFromTheFutureOrFromLongAgo) {
  const MonotonicNs before = monotonicNow();
  const MonotonicNs due = pacer_->reserve(0, 1, 1000, before + 2'000'000'000);
  EXPECT_LE(due, monotonicNow() + 11'001);
  EXPECT_GE(pacer_->reserve(2, 0, 1000, before - 3'000'000'000), before - kLongestCreditNs + 1000);
}

TEST_F(Pacing, IdleTimeOfALinkIsNotSavedUp) {
  ASSERT_TRUE(eventually([&] { return monotonicNow() - begin_ > 1'000'000; }));
  const MonotonicNs now = monotonicNow();
  EXPECT_GE(pacer_->reserve(0, 1, kMiB, now), now + 1'048'576);
}

TEST_F(Pacing, AChangedLinkTakesEffectAtOnceForEverybody) {
  Pacer other(memory_.fd);
  arrival(0, 1, kMiB);
  other.setBandwidth(0, 0.5);
  EXPECT_NEAR(arrival(0, 1, kMiB), 3 * 1'048'576 + 10'000, 2);
  other.setLatency(0, 1, 100);
  EXPECT_NEAR(arrival(0, 1, 0), 100'000, 1);
}

TEST_F(Pacing, RefusesChangesThatCannotBe) {
  EXPECT_THROW(pacer_->setBandwidth(2, 1), std::invalid_argument);
  EXPECT_THROW(pacer_->setBandwidth(0, 0), std::invalid_argument);
  EXPECT_THROW(pacer_->setBandwidth(0, std::numeric_limits<double>::infinity()), std::invalid_argument);
  EXPECT_THROW(pacer_->setLatency(0, 1, -1), std::invalid_argument);
  EXPECT_THROW(pacer_->setLatency(0, 2, 1), std::invalid_argument) << "there is no such path";
  EXPECT_THROW(pacer_->setLatency(0, 3, 1), std::invalid_argument);
  EXPECT_THROW(pacer_->statistics(3, 0), std::invalid_argument);
}

class DilatedPacing : public Pacing {
 protected:
  static LinkTableValues dilated() {
    LinkTableValues values = twoLinks();
    values.timeDilation = 8;
    return values;
  }
  DilatedPacing() : Pacing(dilated()) {}
};

TEST_F(DilatedPacing, EverythingTakesThatMuchLonger) {
  EXPECT_NEAR(arrival(0, 1, kMiB), 8 * (1'048'576 + 10'000), 1);
  pacer_->setLatency(0, 1, 0);
  EXPECT_NEAR(arrival(0, 1, kMiB), 2 * 8 * 1'048'576, 2);
  EXPECT_EQ(pacer_->timeDilation(), 8);
}

TEST(TransferLog, KeepsTheFirstTransfersInEmulatedTime) {
  LinkTableValues values = twoLinks();
  values.timeDilation = 4;
  values.logCapacity = 2;
  const Memory memory(Pacer::numBytes(3, 2, values.logCapacity));
  Pacer::write(memory.fd, values);
  Pacer pacer(memory.fd);
  const MonotonicNs now = monotonicNow();
  pacer.reserve(0, 1, 1000, now, 7);
  pacer.reserve(0, 1, 1000, now, 8);
  pacer.reserve(0, 1, 1000, now, 9);
  const std::vector<Transfer> transfers = Pacer(memory.fd, Mapping::Access::kReadOnly).transfers();
  ASSERT_EQ(transfers.size(), 2U) << "there is no place for the third";
  EXPECT_EQ(transfers[0].tag, 7U);
  EXPECT_EQ(transfers[1].tag, 8U);
  EXPECT_EQ(transfers[1].source, 0U);
  EXPECT_EQ(transfers[1].target, 1U);
  EXPECT_EQ(transfers[1].numBytes, 1000U);
  EXPECT_NEAR(transfers[0].dueUs - transfers[0].beginUs, 1 + 10, 1e-3) << "1000 bytes at 1 GB/s, and 10 us";
  EXPECT_NEAR(transfers[1].beginUs, transfers[0].beginUs + 1, 1e-3) << "one after the other";
  EXPECT_NEAR(transfers[1].requestedUs, transfers[0].requestedUs, 1e-9);
}

/// A duplex link: each way 1 GB/s, both together 1.25 GB/s.
LinkTableValues duplexLink(double timeDilation) {
  LinkTableValues values;
  values.timeDilation = timeDilation;
  values.gbytesPerSecond = {1, 1, 1.25};
  values.paths.assign(2, std::vector<std::optional<PathValues>>(2));
  values.paths[0][1] = PathValues{10, {0, 2}};
  values.paths[1][0] = PathValues{5, {1, 2}};
  return values;
}

class ServedTransfers : public testing::Test {
 protected:
  ServedTransfers() : memory_(Pacer::numBytes(2, 3)) {
    Pacer::write(memory_.fd, duplexLink(4));
    pacer_ = std::make_unique<Pacer>(memory_.fd);
  }
  std::vector<ServedTransfer> served(double sinceUs = 0) const {
    return Pacer(memory_.fd, Mapping::Access::kReadOnly).served(sinceUs);
  }
  Memory memory_;
  std::unique_ptr<Pacer> pacer_;
};

TEST_F(ServedTransfers, TellHowLongEachLinkWasAtThem) {
  pacer_->reserve(0, 1, 1000, monotonicNow());
  const std::vector<ServedTransfer> transfers = served();
  ASSERT_EQ(transfers.size(), 1U);
  EXPECT_EQ(transfers[0].source, 0U);
  EXPECT_EQ(transfers[0].target, 1U);
  EXPECT_EQ(transfers[0].numBytes, 1000U);
  EXPECT_NEAR(transfers[0].latencyUs, 10, 1e-6);
  ASSERT_EQ(transfers[0].serviceUs.size(), 2U);
  EXPECT_EQ(transfers[0].serviceUs[1].first, 2U);
  EXPECT_NEAR(transfers[0].serviceUs[0].second, 1, 1e-6) << "of the machine, not dilated";
  EXPECT_NEAR(transfers[0].serviceUs[1].second, 0.8, 1e-6);
}

TEST_F(ServedTransfers, AreTheSameHoweverLongTheyWaitedForOthers) {
  const MonotonicNs now = monotonicNow();
  for (int i = 0; i < 1000; ++i) {
    pacer_->reserve(0, 1, 1000, now);
    pacer_->reserve(1, 0, 1000, now);
  }
  const std::vector<ServedTransfer> transfers = served();
  ASSERT_EQ(transfers.size(), 2 * kNewestOfClass);
  for (const ServedTransfer& each : transfers) {
    EXPECT_GT(each.endUs, 1000) << "one of the newest";
    EXPECT_NEAR(each.serviceUs[0].second, 1, 1e-6);
    EXPECT_NEAR(each.serviceUs[1].second, 0.8, 1e-6);
  }
}

TEST_F(ServedTransfers, ShowAChangedLinkAtOnce) {
  pacer_->reserve(0, 1, 1000, monotonicNow());
  const double sinceUs = served().at(0).endUs;
  pacer_->setBandwidth(2, 0.1);
  pacer_->reserve(0, 1, 1000, monotonicNow());
  const std::vector<ServedTransfer> transfers = served(sinceUs);
  ASSERT_EQ(transfers.size(), 1U) << "the one since then";
  EXPECT_NEAR(transfers[0].serviceUs[1].second, 10, 1e-5);
}

TEST_F(ServedTransfers, KeepLargeOnesBesideSmallOnes) {
  const MonotonicNs now = monotonicNow();
  pacer_->reserve(0, 1, kMiB, now);
  for (int i = 0; i < 100; ++i) pacer_->reserve(0, 1, 4096, now);
  pacer_->reserve(0, 1, 0, now);
  std::size_t numLarge = 0;
  for (const ServedTransfer& each : served()) {
    EXPECT_GT(each.numBytes, 0U) << "what carries nothing tells nothing";
    numLarge += each.numBytes == kMiB ? 1 : 0;
  }
  EXPECT_EQ(numLarge, 1U);
}

TEST_F(ServedTransfers, AreReadWholeWhileOthersWriteThem) {
  constexpr std::size_t kNumThreads = 3, kPerThread = 20'000;
  together(kNumThreads, [&](std::size_t thread) {
    Pacer own(memory_.fd);
    for (std::size_t i = 0; i < kPerThread; ++i) {
      if (thread < 2) {
        own.reserve(0, 1, 4096 << thread, monotonicNow());
      } else if (i % 100 == 0) {
        for (const ServedTransfer& each : own.served(0))
          ASSERT_NEAR(each.serviceUs[0].second, static_cast<double>(each.numBytes) * 1e-3, 1e-3);
      }
    }
  });
}

TEST(LinkTables, RefuseWhatCannotBe) {
  const Memory memory(Pacer::numBytes(3, 2)), small(64), empty(4096);
  const auto refused = [&](auto change) {
    LinkTableValues values = twoLinks();
    change(values);
    EXPECT_THROW(Pacer::write(memory.fd, values), std::invalid_argument);
  };
  EXPECT_NO_THROW(Pacer::write(memory.fd, twoLinks()));
  EXPECT_THROW(Pacer::write(small.fd, twoLinks()), std::invalid_argument);
  EXPECT_THROW(Pacer{empty.fd}, std::invalid_argument);
  refused([](LinkTableValues& values) { values.timeDilation = 0; });
  refused([](LinkTableValues& values) { values.gbytesPerSecond[1] = -1; });
  refused([](LinkTableValues& values) { values.paths.pop_back(); });
  refused([](LinkTableValues& values) { values.paths[0][1]->latencyUs = -1; });
  refused([](LinkTableValues& values) { values.paths[0][1]->buckets = {2}; });
  refused([](LinkTableValues& values) { values.paths[0][1]->buckets.assign(9, 0); });
}

TEST(TimeStamps, TellWhatWasSecondsAgo) {
  const MonotonicNs now = (MonotonicNs{5} << 32) + 7;
  for (const MonotonicNs ago : {MonotonicNs{0}, MonotonicNs{1}, MonotonicNs{8}, MonotonicNs{4'000'000'000}})
    EXPECT_EQ(timeOf(stampOf(now - ago), now), now - ago);
}

}  // namespace
}  // namespace coarse::test::pacer_test
