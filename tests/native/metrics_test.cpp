/// Metrics in shared memory: every value has its own place and is exact, and counting costs little.
#include "coarse/shared_memory/metrics.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "coarse/client/client.hpp"
#include "fixture.hpp"

namespace coarse::test::metrics_test {
namespace {

using namespace std::chrono_literals;

std::size_t numCells(const MetricsLayout& layout, Metric metric) {
  return layout.numSeries(metric) * MetricsLayout::cellsPerSeries(metric);
}

TEST(Metrics, HaveAPlaceInTheTableByTheirNumber) {
  std::set<std::string> names;
  for (std::size_t i = 0; i < kNumMetrics; ++i) {
    EXPECT_EQ(static_cast<std::size_t>(kMetrics[i].metric), i) << kMetrics[i].name;
    names.insert(kMetrics[i].name);
  }
  EXPECT_EQ(names.size(), kNumMetrics);
}

TEST(Metrics, EachCellOfASegmentHoldsItsOwnValue) {
  constexpr std::size_t kDevices = 3, kClients = 2;
  const Memory memory(MetricsSegment::numBytes(kDevices, kClients));
  const MetricsSegment segment(memory.fd, kDevices, kClients);
  std::vector<ProcessMetrics> processes;
  for (std::size_t device = 0; device < kDevices; ++device) processes.push_back(segment.device(device));
  for (std::size_t client = 0; client < kClients; ++client) processes.push_back(segment.client(client));
  const auto forEachSeries = [&](auto visit) {
    std::uint64_t number = 0;
    for (const ProcessMetrics& metrics : processes) {
      for (const MetricDeclaration& each : kMetrics) {
        if (each.kind == MetricKind::kHistogram) continue;
        for (std::size_t i = 0; i < metrics.layout().numSeries(each.metric); ++i)
          visit(metrics, each.metric, i, ++number);
      }
    }
  };
  forEachSeries([](const ProcessMetrics& metrics, Metric metric, std::size_t series, std::uint64_t number) {
    metrics.set(metric, number, series);
  });
  for (const ProcessMetrics& metrics : processes) {
    for (std::size_t cause = 0; cause < kNumWaitCauses; ++cause)
      metrics.observe(Metric::kWaitSeconds, 1s, cause);
  }
  forEachSeries([](const ProcessMetrics& metrics, Metric metric, std::size_t series, std::uint64_t number) {
    EXPECT_EQ(metrics.read(metric, series), number);
  });
  EXPECT_EQ(numCells(MetricsLayout(kDevices), Metric::kPushedBytes), kDevices * kNumWays);
  EXPECT_THROW(segment.device(kDevices), std::out_of_range);
  EXPECT_THROW(segment.client(kClients), std::out_of_range);
  EXPECT_THROW(MetricsSegment(memory.fd, kDevices, kClients + 1), std::invalid_argument);
}

TEST(Metrics, NumbersOfLabelsAreThoseOfTheirValues) {
  EXPECT_EQ(valuesOf(MetricLabel::kCause).size(), kNumWaitCauses);
  EXPECT_EQ(valuesOf(MetricLabel::kAlgorithm).size(), kNumWays);
  EXPECT_STREQ(valuesOf(MetricLabel::kAlgorithm)[kByWorkers], "workers");
  EXPECT_STREQ(valuesOf(MetricLabel::kAlgorithm)[kUpdateByMean], "update");
  EXPECT_STREQ(valuesOf(MetricLabel::kAlgorithm)[static_cast<std::size_t>(Algorithm::kExchange)], "exchange");
  EXPECT_STREQ(valuesOf(MetricLabel::kCause)[static_cast<std::size_t>(WaitCause::kQueue)], "queue");
}

TEST(Metrics, ADurationGoesToTheFirstBucketThatHoldsIt) {
  const Memory memory(MetricsSegment::numBytes(1, 1));
  const ProcessMetrics metrics = MetricsSegment(memory.fd, 1, 1).client(0);
  metrics.observe(Metric::kStepSeconds, 10us);  // on the bound of bucket 0
  metrics.observe(Metric::kStepSeconds, 10001ns);
  metrics.observe(Metric::kStepSeconds, 101s);  // beyond all bounds
  metrics.observe(Metric::kStepSeconds, -1ns);  // no clock goes backwards; counted as 0
  EXPECT_EQ(metrics.read(Metric::kStepSeconds, 0, 0), 2u);
  EXPECT_EQ(metrics.read(Metric::kStepSeconds, 0, 1), 1u);
  EXPECT_EQ(metrics.read(Metric::kStepSeconds, 0, kBucketBounds.size()), 1u);
  EXPECT_EQ(metrics.read(Metric::kStepSeconds, 0, kHistogramCells - 1), 101'000'020'001u);
}

TEST(Metrics, CountsOfManyThreadsAreExact) {
  constexpr std::uint64_t kTimes = 10000;
  const Memory memory(MetricsSegment::numBytes(1, 1));
  together(4, [&](std::size_t) {
    const ProcessMetrics metrics = MetricsSegment(memory.fd, 1, 1).client(0);
    for (std::uint64_t i = 0; i < kTimes; ++i) {
      metrics.add(Metric::kPushedBytes, 3);
      metrics.observe(Metric::kStepSeconds, 1ms);
    }
  });
  const ProcessMetrics metrics = MetricsSegment(memory.fd, 1, 1).client(0);
  EXPECT_EQ(metrics.read(Metric::kPushedBytes), 4 * kTimes * 3);
  EXPECT_EQ(metrics.read(Metric::kStepSeconds, 0, kHistogramCells - 1), 4 * kTimes * 1'000'000);
}

TEST(Metrics, AProcessWithoutMemoryCountsNothing) {
  const ProcessMetrics metrics;
  metrics.add(Metric::kSamples, 1);
  metrics.set(Metric::kWorldSize, 1);
  metrics.observe(Metric::kStepSeconds, 1s);
  EXPECT_EQ(metrics.read(Metric::kSamples), 0u);
}

TEST(Metrics, CountWhatClientsPushAndDevicesReduce) {
  constexpr std::uint32_t kSteps = 5;
  Cluster cluster({2, 2, 1});
  const GroupPlan plan =
      makePlan(1, 2, {{1000, DType::kFloat32, ReduceOp::kSum, Algorithm::kDirect}, {10}}, 100);
  cluster.addGroup(plan);
  cluster.start();
  together(2, [&](std::size_t rank) {
    cluster.client(rank).setRoutes(1, std::vector<std::uint16_t>(11, static_cast<std::uint16_t>(rank)));
    for (std::uint32_t step = 0; step < kSteps; ++step) {
      ASSERT_EQ(cluster.client(rank).push(1, 0, kPresent, nullptr), WaitStatus::kDone);
      ASSERT_EQ(cluster.client(rank).push(1, 1, 0, nullptr), WaitStatus::kDone);  // contributes nothing
      ASSERT_EQ(cluster.client(rank).pullAll(1, kPatienceSeconds), WaitStatus::kDone);
    }
  });
  const MetricsSegment segment = cluster.metrics();
  const auto direct = static_cast<std::size_t>(Algorithm::kDirect);
  std::uint64_t numTaken = 0, numReduced = 0, reducedBytes = 0;
  for (std::size_t i = 0; i < 2; ++i) {
    const ProcessMetrics client = segment.client(i), device = segment.device(i);
    EXPECT_EQ(client.read(Metric::kPushedBytes, i * kNumWays + direct), kSteps * 4000u);
    EXPECT_EQ(client.read(Metric::kPushedShards, i * kNumWays + direct), kSteps * 11u);
    EXPECT_EQ(client.read(Metric::kPushedShards, (1 - i) * kNumWays + direct), 0u) << "not its device";
    std::uint64_t numSteps = 0;
    for (std::size_t bucket = 0; bucket + 1 < kHistogramCells; ++bucket)
      numSteps += client.read(Metric::kStepSeconds, 0, bucket);
    EXPECT_EQ(numSteps, kSteps - 1) << "the first step has no begin";
    EXPECT_GT(device.read(Metric::kSyncCoreBusySeconds), 0u);
    EXPECT_EQ(device.read(Metric::kSyncCores), 1u);
    numTaken += device.read(Metric::kTakenShards);
    numReduced += device.read(Metric::kReducedShards, direct);
    reducedBytes += device.read(Metric::kReducedBytes, direct);
  }
  EXPECT_EQ(numTaken, 2 * kSteps * 11u);
  EXPECT_EQ(numReduced, kSteps * 11u);
  EXPECT_EQ(reducedBytes, kSteps * 4040u);
}

/// What one shard pays on its way: two values of the worker, three of the memory device. The bound of 1 us is
/// for any machine; the fastest of many rounds is compared with it, and printed.
TEST(Metrics, AShardPaysLessThanAMicrosecond) {
  constexpr int kShards = 1000, kRounds = 50;
  const Memory memory(MetricsSegment::numBytes(2, 1));
  const MetricsSegment segment(memory.fd, 2, 1);
  const ProcessMetrics worker = segment.client(0), device = segment.device(0);
  double bestNs = std::numeric_limits<double>::max();
  for (int round = 0; round < kRounds; ++round) {
    const auto began = std::chrono::steady_clock::now();
    for (std::size_t shard = 0; shard < kShards; ++shard) {
      const std::size_t series = shard % 2 * kNumWays + static_cast<std::size_t>(Algorithm::kDirect);
      worker.add(Metric::kPushedShards, 1, series);
      worker.add(Metric::kPushedBytes, 1 << 20, series);
      device.add(Metric::kTakenShards, 1);
      device.add(Metric::kReducedShards, 1, series % kNumWays);
      device.add(Metric::kReducedBytes, 1 << 20, series % kNumWays);
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
    bestNs = std::min(bestNs, took.count() / kShards);
  }
  RecordProperty("nanoseconds_per_shard", std::to_string(bestNs));
  std::printf("%.1f ns a shard\n", bestNs);
  EXPECT_LT(bestNs, 1000);
}

}  // namespace
}  // namespace coarse::test::metrics_test
