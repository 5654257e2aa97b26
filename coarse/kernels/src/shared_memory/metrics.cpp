#include "coarse/shared_memory/metrics.hpp"

#include <algorithm>
#include <stdexcept>

namespace coarse {
namespace {

using Kind = MetricKind;
using Unit = MetricUnit;
using Owner = MetricOwner;
using Label = MetricLabel;

}  // namespace

const std::array<MetricDeclaration, kNumMetrics> kMetrics = {{
    {Metric::kPushedBytes,
     "coarse_pushed_bytes_total",
     Kind::kCounter,
     Unit::kBytes,
     Owner::kWorker,
     {Label::kDevice, Label::kAlgorithm},
     "Bytes of gradients and buffers that the worker contributed, by the memory device that takes them and "
     "by "
     "the algorithm that reduces them"},
    {Metric::kPushedShards,
     "coarse_pushed_shards_total",
     Kind::kCounter,
     Unit::kNumber,
     Owner::kWorker,
     {Label::kDevice, Label::kAlgorithm},
     "Shards that the worker announced to the memory device, with or without a contribution"},
    {Metric::kStepSeconds,
     "coarse_step_seconds",
     Kind::kHistogram,
     Unit::kSeconds,
     Owner::kWorker,
     {},
     "Time from a step's first push of the largest tensor group to the next step's"},
    {Metric::kWaitSeconds,
     "coarse_wait_seconds",
     Kind::kHistogram,
     Unit::kSeconds,
     Owner::kWorker,
     {Label::kCause},
     "Time that the worker was blocked, by what it waited for; calls that need not wait are not counted"},
    {Metric::kOptimizerSeconds,
     "coarse_optimizer_seconds",
     Kind::kHistogram,
     Unit::kSeconds,
     Owner::kWorker,
     {},
     "Time of the optimizer's steps in the worker, where the framework tells them; not of those in memory "
     "devices"},
    {Metric::kSamples,
     "coarse_samples_total",
     Kind::kCounter,
     Unit::kNumber,
     Owner::kWorker,
     {},
     "Samples that the worker trained on, where the script or the framework counts them"},
    {Metric::kWorldSize,
     "coarse_world_size",
     Kind::kGauge,
     Unit::kNumber,
     Owner::kWorker,
     {},
     "Workers of the job"},
    {Metric::kRestarts,
     "coarse_restarts",
     Kind::kGauge,
     Unit::kNumber,
     Owner::kWorker,
     {},
     "Restarts of the job's workers before this attempt"},
    {Metric::kReplans,
     "coarse_replans_total",
     Kind::kCounter,
     Unit::kNumber,
     Owner::kWorker,
     {},
     "Changes of routes and of dual synchronisation during training"},
    {Metric::kRefusedRoutes,
     "coarse_refused_routes_total",
     Kind::kCounter,
     Unit::kNumber,
     Owner::kWorker,
     {},
     "Registrations that memory devices refused and that were tried again with simpler routes"},
    {Metric::kCheckpointSaves,
     "coarse_checkpoint_saves_total",
     Kind::kCounter,
     Unit::kNumber,
     Owner::kWorker,
     {Label::kOutcome},
     "Saves of checkpoints by their outcome; skipped if the save before took until the next one was due"},
    {Metric::kCheckpointWrittenBytes,
     "coarse_checkpoint_written_bytes_total",
     Kind::kCounter,
     Unit::kBytes,
     Owner::kWorker,
     {},
     "Bytes of the checkpoints that were saved, written to disk by the worker or its memory devices"},
    {Metric::kCheckpointSaveSeconds,
     "coarse_checkpoint_save_seconds",
     Kind::kHistogram,
     Unit::kSeconds,
     Owner::kWorker,
     {},
     "Time until a checkpoint was on disk; training goes on meanwhile"},
    {Metric::kTakenShards,
     "coarse_taken_shards_total",
     Kind::kCounter,
     Unit::kNumber,
     Owner::kDevice,
     {},
     "Announced shards that the memory device has taken from its queues"},
    {Metric::kReducedBytes,
     "coarse_reduced_bytes_total",
     Kind::kCounter,
     Unit::kBytes,
     Owner::kDevice,
     {Label::kAlgorithm},
     "Bytes of the results that the memory device finished, counted for one worker"},
    {Metric::kReducedShards,
     "coarse_reduced_shards_total",
     Kind::kCounter,
     Unit::kNumber,
     Owner::kDevice,
     {Label::kAlgorithm},
     "Shards that the memory device finished"},
    {Metric::kSyncCoreBusySeconds,
     "coarse_sync_core_busy_seconds_total",
     Kind::kCounter,
     Unit::kSeconds,
     Owner::kDevice,
     {},
     "Time in which sync cores worked, summed over the cores; its rate divided by coarse_sync_cores is their "
     "busy share"},
    {Metric::kSyncCores,
     "coarse_sync_cores",
     Kind::kGauge,
     Unit::kNumber,
     Owner::kDevice,
     {},
     "Sync cores of the memory device"},
    {Metric::kMemoryBytes,
     "coarse_memory_bytes",
     Kind::kGauge,
     Unit::kBytes,
     Owner::kDevice,
     {},
     "Memory that the memory device has reserved for registered tensors, their parameters and states"},
    {Metric::kWorkersPresent,
     "coarse_workers",
     Kind::kGauge,
     Unit::kNumber,
     Owner::kDevice,
     {},
     "Workers of the node that have joined the memory device and not left it"},
    {Metric::kFailures,
     "coarse_failures_total",
     Kind::kCounter,
     Unit::kNumber,
     Owner::kDevice,
     {Label::kFailure},
     "Failures that ended an attempt, as the memory device learned of them"},
    {Metric::kNodeSentBytes,
     "coarse_node_sent_bytes_total",
     Kind::kCounter,
     Unit::kBytes,
     Owner::kDevice,
     {},
     "Bytes that the memory device sent to other nodes"},
    {Metric::kNodeReceivedBytes,
     "coarse_node_received_bytes_total",
     Kind::kCounter,
     Unit::kBytes,
     Owner::kDevice,
     {},
     "Bytes that the memory device received from other nodes"},
    {Metric::kSnapshotPoolBytes,
     "coarse_snapshot_pool_bytes",
     Kind::kGauge,
     Unit::kBytes,
     Owner::kDevice,
     {},
     "Memory of old versions to which snapshots refer"},
    {Metric::kSnapshotPoolLimitBytes,
     "coarse_snapshot_pool_limit_bytes",
     Kind::kGauge,
     Unit::kBytes,
     Owner::kDevice,
     {},
     "Limit of that memory"},
    {Metric::kSnapshotsLost,
     "coarse_snapshots_lost_total",
     Kind::kCounter,
     Unit::kNumber,
     Owner::kDevice,
     {},
     "Snapshots that were given up because their pool was full"},
    {Metric::kSnapshotWaits,
     "coarse_snapshot_waits_total",
     Kind::kCounter,
     Unit::kNumber,
     Owner::kDevice,
     {},
     "Updates that waited for room in the pool of old versions"},
    {Metric::kSnapshotWaitSeconds,
     "coarse_snapshot_wait_seconds_total",
     Kind::kCounter,
     Unit::kSeconds,
     Owner::kDevice,
     {},
     "Time of these waits"},
}};

std::vector<const char*> valuesOf(MetricLabel label) {
  switch (label) {
    case Label::kAlgorithm:
      return {"gather", "direct", "ring", "exchange", "probe", "nccl", "workers", "update"};
    case Label::kCause:
      return {"results", "all_reduce", "queue", "probe", "background", "request"};
    case Label::kOutcome:
      return {"saved", "failed", "skipped"};
    case Label::kFailure:
      return {"worker_lost", "device_lost", "mismatch", "other"};
    case Label::kDevice:
    case Label::kNone:
      break;
  }
  return {};
}

MetricsLayout::MetricsLayout(std::size_t numDevices) noexcept : numDevices_(numDevices) {
  for (std::size_t i = 0; i < kNumMetrics; ++i) {
    const auto metric = static_cast<Metric>(i);
    first_[i + 1] = static_cast<std::uint32_t>(first_[i] + numSeries(metric) * cellsPerSeries(metric));
  }
}

std::size_t MetricsLayout::numSeries(Metric metric) const noexcept {
  std::size_t count = 1;
  for (const MetricLabel label : kMetrics[static_cast<std::size_t>(metric)].labels) {
    if (label == Label::kDevice) count *= numDevices_;
    if (const std::size_t values = valuesOf(label).size(); values > 0) count *= values;
  }
  return count;
}

void ProcessMetrics::observe(Metric metric, std::chrono::nanoseconds duration,
                             std::size_t series) const noexcept {
  if (cells_ == nullptr) return;
  const auto value = static_cast<std::uint64_t>(std::max<std::int64_t>(0, duration.count()));
  const auto bucket = static_cast<std::size_t>(
      std::lower_bound(kBucketBounds.begin(), kBucketBounds.end(), value) - kBucketBounds.begin());
  Cell* const cells = cells_ + layout_.first(metric) + series * kHistogramCells;
  cells[bucket].fetch_add(1, std::memory_order_relaxed);
  cells[kHistogramCells - 1].fetch_add(value, std::memory_order_relaxed);
}

MetricsSegment::MetricsSegment(int fd, std::size_t numDevices, std::size_t numClients)
    : numDevices_(numDevices),
      numClients_(numClients),
      layout_(numDevices),
      memory_(std::make_shared<Mapping>(
          mapSealed(fd, numBytes(numDevices, numClients), Mapping::Access::kReadWrite, "metrics"))) {}

ProcessMetrics MetricsSegment::device(std::size_t device) const {
  if (device >= numDevices_) throw std::out_of_range("metrics of a memory device that does not exist");
  return process(device);
}

ProcessMetrics MetricsSegment::client(std::size_t client) const {
  if (client >= numClients_) throw std::out_of_range("metrics of a worker that does not exist");
  return process(numDevices_ + client);
}

ProcessMetrics MetricsSegment::process(std::size_t number) const {
  return {memory_, number * layout_.numBytes(), layout_};
}

}  // namespace coarse
